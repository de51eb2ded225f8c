"""Networks that write all tokens of an answer at once: an encoder with logits; models/text/diffusion.py is their loop.

    logits = Wout norm x        of the tokens that are asked for, where all see each other
"""
import numpy as np

import ggjit as gg
from ggjit.core.arguments import typed_methods
from ggjit.models.core.other_options import GENERATION, takes_other_names
from ggjit.models.families.registry import DIFFUSERS
from ggjit.models.networks.texts.encoder import HIDDEN, Encoder
from ggjit.models.text.chat_template import chat_prompt
from ggjit.models.text.diffusion import Diffusion
from ggjit.ops.core.errors import ModelError

LOGITS = "logits"
BLOCKS = "llada", "llada-moe"           # families trained to write one block after the other
BLOCK = 32                              # tokens of their blocks
EPS = 1e-3                              # where the others' schedule ends


@typed_methods
class Diffuser(Encoder):
    """`m.generate(prompt)`, `m.chat(messages)`, `m.logits(ids)`, `m.hidden(ids)`."""
    FAMILIES, POOLING = DIFFUSERS, "none"
    AT_ONCE = True

    def _load_output(self, loader):
        self.out = self.embd
        if loader.has("output.weight"):
            self.out = loader.want("output.weight", self.n_embd, self.n_vocab)
            self._products.append(self.out)

    def _build(self, ctx, shape):
        """shape: (tokens, LOGITS, how many of them have logits), or one of Encoder's."""
        if shape[1:2] != (LOGITS,):
            return super()._build(ctx, shape)
        n_tokens, _, n_out = shape
        inputs, x = super()._build(ctx, (n_tokens, HIDDEN))
        if n_out < n_tokens:
            inputs["out_rows"] = np.zeros(n_out, np.int32)
            x = gg.get_rows(x, gg.from_numpy(ctx, inputs["out_rows"], "out_rows"))
        return inputs, gg.set_name(gg.mul_mat(self.out, x), "logits")

    def logits(self, ids):
        """(n, n_vocab) float32: logits at every one of `ids`, or of a text's tokens, each of which sees all others.

        Errors: ParamError for weights that are NaN, IndexRangeError for ids outside the vocabulary.
        """
        ids = self._checked_ids(ids, self.n_ctx)
        return self.logits_at(ids, np.arange(len(ids)))

    def logits_at(self, ids, rows):
        """(len(rows), n_vocab) float32: logits at these of `ids`, all of which are checked.

        Rows are padded up to a power of two, so that few plans serve any number of them.
        """
        n_tokens, n = len(ids), len(rows)
        n_out = min(1 << (n - 1).bit_length(), n_tokens)
        with self._lock:
            step = self._step((n_tokens, LOGITS, n_out))
            step.inputs["tokens"][:] = ids
            if n_out < n_tokens:
                step.inputs["out_rows"][:n], step.inputs["out_rows"][n:] = rows, rows[-1]
            found = step.run().reshape(n_out, self.n_vocab)
            return self._finite(found[rows] if n_out == n_tokens else found[:n].copy(), "the logits")

    @property
    def mask_id(self):
        """The token that stands for one that is not decided.  Errors: ModelError for a file without one."""
        id = self.file.get("tokenizer.ggml.mask_token_id", None, int)
        if id is None or not 0 <= id < self.n_vocab:
            raise ModelError(f"{self.file.path}: tokenizer.ggml.mask_token_id is {id}, expected an id of the "
                             f"vocabulary, which stands where nothing is decided; convert the model again")
        return id

    @property
    def shifts_logits(self):
        """Are the logits of a token those at the token before it, as of models made from decoders?"""
        return bool(self.file.get("diffusion.shift_logits", True, bool))

    @property
    def schedule(self):
        """{option of `generate`: value}: how the model was trained to write."""
        return {"block_length": BLOCK} if self.file.arch in BLOCKS else {"eps": EPS}

    def __call__(self, prompt, **options):
        """`m("a text")` is `m.generate("a text")`."""
        return self.generate(prompt, **options)

    @takes_other_names(GENERATION)
    def generate(self, prompt, n_predict=64, temp=0.0, stop=(), ignore_eos=False, **options):
        """Iterator over pieces of the answer to `prompt`, a text or ids; `.stats` afterwards, with "stop_reason".

        All n_predict tokens (-1: 256, or what the context leaves) begin as masks; each step decides those that the
        model is surest of.  The pieces come in the order of the text, as far as it is decided.
        temp: temperature; 0 always takes the likeliest token.  top_k (0), top_p (1.0), seed: as of decoders, off unless
        given.  stop: texts or ids that end it.  ignore_eos: the model's own ends are never chosen.
        steps: how many steps the answer takes; None: as many as tokens.  Fewer are faster.
        eps: a step decides a share of all masks that are left, down to a time of eps; or block_length: one block of so
        many tokens after the other, as many tokens at each step.  None: as the model was trained.
        algorithm: which tokens a step decides: "confidence" (the likeliest), "margin" (those furthest ahead of the
        second), "entropy" (those of the lowest entropy), "random", "origin" (each with the same probability).
        alg_temp: these are drawn with exp(sureness / alg_temp); 0: the surest.
        cfg_scale: s: logits become u + (s + 1)(l - u), u those without the prompt; 0: off.

            m.generate("Lily can run", n_predict=32, steps=16).text

        Errors: ParamError, TypeMismatch; NotSupported for options of decoders, which write from left to right;
        ModelError for a file without a mask token.
        """
        return Diffusion(self, prompt, n_predict, stop, ignore_eos, temp=temp, **options)

    def chat_prompt(self, messages, tools=None, add_generation_prompt=True, template=None, **variables):
        """(text, ids) of a conversation, as Decoder.chat_prompt."""
        return chat_prompt(self.file, self.tokenizer, messages, tools, add_generation_prompt, template, **variables)

    @takes_other_names(GENERATION)
    def chat(self, messages, n_predict=64, tools=None, template=None, variables=None, **options):
        """Iterator over the pieces of the answer to a conversation, with the options of `generate`."""
        ids = self.chat_prompt(messages, tools, template=template, **(variables or {})).ids
        return self.generate(ids, n_predict, **options)
