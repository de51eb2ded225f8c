"""Every kind of tokenizer and pre-tokenizer: recorded ids of llama.cpp, llama.cpp itself, streams, damage, speed."""
import json
import random

import numpy as np
import pytest
from helpers.sample import SEED, rank
from helpers.timing import processor_time
from helpers.vocabularies import (
    BYTES,
    CHARSMAP,
    CTRL,
    GOLDENS,
    USER,
    ask_llamacpp,
    charsmap_bytes,
    hard_texts,
    mark,
    vocabularies,
    write,
)

from ggjit.models import load_model
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.text.bpe import BYTE_OF_CHAR
from ggjit.models.text.pre_tokenizers import BY_NAME, KEEP_SPACES
from ggjit.models.text.tokenizer import KINDS, Tokenizer
from ggjit.models.text.unigram import charsmap, replacer
from ggjit.ops.core.errors import (
    BadFile,
    GgjitError,
    IndexRangeError,
    ModelError,
    NotSupported,
    ParamError,
    TypeMismatch,
)

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

with open(GOLDENS) as f:
    RECORDED = json.load(f)
MADE = vocabularies(RECORDED["byte_merges"], RECORDED["raw_merges"], BY_NAME, sorted(BYTE_OF_CHAR))
FAMILY = {name: next(n for n in RECORDED["ids"] if BY_NAME.get(n) == pre) for name, pre in BY_NAME.items()}
DRAWN = set(sorted(MADE, key=rank)[:2])


def made(path, name, **changes):
    return Tokenizer.from_gguf(GGUFFile(write(path, **{**MADE[name], **changes})))


@pytest.fixture(scope="module")
def each(tmp_path_factory):
    """name -> Tokenizer, built once."""
    path, built = tmp_path_factory.mktemp("vocabularies"), {}

    def get(name):
        if name not in built:
            built[name] = made(path / f"{len(built)}.gguf", name)
        return built[name]
    return get


# ---------------------------------------------------------------- equal to llama.cpp
def test_recorded_ids(each):
    for at, (name, marks) in enumerate(RECORDED["ids"].items()):
        ours = [mark(each(name).encode(t, parse_special=bool(at % 2))) for t in RECORDED["texts"]]
        theirs = [marks[i:i + 4] for i in range(0, len(marks), 4)]
        wrong = [t for t, a, b in zip(RECORDED["texts"], ours, theirs, strict=True) if a != b]
        assert not wrong, (name, wrong[:3])
    assert set(FAMILY.values()) | {n for n in MADE if n not in BY_NAME} == RECORDED["ids"].keys()
    assert {v["model"] for v in MADE.values()} | {"bert"} == KINDS.keys()


@pytest.mark.peer
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DRAWN else [pytest.mark.slow]) for n in MADE])
def test_equals_llamacpp_on_hard_texts(shared, tmp_path, name):
    """Characters of all planes, code, emoji, control characters, special tokens; -m slow: 10,000 texts for one name
    of each rule, 300 for its other names."""
    pytest.importorskip("xllamacpp")
    path = write(tmp_path / "v.gguf", **MADE[name])
    ours = Tokenizer.from_gguf(GGUFFile(path))
    texts = hard_texts(10_000 if name in RECORDED["ids"] and name not in DRAWN else 300, SEED)
    for special in (False, True):
        answer, = ask_llamacpp(shared("tools"), [dict(path=path, texts=texts, parse_special=special)])
        for t, ids, back in zip(texts, answer["ids"], answer["back"], strict=True):
            assert ours.encode(t, parse_special=special) == ids, t
            if not _raw(name):
                assert ours.detokenize(ids, True) == bytes.fromhex(back).decode("utf-8", "replace"), t
        if not _raw(name):
            assert [ours.piece(i).hex() for i in range(ours.n_vocab)] == answer["pieces"]
        texts = texts[:300]


def _raw(name):
    """Kinds whose tokens are characters, which llama.cpp reads as bytes when it writes them out."""
    return name.startswith("whitespace")


def test_defaults_of_pre_tokenizers(each):
    """llama.cpp's: which ones begin with a token, which ones drop spaces before punctuation."""
    begin = {n for n in BY_NAME if each(FAMILY[n]).add_bos}
    assert begin == set("""llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken
        chameleon gemma4 granite-embed-multi-311m""".split())
    assert BY_NAME.keys() > KEEP_SPACES and not {"gpt-2", "llama-bpe", "falcon", "gemma4", "glm4"} & KEEP_SPACES


# ---------------------------------------------------------------- ids -> text
def test_text_of_ids(each):
    gpt2, qwen2 = each("gpt-2"), each("qwen2")
    said = "it 's a , b ! ' c ' d 're . 't"
    ids = gpt2.encode(said)
    assert gpt2.decode(ids) == said == qwen2.detokenize(ids) == gpt2.detokenize(ids, clean_spaces=False)
    assert gpt2.detokenize(ids) == "it's a, b!'c'd're. 't" == qwen2.detokenize(ids, clean_spaces=True)
    llama = each("llama")
    ids = llama.encode("Hello <s>world", parse_special=True)
    assert llama.detokenize(ids) == "Hello  world" and llama.detokenize(ids, True) == "<s> Hello <s> world"
    assert llama.detokenize([]) == "" and llama.detokenize(iter(ids[1:])) == llama.detokenize(np.array(ids[1:]))
    for bad in ("abc", b"abc", 3, None):
        with pytest.raises(ParamError, match=f"token ids are {type(bad).__name__}, expected a list"):
            llama.detokenize(bad)


def test_a_model_tokenizes_and_detokenizes(shared):
    m = load_model(shared("data", "stories260k", "stories260K-F32.gguf"))
    ids = m.tokenize("Once upon a time")
    assert m.detokenize(ids) == "Once upon a time" == m.detokenize(np.array(ids)) and ids[0] == 1
    assert m.tokenize("<s>", special=True, add_special=False) == [1] != m.tokenize("<s>", add_special=False)
    assert m.detokenize([1, 2]) == "" and m.detokenize([1, 2], special=True) == "<s></s>"
    for call, error, said in [(lambda: m.tokenize(b"a"), TypeMismatch, "takes a string, got bytes"),
                              (lambda: m.tokenize("a\udc80"), ParamError, "lone surrogate at character 1"),
                              (lambda: m.detokenize([512]), IndexRangeError, "token id 512 is outside"),
                              (lambda: m.detokenize("ab"), ParamError, "token ids are str")]:
        with pytest.raises(error, match=said):
            call()


@pytest.mark.parametrize("name", ["llama", "gpt-2", "gemma4", "t5", "rwkv", "plamo2", "hybriddna", "whitespace, bytes"])
def test_streams_give_whole_characters(each, name):
    """Any ids: the pieces joined are the text of all ids, and a piece of valid text never holds a cut character."""
    t, rnd = each(name), random.Random(7)
    for _ in range(20):
        ids = [rnd.randrange(t.n_vocab) for _ in range(40)]
        for special in (False, True):
            stream = t.stream(special=special)
            whole = b"".join(t.piece(i, special) for i in ids).decode("utf-8", "replace")
            assert "".join(map(stream.push, ids)) + stream.flush() == whole
    if name not in ("t5", "whitespace, bytes"):             # these have no ids for some characters, or for spaces
        ids = t.encode("naïve — 日本 😀👩‍👩‍👧 e\u0301nd")
        stream = t.stream()
        out = [stream.push(i) for i in ids]
        assert "".join(out).lstrip() == "naïve — 日本 😀👩‍👩‍👧 e\u0301nd" and not any("\ufffd" in o for o in out)
        assert stream.flush() == ""


# ---------------------------------------------------------------- special tokens
def specials_of(tmp_path, texts, types=None, **keys):
    return Tokenizer.from_gguf(GGUFFile(write(
        tmp_path / "s.gguf", "gpt2", [*texts, "a", "Ġ"], [*(types or [1] * len(texts)), 1, 1], merges=["a a"],
        **{"pre": "qwen2", **keys})))


def test_stop_and_shown_tokens_by_text(tmp_path):
    t = specials_of(tmp_path, ["<|im_end|>", "<|file_sep|>", "<fim_prefix>", "<|channel|>"], eos_token_id=4)
    assert t.stop_ids == {0, 1, 4}
    assert [t.piece(i) for i in range(4)] == [b"", b"", b"", b"<|channel|>"]
    assert t.encode("<fim_prefix>a<|channel|>") == [4, 3] and t.encode("<fim_prefix>", parse_special=True) == [2]
    t = specials_of(tmp_path, ["<|return|>", "<|call|>", "<|end|>"])                # gpt-oss: <|end|> ends a message
    assert t.stop_ids == {0, 1} and t.piece(2) == b"<|end|>"
    t = specials_of(tmp_path, ["</s>", "<|tool_response>"])                         # gemma4: </s> is a tag
    assert t.stop_ids == {1} and t.piece(0) == b"</s>"
    t = specials_of(tmp_path, ["<pre>", "<PRE>"], fim_pre_token_id=0)               # the file has named one
    assert t.piece(1) == b"<PRE>"


def test_tokens_that_swallow_white_space(tmp_path):
    texts, kinds = ["<mask>", "<|user|>", "</s>", "<s>"], [CTRL, USER, CTRL, CTRL]
    for keys, said, ids in [(dict(pre="jina-v2-de"), "a \n<mask> a", [4, 0, 5, 4]),
                            (dict(), "a <mask> a", [4, 5, 0, 5, 4]),
                            (dict(name="Phi-3 mini"), "a <|user|> \na<s> a", [4, 5, 1, 4, 3, 5, 4]),
                            (dict(arch="jina-bert-v3"), "a <mask>", [4, 0])]:
        assert specials_of(tmp_path, texts, kinds, **keys).encode(said, parse_special=True) == ids, keys


def test_text_never_becomes_a_control_token(each):
    for name, text in (("rwkv", "<|end|>"), ("plamo2", "<|bos|>"), ("t5", "</s>"), ("llama", "<s>")):
        t = each(name)
        plain, parsed = t.encode(text, False), t.encode(text, False, parse_special=True)
        assert len(parsed) == 1 < len(plain) and t.decode(parsed) == "" and t.decode(parsed, special=True) == text


# ---------------------------------------------------------------- the kinds' own rules
def test_charsmap_is_read_and_applied():
    assert charsmap(charsmap_bytes(CHARSMAP)) == CHARSMAP
    replace = replacer(CHARSMAP)
    assert replace("日本日 A\u0300A \u00adﬁ\te\u0301e日") == "nihonhi ÀA fi éehi" and replacer({})("ﬁ") == "ﬁ"


def test_white_space_is_lost_and_case_perhaps(each):
    t = each("whitespace, bytes")
    assert t.encode("\u3000İA\n b\x1c") == t.encode("ia") + t.encode("b\x1c")
    assert each("whitespace").encode("A") != each("whitespace").encode("a") == each("whitespace, lower").encode(" A")


def test_missing_merges_are_named_but_for_kimi(tmp_path):
    with pytest.raises(BadFile, match=r"v.gguf: key 'tokenizer.ggml.merges' is missing.*convert again"):
        made(tmp_path / "v.gguf", "qwen2", merges=None).encode("a")
    assert len(made(tmp_path / "v.gguf", "kimi-k2", merges=None).encode("abc")) == 3


def test_merges_through_texts_that_are_no_tokens(tmp_path):
    """As in llama.cpp: they merge on, and what stays without a token falls apart, as far as there are tokens."""
    t = Tokenizer.from_gguf(GGUFFile(write(tmp_path / "v.gguf", "gpt2", ["a", "b", "c", "abc"], merges=["a b", "ab c"],
                                           pre="qwen2")))
    assert t.encode("abcab") == [3, 0, 1] and t.encode("abéc") == [0, 1, 2]


@pytest.mark.parametrize("name, said, changes", [
    ("qwen2", r"tokens 2 and 9 are both '!'", dict(tokens=["<|endoftext|>", "<tool>", *"!#$%&()!"],
                                                  types=[CTRL, USER] + [1] * 8, merges=["! !"])),
    ("t5", r"precompiled_charsmap is damaged \(4 bytes", dict(arrays={"precompiled_charsmap": b"abcd"})),
    ("t5", r"precompiled_charsmap is damaged", dict(arrays={"precompiled_charsmap": charsmap_bytes(CHARSMAP)[:-1]})),
    ("plamo2", r"the token <0x07> is missing", dict(
        tokens=[t if t != BYTES[7] else "<0xGG>" for t in MADE["plamo2"]["tokens"]])),
    ("plamo2", r"texts of up to 30000 characters", dict(tokens=[*MADE["plamo2"]["tokens"][:-1], "a" * 30_000])),
    ("rwkv", r"no token is a prefix of b'a.*no unknown_token_id", dict(tokens=["<|end|>", "b"], types=[CTRL, 1])),
    ("gemma4", r"bos_token_id is missing", dict(bos_token_id=None)),
])
def test_unusable_vocabularies_are_named(tmp_path, name, said, changes):
    with pytest.raises(ModelError, match=f"v.gguf: .*{said}.*convert the model again"):
        given = {k: v for k, v in {**MADE[name], **changes}.items() if v is not None}
        Tokenizer.from_gguf(GGUFFile(write(tmp_path / "v.gguf", **given))).encode("a")


def test_near_names_are_said(tmp_path):
    with pytest.raises(NotSupported, match=r"tokenizer.ggml.pre is 'qwen3' \(did you mean qwen35\?\).*known: .*tekken"):
        made(tmp_path / "v.gguf", "qwen2", pre="qwen3").encode("a")


@pytest.mark.parametrize("name", ["t5", "rwkv", "plamo2", "gemma4"])
def test_damaged_vocabularies_give_typed_errors_or_work(tmp_path, name):
    rnd, blob = random.Random(1), write(tmp_path / "v.gguf", **MADE[name]).read_bytes()
    start, end, used = blob.index(b"tokenizer.ggml.model"), GGUFFile.from_bytes(blob).data_offs, 0
    for _ in range(25):
        bad = bytearray(blob)
        for _ in range(rnd.choice((1, 2, 8, 64))):
            bad[rnd.randrange(start, end)] = rnd.randrange(256)
        try:
            t = Tokenizer.from_gguf(GGUFFile.from_bytes(bad))
            t.detokenize(t.encode("Once upon a time,\t日本 ﬁ ½ \U0001f600 <s>", parse_special=True))
            t.decode(range(t.n_vocab), special=True)
            used += 1
        except GgjitError:
            continue
    assert used


# ---------------------------------------------------------------- speed
LONG = {"spaces": " ", "spaces, then a letter": " ", "letters": "a", "capitals": "A", "digits": "1", "line ends": "\n",
        "marks": "\u0301", "kanji": "日"}


@pytest.mark.parametrize("name", ["afmoe", "superbpe", "jais-2", "deepseek-llm", "tekken", "llama, equal scores", "t5",
                                  "rwkv", "plamo2"])
def test_time_grows_with_the_length_of_a_run(each, name):
    """Ten times the characters take about ten times as long: less than forty."""
    t = each(name)
    t.encode("a")
    for said, char in LONG.items():
        took = []
        for n in (500, 5000):
            text = char * n + ("x" if "letter" in said else "")
            best = []
            for _ in range(2):
                with processor_time() as passing:
                    t.encode(text)
                best.append(passing.seconds)
            took.append(min(best))
        assert took[1] < 40 * max(took[0], 1e-3), (said, took)
