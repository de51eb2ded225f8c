"""Vocabularies of every kind, small, and texts that are hard to cut; with llama.cpp's ids for them.

    python tests/helpers/vocabularies.py TOOLS      writes tests/models/tokenizer_goldens.json anew; needs xllamacpp

TOOLS is the folder that holds peer_llamacpp.py.
"""
import functools
import json
import pathlib
import random
import struct
import subprocess
import sys
import zlib

import numpy as np

from ggjit.models.text.tokenizer import BYTE_OF_CHAR
from helpers.gguf_files import written

GOLDENS = pathlib.Path(__file__).parents[1] / "models" / "tokenizer_goldens.json"
ORACLE = pathlib.Path(__file__).with_name("tokenizer_oracle.py")
UNK, CTRL, USER, BYTE = 2, 3, 4, 6
BYTES = [f"<0x{b:02X}>" for b in range(256)]
CHAR_OF_BYTE = {byte: c for c, byte in BYTE_OF_CHAR.items()}
BASES = ["ACGT"[i // 4] + "ACGT"[i % 4] for i in range(16)]

POOLS = ["abcdefghijklmnopqrstuvwxyz" * 2 + "ABCXYZ", "     ", "0123456789", ".,;:!?'\"()-[]{}", "$+<=>^~|`#@&*/\\_%",
         "\n\n\r\t", "éèüñçøåß", "ÉÀŁŽ", "日本語漢字", "ひらがなカタカナ", "한국어글", "عربيةשלום", "हिन्दी", "ไทย",
         "😀👩‍👩‍👧🎉", "\u00a0\u3000\u2009", "²³½Ⅷ٣", "e\u0301a\u0308", "“”‘’—…", "\u200b\u00ad", "ᾼῌΩКа", "ǅʰªº"]
WORDS = ["don't", "I'LL", "we've", "'s", "it's", "Hello", "world", " the", "123", "45678", "  ", "\n\n", " \n", "\r\n",
         "foo_bar", "x=1;", "<|im_end|>", "<tool>", "<s>", "<|endoftext|>", "http://a.b/c?d=1", "ﬁ", "Straße", "...",
         "!!!", "def f(x):\n    return x**2\n", "for (int i = 0; i < n; ++i) {\n\t}", "IMGIMGABZ", "<sentinel:12>",
         "\ufeff", "\ufffd", "\x00", "\x1c\x7f\x85", "<dna>ACgtAACC", "</dna>"]


def write(path, model, tokens=None, types=None, scores=None, merges=None, arch="llama", name=None, arrays=(), **keys):
    """A GGUF file with a vocabulary and just enough of a model for llama.cpp to accept it."""
    w = _writer(path, arch, model)
    if name is not None:
        w.add_name(name)
    for key, value in dict(tokens=tokens, token_type=types, scores=scores, merges=merges, **dict(arrays)).items():
        if value is not None:
            w.add_array("tokenizer.ggml." + key, value)
    for key, value in keys.items():
        {str: w.add_string, bool: w.add_bool, int: w.add_uint32}[type(value)](
            "tokenizer.ggml." + key.replace("normalizer_", "normalizer."), value)
    return written(w, path)


def write_bytes(path, special=(), words=(), **keys):
    """A byte-level one: ids 0 to 255 are the bytes, then come `special` (the first is bos, the second eos) and `words`,
    as bytes; keys: further metadata below "tokenizer."."""
    w = _writer(path, "llama", "gpt2")
    words = ["".join(CHAR_OF_BYTE[b] for b in word) for word in words]
    w.add_tokenizer_pre("default")
    w.add_token_list([CHAR_OF_BYTE[b] for b in range(256)] + [*special] + words)
    w.add_token_types([1] * 256 + [3] * len(special) + [1] * len(words))
    w.add_token_merges(["q z"])
    w.add_bos_token_id(256)
    w.add_eos_token_id(257)
    for key, value in keys.items():
        {str: w.add_string, bool: w.add_bool, list: w.add_array}[type(value)]("tokenizer." + key, value)
    return written(w, path)


def _writer(path, arch, model):
    import gguf
    w = gguf.GGUFWriter(path, arch)
    w.add_context_length(64)
    w.add_embedding_length(8)
    w.add_block_count(1)
    w.add_feed_forward_length(8)
    w.add_head_count(1)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model(model)
    return w


# ---------------------------------------------------------------- texts
def any_char(rnd):
    """A character of any plane, assigned or not."""
    while True:
        top = rnd.choice((0x300, 0x300, 0x3000, 0x10000, 0x20000, 0x110000))
        code = rnd.randrange(top)
        if not 0xD800 <= code < 0xE000:
            return chr(code)


def hard_text(rnd, words=WORDS):
    out = []
    for _ in range(rnd.randrange(1, 14)):
        kind = rnd.random()
        if kind < 0.3:
            out.append(rnd.choice(words))
        elif kind < 0.5:
            out.append("".join(any_char(rnd) for _ in range(rnd.randrange(1, 6))))
        elif kind < 0.55:
            out.append(rnd.choice(" a1\né😀A!") * rnd.randrange(1, 40))
        else:
            pool = rnd.choice(POOLS)
            out.append("".join(rnd.choice(pool) for _ in range(rnd.randrange(1, 6))))
        out.append(rnd.choice(("", " ")))
    return "".join(out)


def hard_texts(n, seed):
    rnd = random.Random(seed)
    return ["", *(hard_text(rnd) for _ in range(n))]


# ---------------------------------------------------------------- vocabularies
def train(pieces, n, byte_level):
    """Merges of a BPE vocabulary of about `n` tokens, trained without cutting words, so that every wrong cut shows."""
    import tokenizers
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    P = tokenizers.pre_tokenizers
    engine.pre_tokenizer = (P.ByteLevel(add_prefix_space=False, use_regex=False) if byte_level
                            else P.Split("\0", "removed"))
    engine.train_from_iterator(pieces, tokenizers.trainers.BpeTrainer(
        vocab_size=n, limit_alphabet=300, show_progress=False))
    merges = json.loads(engine.to_str())["model"]["merges"]
    return [m if isinstance(m, str) else " ".join(m) for m in merges]


def byte_level(merges, alphabet):
    """A "gpt2" vocabulary of these merges."""
    tokens = list(dict.fromkeys(["<|endoftext|>", "<tool>", *alphabet, *(m.replace(" ", "") for m in merges)]))
    return dict(tokens=tokens, types=[CTRL, USER] + [1] * (len(tokens) - 2), merges=merges, bos_token_id=0,
                eos_token_id=0)


def raw(merges):
    """A vocabulary of characters, not bytes."""
    words = [m.replace(" ", "") for m in merges]
    tokens = list(dict.fromkeys(["<|endoftext|>", "<tool>", *BYTES, *sorted({c for w in words for c in w}), *words]))
    return dict(tokens=tokens, types=[CTRL, USER] + [BYTE] * 256 + [1] * (len(tokens) - 258), merges=merges,
                bos_token_id=0, eos_token_id=0)


def by_score(first, types, words, scores, **keys):
    """A vocabulary of `first` tokens and words with scores."""
    words = [w for w in words if w not in first]
    return dict(tokens=[*first, *words], types=[*types, *[1] * len(words)],
                scores=[0.0] * len(first) + [scores(i, w) for i, w in enumerate(words)], **keys)


CHARSMAP = {"\t": " ", "\n": " ", "ﬁ": "fi", "e\u0301": "é", "½": "1/2", "Ａ": "A", "\u00a0": " ", "\u3000": " ",
            "²": "2", "\u200b": " ", "\u00ad": "", "…": "...", "A\u0300": "À", "日本": "nihon", "日": "hi"}


def charsmap_bytes(mapping):
    """SentencePiece's precompiled_charsmap of {text: replacement}: a double array and the replacements."""
    texts, places = b"", {}
    for new in mapping.values():
        if new not in places:
            places[new] = len(texts)
            texts += new.encode() + b"\0"
    trie = {}
    for key, new in mapping.items():
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[0] = places[new]
    cells, bases, todo = {0: 0}, set(), [(trie, 0)]
    while todo:
        node, at = todo.pop()
        base = next(b for b in range(1, 1 << 20) if b not in bases and all(b ^ byte not in cells for byte in node))
        bases.add(base)
        cells[at] |= (base ^ at) << 10 | (0x100 if 0 in node else 0)
        for byte, child in node.items():
            cells[base ^ byte] = byte or child | 1 << 31
            if byte:
                todo.append((child, base ^ byte))
    array = [cells.get(i, 0) for i in range(max(cells) + 256)]
    return struct.pack(f"<{len(array) + 1}I", 4 * len(array), *array) + texts


def vocabularies(byte_merges, raw_merges, pres, alphabet):
    """{name: arguments of `write`}: one per name of `pres` {name: PreTokenizer}, and one or more per kind of
    vocabulary.
    """
    chars, of_bytes = raw(raw_merges), byte_level(byte_merges, alphabet)
    words = chars["tokens"][258:]
    spm = functools.partial(by_score, ["<unk>", "<s>", "</s>", *BYTES, "<tool>"],
                            [UNK, CTRL, CTRL, *[BYTE] * 256, USER],
                            sorted(words, key=lambda w: len(w) == 1), model="llama")
    t5 = functools.partial(by_score, ["<pad>", "</s>", "<unk>", "<tool>"], [CTRL, CTRL, UNK, USER], words,
                           model="t5")
    plain = [w.replace("▁", " ") for w in words]
    rwkv = list(dict.fromkeys(repr(w)[2:-1] for w in [*(bytes([b]) for b in range(256)), *(p.encode() for p in plain)]))
    kmers = [a + b + c + "\ue000" for a in BASES for b in BASES for c in BASES]
    dna = [*of_bytes["tokens"], "<dna>", "</dna>", "<oov>", *kmers]
    tall, flat = (lambda i, w: -float(i)), (lambda i, w: -float(i // 30))
    return {
        **{name: dict(of_bytes if not pre.raw else chars, model="whitespace" if name == "whitespace" else "gpt2",
                      pre=name) for name, pre in pres.items()},
        "llama": spm(tall), "llama, equal scores": spm(flat), "llama, no prefix": spm(tall, add_space_prefix=False),
        "t5": t5(lambda i, w: -2.0 - 0.01 * i, add_space_prefix=True, remove_extra_whitespaces=True,
                 arrays={"precompiled_charsmap": charsmap_bytes(CHARSMAP)}),
        "t5, spaces kept": t5(lambda i, w: -2.0 - len(w) % 5, add_space_prefix=True,
                              arrays={"precompiled_charsmap": charsmap_bytes(CHARSMAP)}),
        "t5, no charsmap": t5(lambda i, w: -2.0 - i % 7),
        "rwkv": dict(model="rwkv", tokens=["<|end|>", *rwkv], types=[CTRL] + [1] * len(rwkv)),
        "plamo2": by_score(["<|unk|>", "<|bos|>", "<|eos|>", "<|pad|>", *BYTES],
                           [UNK, CTRL, CTRL, CTRL, *[BYTE] * 256], list(dict.fromkeys(plain)),
                           lambda i, w: -1.0 - i % 60 / 8 * len(w), model="plamo2"),
        "gemma4": dict(chars, model="gemma4"),
        "whitespace, lower": dict(chars, model="whitespace", pre="whitespace", normalizer_lowercase=True),
        "whitespace, bytes": dict(of_bytes, model="whitespace", pre="gpt-2"),
        "hybriddna": dict(of_bytes, model="hybriddna", pre="qwen2", tokens=dna,
                          types=of_bytes["types"] + [1] * (len(dna) - len(of_bytes["tokens"])))}


# ---------------------------------------------------------------- ids
def mark(ids):
    """Four hexadecimal digits that tell lists of ids apart."""
    return f"{zlib.crc32(np.array(ids, '<i4').tobytes()) & 0xffff:04x}"


def ask_llamacpp(tools, jobs):
    """The oracle's answers to jobs {path, texts, add_special, parse_special}."""
    jobs = [{"add_special": True, "parse_special": False, **job, "path": str(job["path"])} for job in jobs]
    run = subprocess.run([sys.executable, ORACLE, tools], input=json.dumps(jobs), capture_output=True, text=True,
                         timeout=3000)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def main(tools):
    import tempfile

    from ggjit.models.text.bpe import BYTE_OF_CHAR
    from ggjit.models.text.pre_tokenizers import BY_NAME
    rnd = random.Random(5)
    tame = [w for w in WORDS if "<" not in w and "\0" not in w]     # no merges that make special tokens from letters
    corpus = [hard_text(rnd, tame).replace("\0", "") for _ in range(400)]
    goldens = {"byte_merges": train(corpus, 700, True), "texts": hard_texts(63, 6),
               "raw_merges": [m for m in train([t.replace(" ", "▁") for t in corpus], 1500, False)][:500]}
    families = {pre: name for name, pre in reversed(BY_NAME.items())}
    made = vocabularies(goldens["byte_merges"], goldens["raw_merges"], {n: p for p, n in families.items()},
                        sorted(BYTE_OF_CHAR))
    with tempfile.TemporaryDirectory() as folder:
        jobs = [dict(path=write(f"{folder}/{i}.gguf", **v), texts=goldens["texts"], parse_special=bool(i % 2))
                for i, v in enumerate(made.values())]
        goldens["ids"] = {name: "".join(map(mark, answer["ids"]))
                          for name, answer in zip(made, ask_llamacpp(tools, jobs), strict=True)}
    GOLDENS.write_text(json.dumps(goldens, ensure_ascii=True, indent=0))


if __name__ == "__main__":
    main(sys.argv[1])
