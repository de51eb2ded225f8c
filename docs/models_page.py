"""docs/models.md: the architectures that load_model takes, read from the registry."""
import sys

from ggjit.models.families.registry import DECODERS, DIFFUSERS, DRAFTERS, ENCODERS
from ggjit.models.text.pre_tokenizers import BY_NAME
from ggjit.models.text.tokenizer import KINDS

HEAD = """\
# Models

`python docs/generate.py` writes this page from the descriptions of the networks in `models/families/`. A test fails if
the page is out of date.

`load_model("model.gguf")` loads files of the architectures below. The file names its architecture in the key
`general.architecture`. For any other architecture `load_model` raises an error that lists the supported ones. If a
file has tensors or settings that the network of its architecture does not use, `load_model` raises an error that names
them ([How to](how-to.md#run-a-model)). `qwen4exp` is not supported, because llama.cpp's source says that its own
implementation of this architecture is not a reference.

| method | models | result |
|---|---|---|
| `m.logits(ids)`, `m.decode(ids)`, `m.generate(prompt)` | decoders | logits; logits of a text that grows; new text |
| `m.embed(texts)` | encoders; decoders whose file names a pooling, or loaded with `load_model(path, pooling="last")` \
| one vector for each text |
| `m.rerank(query, texts)` | files with a classifier | a score for each text ([How to](how-to.md#find-texts)) |
| `m.hidden(ids)` | all | the last hidden states, (n_tokens, dim), neither pooled nor normalised |
| `m.encode(text)`, then `m.decode(ids)` | T5 | the encoder reads `text`; the decoder generates the answer. \
`m.generate(text)` does both |
"""

DIFFUSION = """\
## Diffusion models

`m.generate(prompt, n_predict=64, steps=32)` generates all tokens of an answer at once. At first every token of the
answer is a mask token. Each step replaces the masks at which the model is most certain. `models/text/diffusion.py`
describes the schedules (`eps`, `block_length`), the algorithms and guidance. In `m.logits(ids)` and `m.hidden(ids)`
every token attends to the whole text.
"""

DRAFTING = """\
## Draft models that read their target's layers

A draft model proposes tokens for the model that it was trained for (speculative decoding):
`m.generate(prompt, speculative=load_model("eagle3.gguf"))`
([Several tokens at a time](contexts.md#several-tokens-at-a-time)). It reads the results of that model's layers, so it
cannot run alone. DFlash files with DeepSeek V4's blocks are not supported; the error names them.
"""

TEXT = """\
## Tokenizers

The key `tokenizer.ggml.model` of a file names its kind of tokenizer; the table lists the kinds that ggjit supports. A
model with another kind loads and takes token ids, but raises an error when it should encode text.

"""

TEXT_RULES = """\

For byte-pair encodings, the key `tokenizer.ggml.pre` names the rule that splits a text into words. These names are
supported; the names on one line have the same rule:

{groups}

- `m.tokenize(text)` returns the ids, with BOS and EOS where the model's file asks for them. With `special=True`, a text
  such as "<|im_end|>" becomes the control token of that name; do not use `special=True` with text you do not trust.
- `m.detokenize(ids)` returns what llama.cpp's `llama_detokenize` returns, with one difference: if the ids begin with
  BOS, the space before the first word is removed.
- `m.tokenizer.stream()` decodes ids one by one and returns only whole UTF-8 characters.
- A test compares ids, token texts and decoded texts with llama.cpp's, on 1,000 texts for every value of
  `tokenizer.ggml.pre` above and every tokenizer model, and on 10,000 texts for 25 of them
  (`tests/models/test_tokenizer_kinds.py`; `pytest -m slow` uses 10,000 for all). The texts contain characters of all
  Unicode planes, source code, control characters, long runs of one character and special tokens.
- The time to tokenize grows linearly with the length of a text, also for a run of equal characters.
- In `llama`, `t5`, `rwkv` and `plamo2` vocabularies, text never becomes a control token unless `special=True`. In
  llama.cpp it may.
- Where llama.cpp's `bert` tokenizer differs from BERT's own, ggjit follows BERT: it keeps spacing combining marks
  (Unicode category Mc, as in Devanagari), and it replaces a word of more than 100 characters by `[UNK]`.
- `whitespace` vocabularies decode to the texts of the tokens.
- If a file's vocabulary is damaged, the model raises an error that names the fault when it first tokenizes text. Faults
  are a token that occurs twice, missing merges, an id outside the vocabulary, or a damaged charsmap. Text with lone
  surrogates is an error, too.
- If a `gpt2` file names no BOS and EOS, ggjit uses none. llama.cpp then uses token 11 for both.

"""

CHECKED = """\
## How they were checked

For every architecture, and for variants of some (RoPE scalings, experts, windows, fused tensors), a test writes a small
file of random weights and loads it in llama.cpp and in ggjit, with F32 weights, an F32 cache and no flash attention
(`tests/models/test_architectures.py`; `pytest -m slow` runs all of them). The test compares the logits of a text, read
in batches and token by token.

| limit of the difference | applies to |
|---|---|
| four times the difference between llama.cpp's own results in batches and token by token | decoders |
| four times the difference between llama.cpp's results with the weights and with every weight moved by one float32 \
step | encoders |
| 3e-4 of the largest number, if that is more | both |

For architectures with recurrent states, experts or sliding windows, another test checks that a change of any tensor of
the file changes the logits (`tests/models/test_kept.py`). `python -m benchmarks.families` measures speed beside
llama.cpp on the same files ([results](../benchmarks/results/families.md)).

### Where ggjit differs from llama.cpp

| architecture | ggjit | llama.cpp |
|---|---|---|
| all with GELU | computes the formula | looks GELU up in an F16 table, up to 2e-3 off; the test uses the table |
| bert | exact GELU (erf), as trained | the tanh form |
| chameleon | never generates picture tokens | masks them in the first of several rows only |
| dream, llada, llada-moe, rnd1 | the lowest entropy counts as most certain, as in Dream; temperature 0 takes the \
likeliest token | its example takes the highest entropy and samples at temperature 1 for temperature 0 |
| gemma3n | the cutoff of gates divides the variance by n, as trained, and is read from the file | divides by n - 1 \
and uses the released models' cutoffs for every file |
| mellum | reads the RoPE base of window layers from the file | uses the base of the other layers |
| minicpm | a file without scales: divides logits by `n_embd` / 256, as trained | multiplies by it |
| qwen2vl | reads the epsilon of the norms | leaves it out |
| t5 | a file without an output matrix: divides logits by the root of `n_embd`, as trained | does not divide |
| gptj | a network; the test compares it with transformers' formulas in NumPy | has the name, but no network |

### Where ggjit does the same as llama.cpp, though a file or paper may say otherwise

- phi3 attends to all tokens, also if its file names a sliding window.
- llama4 attends in chunks of 8192 tokens, which its files do not say.
- grok's router has no soft cap.
- jina-bert-v3 and nomic-bert-moe use the tanh form of GELU.
- hrm_text reads a prompt like other text, also if its file says `hrm.prefix_lm`.

### What is not supported

- `rope.scaling.type` may be none, linear or yarn; longrope only for llama, granite, deci, phi3, phimoe, minicpm and
  minicpm3.
- Extra layers that predict later tokens (`nextn_predict_layers`) are not part of the network. With
  `m.generate(prompt, speculative="mtp")` the extra layers of glm4moe, deepseek2 and hy_v3 draft tokens. Other
  architectures' extra layers are ignored.
- kimi-linear, kimi-k3 and bailingmoe3 need the tensors `attn_k_b` and `attn_v_b`. Files with `attn_kv_b` instead raise
  an error.
- cogvlm is a text model here: ggjit ignores its matrices for pictures. [Vision](vision.md) lists the models that read
  pictures. In a text, the components of an M-RoPE position are equal, and a fourth component is 0 (qwen2vl, qwen3vl,
  qwen3vlmoe, qwen35, qwen35moe, hunyuan_vl, paddleocr, deepseek2-ocr, glm-dsa, deepseek32, bailingmoe3).
- deepseek32 and glm-dsa omit the Hadamard rotation in their indexer, because it does not change the indexer's scores.

[Contexts](contexts.md#what-it-takes) says how much memory window layers and recurrent layers need for each text.
Layers of gemma3n and gemma4 that reuse keys and values of earlier layers store none.

## How to add one

A description is a function that takes the file's metadata and returns the blocks of each layer (`models/blocks/`).
For example, Qwen 3 is LLaMA with an RMS norm on the query and key of every head:

```python
from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.hparams import ROPE_NEOX
from ggjit.models.blocks.feed_forward import Dense

def qwen3(hparams):
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), qk_norm="rms")
    return Description([Block(attention, Dense(hparams.n_ff, bias=False))] * hparams.n_layer, hparams.eps())
```
"""


def _about(file):
    """The first sentence of a file's docstring."""
    return " ".join(sys.modules[file].__doc__.split("\n\n")[0].split())


def _table(descriptions):
    by_file = {}
    for name, describe in descriptions.items():
        by_file.setdefault(describe.__module__, []).append(f"`{name}`")
    return ["| file | architectures | about |", "|---|---|---|",
            *(f"| `models/families/{file.rpartition('.')[2]}.py` | {', '.join(names)} | {_about(file)} |"
              for file, names in by_file.items())]


def _tokenizers():
    kinds = ["| model | file | about |", "|---|---|---|",
             *(f"| `{model}` | `models/text/{kind.__module__.rpartition('.')[2]}.py` | {_about(kind.__module__)} |"
               for model, kind in KINDS.items())]
    groups = {}
    for name, pre in BY_NAME.items():
        groups.setdefault(pre, []).append(f"`{name}`")
    rules = TEXT_RULES.format(groups="\n".join(f"- {' '.join(names)}" for names in groups.values()))
    return TEXT + "\n".join(kinds) + "\n" + rules


def page():
    n = len(DECODERS) + len(ENCODERS) + len(DIFFUSERS) + len(DRAFTERS)
    return "\n".join([HEAD, f"## Decoders\n\n{len(DECODERS)} of the {n} architectures are decoders, which predict the "
                      "next token. The table names the file\nthat describes their networks.\n", *_table(DECODERS), "",
                      "## Encoders\n\nEncoders return a vector for each token or each text.\n", *_table(ENCODERS), "",
                      DIFFUSION, *_table(DIFFUSERS), "",
                      DRAFTING, *_table(DRAFTERS), "",
                      _tokenizers() + CHECKED])
