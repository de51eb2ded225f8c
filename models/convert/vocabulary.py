"""Vocabularies: tokenizer.json or tokenizer.model -> the keys tokenizer.ggml.*, as llama.cpp's conversion writes them.

    tokenizer.model, spiece.model           SentencePiece: "llama", pieces with scores; a unigram model: "t5"
    tokenizer.json, BPE, byte_fallback      the same vocabulary without scores: the rank of a merge stands for its score
    tokenizer.json, BPE                     byte-level: "gpt2", merges, and `pre`: how text is cut before
    tokenizer.json, WordPiece               "bert"
    tokenizer.json, Unigram                 "t5": XLM-RoBERTa's
    rwkv_vocab_v20230424.txt                "rwkv": a line for each token, NUMBER 'text' or b'bytes' NUMBER OF BYTES

`pre` is found by the regular expression in tokenizer.json; one that is not known has to be named.
"""
import ast
import base64
import pathlib
import re
import struct

from ggjit.core.arguments import nearest
from ggjit.models.text.pre_tokenizers import BY_NAME
from ggjit.models.text.special_tokens import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from ggjit.models.text.vocabulary import SPACE
from ggjit.ops.core.errors import BadFile, ModelError, NotSupported, ParamError
from ggjit.ops.core.json_text import parse_json

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
PIECES, RWKV = ("tokenizer.model", "spiece.model"), "rwkv_vocab_v20230424.txt"
T5S, UNIGRAM = ("t5", "mt5", "umt5"), 1         # model_type of config.json, and of a tokenizer.model
UNUSED_SCORE, ADDED_SCORE = -10000.0, -1000.0
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
# expression of a Split in tokenizer.json: name of the pre-tokenizer, without and with ignore_merges
PATTERNS = {
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}{_ENDS}": ("dbrx", "llama-bpe"),
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{_ENDS}": ("qwen2", "qwen2"),
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_SLASH}":
        ("gpt-4o", "gpt-4o"),
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}{_SLASH}": ("tekken", "tekken")}


def inside(folder, name, by):
    """The path of a file that `by` names, in the folder.  Errors: BadFile for a name that leads elsewhere."""
    pure = pathlib.PureWindowsPath(name)                # knows both kinds of separators, and drives
    if not name or pure.drive or pure.root or ".." in pure.parts or "\0" in name:
        raise BadFile(f"{by}: names the file {name!r}, which is not in its folder; fetch the model again")
    return folder / name


def read_json(path, needed=True, kind=dict):
    """The object, or list, in a JSON file; {} where a file that is not needed is missing.  Errors: BadFile."""
    try:
        found = parse_json(path.read_text("utf-8"))
    except FileNotFoundError:
        if not needed:
            return {}
        raise BadFile(f"{path}: no such file; give a folder with config.json, tokenizer.json and model.safetensors") \
            from None
    except OSError as e:
        raise BadFile(f"{path}: {e.strerror}; check the permissions") from e
    except ValueError as e:
        raise BadFile(f"{path}: not JSON ({e}); fetch it again") from None
    if not isinstance(found, kind):
        raise BadFile(f"{path}: a {type(found).__name__}, a {kind.__name__} is expected; fetch it again")
    return found


def add_vocabulary(w, gguf, folder, config, pre=None):
    """Write the vocabulary of `folder` into the GGUFWriter `w`.  pre: a name, where it is not found by itself."""
    if pre is not None and pre not in BY_NAME:
        raise ParamError(f"no pre-tokenizer {pre!r}{nearest(pre, BY_NAME)}; there are {', '.join(sorted(BY_NAME))}")
    model = next((folder / name for name in PIECES if (folder / name).is_file()), None)
    if model is not None and config.get("model_type") != "bert":
        if config.get("model_type") in T5S and _about(model, 2).get(3, UNIGRAM) == UNIGRAM:
            return _add_unigram(w, gguf, folder, config, model)
        return _add_pieces(w, gguf, folder, config, sentencepiece(model))
    if (folder / RWKV).is_file():
        return _add_rwkv(w, gguf, folder, config)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder}: neither tokenizer.json nor tokenizer.model; put one there, or convert without a "
                         f"vocabulary: vocabulary=False (--no-vocab)")
    tokenizer = read_json(path)
    kind = tokenizer.get("model", {}).get("type", "BPE" if "merges" in tokenizer.get("model", {}) else None)
    if kind == "WordPiece":
        return _add_wordpiece(w, gguf, folder, config, tokenizer)
    if kind == "Unigram":
        return _add_unigram_json(w, gguf, folder, config, path, tokenizer)
    if kind != "BPE":
        raise NotSupported(f"{path}: a tokenizer of kind {kind!r}; BPE, WordPiece and Unigram can be converted, "
                           f"others by their tokenizer.model")
    if tokenizer["model"].get("byte_fallback"):
        return _add_pieces(w, gguf, folder, config, _pieces_of_merges(path, tokenizer))
    return _add_bytes(w, gguf, folder, config, tokenizer, pre or find_pre(path, tokenizer))


# ---------------------------------------------------------------- SentencePiece
def sentencepiece(path):
    """[(text, score, type)] of a tokenizer.model: field 1 of each piece its text, 2 its score, 3 its type."""
    data, out = path.read_bytes(), []
    for number, raw in _fields(path, data):
        if number == 1:
            piece = {1: b"", 2: b"\0\0\0\0", 3: NORMAL} | dict(_fields(path, raw))
            out.append((piece[1].decode("utf-8", "replace"), struct.unpack("<f", piece[2])[0], int(piece[3])))
    if not out:
        raise BadFile(f"{path}: holds no pieces; fetch it again")
    return out


def _fields(path, data):
    """(number, value) of a protocol buffer: an int, or bytes."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value
    try:
        while at < len(data):
            key = varint()
            if key & 7 == 0:
                yield key >> 3, varint()
                continue
            size = {1: 8, 5: 4}.get(key & 7) or (varint() if key & 7 == 2 else len(data) + 1)
            if at + size > len(data):
                raise IndexError
            at += size
            yield key >> 3, data[at - size:at]
    except IndexError:
        raise BadFile(f"{path}: damaged at byte {at}; fetch it again") from None


def _about(path, number):
    """{field: value} of that part of a tokenizer.model: 2 how it was trained, 3 how text is normalised."""
    return dict(_fields(path, dict(_fields(path, path.read_bytes())).get(number, b"")))


def _add_unigram(w, gguf, folder, config, path):
    pieces, rules = sentencepiece(path), _about(path, 3)
    n = config.get("vocab_size", default=len(pieces))
    rows = pieces[:n] + [(f"[PAD{i}]", UNUSED_SCORE, UNUSED) for i in range(len(pieces), n)]
    w.add_tokenizer_model("t5")
    w.add_tokenizer_pre("default")
    w.add_token_list([text for text, _, _ in rows])
    w.add_token_scores([score for _, score, _ in rows])
    w.add_token_types([kind for _, _, kind in rows])
    w.add_add_space_prefix(bool(rules.get(3, 1)))
    w.add_remove_extra_whitespaces(bool(rules.get(4, 1)))
    if rules.get(2):
        w.add_precompiled_charsmap(rules[2])
    gguf.SpecialVocab(folder, n_vocab=n).add_to_gguf(w, quiet=True)


def _add_unigram_json(w, gguf, folder, config, path, tokenizer):
    """The pieces of a tokenizer.json; words begin with a space where its pre-tokenizer says so."""
    pieces = tokenizer["model"]["vocab"]
    n = config.get("vocab_size", default=len(pieces))
    unknown = tokenizer["model"].get("unk_id")
    rows = [(text, score, UNKNOWN if i == unknown else NORMAL) for i, (text, score) in enumerate(pieces[:n])]
    rows += [(f"[PAD{i}]", UNUSED_SCORE, UNUSED) for i in range(len(pieces), n)]
    for i, text, special in _added(folder):
        if i < n and i != unknown:
            rows[i] = text, rows[i][1], CONTROL if special or looks_special(text) else USER_DEFINED
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    charsmap = next((s["precompiled_charsmap"] for s in steps if s.get("type") == "Precompiled"), None)
    before = tokenizer.get("pre_tokenizer") or {}
    spaces = [s for s in before.get("pretokenizers", [before]) if s.get("type") == "Metaspace"]
    w.add_tokenizer_model("t5")
    w.add_tokenizer_pre("default")
    w.add_token_list([text for text, _, _ in rows])
    w.add_token_scores([score for _, score, _ in rows])
    w.add_token_types([kind for _, _, kind in rows])
    w.add_add_space_prefix(any(s.get("prepend_scheme", "always" if s.get("add_prefix_space", True) else "never")
                               != "never" for s in spaces))
    w.add_remove_extra_whitespaces(True)
    if charsmap:
        w.add_precompiled_charsmap(base64.b64decode(charsmap))
    special = gguf.SpecialVocab(folder, n_vocab=n)
    special.add_special_token = {"bos": False, "eos": True} | special.add_special_token
    special.add_to_gguf(w, quiet=True)
    if unknown is not None:
        w.add_unk_token_id(unknown)


def _add_rwkv(w, gguf, folder, config):
    """Texts as they are written in Python, bytes beyond ASCII as \\xNN."""
    texts = ["<s>"]
    for number, line in enumerate((folder / RWKV).read_text("utf-8").splitlines(), 1):
        try:
            text = ast.literal_eval(line.split(" ", 1)[1].rsplit(" ", 1)[0])
            texts.append(repr(text.encode() if isinstance(text, str) else bytes(text))[2:-1])
        except (ValueError, SyntaxError, IndexError, TypeError) as e:
            raise BadFile(f"{folder / RWKV}, line {number}: {e}; NUMBER 'text' LENGTH is expected, fetch it "
                          f"again") from None
    n = config.get("vocab_size", default=len(texts))
    if len(texts) > n:
        raise ModelError(f"{folder / RWKV}: {len(texts)} tokens, but vocab_size is {n}; the files are not of one model")
    w.add_tokenizer_model("rwkv")
    w.add_token_list(texts + [f"[PAD{i}]" for i in range(len(texts), n)])
    w.add_token_types([CONTROL] + [NORMAL] * (len(texts) - 1) + [UNUSED] * (n - len(texts)))
    special = gguf.SpecialVocab(folder, n_vocab=n)
    special.special_token_ids |= {"bos": 0, "eos": 0}
    special.add_to_gguf(w, quiet=True)


def _pieces_of_merges(path, tokenizer):
    vocabulary, merges = tokenizer["model"]["vocab"], _merges(tokenizer)
    rank = {}
    for i, (a, b) in enumerate(merges):
        rank.setdefault(a + b, -float(i))
    last = -float(len(merges))
    out = [("", UNUSED_SCORE, UNUSED)] * (max(vocabulary.values(), default=-1) + 1)
    for text, i in vocabulary.items():
        out[i] = text, rank.get(text, last), BYTE if BYTE_TOKEN.fullmatch(text) else NORMAL
    return out


def _add_pieces(w, gguf, folder, config, pieces):
    n = config.get("vocab_size", default=len(pieces))
    rows = [(f"[PAD{i}]", UNUSED_SCORE, UNUSED) for i in range(n)]
    rows[:min(n, len(pieces))] = pieces[:n]
    for i, text, special in _added(folder):
        if i < n:
            control = special or looks_special(text)
            rows[i] = (text if control else text.replace(SPACE, " "), ADDED_SCORE, CONTROL if control else USER_DEFINED)
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list([text for text, _, _ in rows])
    w.add_token_scores([score for _, score, _ in rows])
    w.add_token_types([kind for _, _, kind in rows])
    gguf.SpecialVocab(folder, n_vocab=n).add_to_gguf(w, quiet=True)
    if config.get("model_type", default="").startswith("gemma"):
        w.add_add_space_prefix(False)


# ---------------------------------------------------------------- byte-level BPE, WordPiece
def _added(folder):
    """(id, text, special) of the tokens that were added, from all files that name some."""
    out = {i: (text, False) for text, i in read_json(folder / "added_tokens.json", needed=False).items()}
    known = read_json(folder / "tokenizer_config.json", needed=False).get("added_tokens_decoder", {})
    for i, about in [*((int(i), a) for i, a in known.items()), *(
            (a["id"], a) for a in read_json(folder / "tokenizer.json", needed=False).get("added_tokens", []))]:
        out[i] = about["content"], bool(about.get("special"))
    return [(i, *about) for i, about in sorted(out.items())]


def looks_special(text):
    """Does a text look like a control token, although it is not marked as one?"""
    return (text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or (text.startswith("<|") and text.endswith("|>"))
            or (text.startswith("<\uff5c") and text.endswith("\uff5c>"))
            or (text.startswith("<unused") and text.endswith(">")))


def _merges(tokenizer):
    return [m.split(" ", 1) if isinstance(m, str) else m for m in tokenizer["model"].get("merges", [])]


def _tokens(folder, config, tokenizer):
    """[(text, type)] of all ids."""
    known = {i: (text, NORMAL) for text, i in tokenizer["model"]["vocab"].items()}
    for i, text, special in _added(folder):
        control = special or looks_special(text)
        known[i] = (text if control else text.replace(SPACE, " "), CONTROL if control else USER_DEFINED)
    n = config.get("vocab_size", default=max(known) + 1)
    if max(known) >= n:
        raise ModelError(f"{folder / 'tokenizer.json'}: token {max(known)}, but vocab_size is {n}; the files are not "
                         f"of one model")
    return [known.get(i, (f"[PAD{i}]", UNUSED)) for i in range(n)]


def _add_bytes(w, gguf, folder, config, tokenizer, pre):
    rows = _tokens(folder, config, tokenizer)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list([text for text, _ in rows])
    w.add_token_types([kind for _, kind in rows])
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(rows))
    after = tokenizer.get("post_processor") or {}
    if any(step.get("type") == "ByteLevel" for step in after.get("processors", [after])):
        special.add_special_token = {"bos": False, "eos": False} | special.add_special_token
    special.add_to_gguf(w, quiet=True)


def _add_wordpiece(w, gguf, folder, config, tokenizer):
    rows = _tokens(folder, config, tokenizer)
    w.add_token_type_count(config.get("type_vocab_size", default=1))
    w.add_tokenizer_model("bert")
    w.add_tokenizer_pre("bert-bge")
    w.add_token_list([text if kind == CONTROL else text[2:] if text.startswith("##") else SPACE + text
                      for text, kind in rows])
    w.add_token_types([kind for _, kind in rows])
    gguf.SpecialVocab(folder, n_vocab=len(rows)).add_to_gguf(w, quiet=True)
    normalizer = tokenizer.get("normalizer") or {}
    for name in ("lowercase", "strip_accents"):
        if isinstance(normalizer.get(name), bool):
            w.add_bool(f"tokenizer.ggml.normalizer.{name}", normalizer[name])


def find_pre(path, tokenizer):
    """The name of how tokenizer.json cuts text.  Errors: NotSupported."""
    cut = tokenizer.get("pre_tokenizer") or {}
    steps = cut.get("pretokenizers", [cut])
    kinds = [step.get("type") for step in steps]
    split = next((step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"), None)
    if split in PATTERNS:
        return PATTERNS[split][bool(tokenizer["model"].get("ignore_merges"))]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    raise NotSupported(f"{path}: text is cut in a way that is not known ({split or ', '.join(map(str, kinds))}); name "
                       f"the pre-tokenizer it is with pre= (--pre), or convert without a vocabulary (--no-vocab)")
