"""Text <-> token ids, from a GGUF file's own metadata.

    text -- cut at special tokens --> parts -- `tokenizers` engine of the vocabulary's kind --> ids
    ids  -- bytes of each piece ----> UTF-8 text; StreamDecoder gives it out as soon as characters are whole

Three kinds (`tokenizer.ggml.model`): "llama" (SentencePiece BPE: merges ranked by score, unknown characters as bytes),
"gpt2" (byte-level BPE with a pre-tokenizer) and "bert" (WordPiece, lower-cased).  Nothing is built until text is
encoded, so a model that is only given ids pays nothing, and a file whose vocabulary is absent or unknown still loads.
Source: llama.cpp's llama-vocab.cpp for what the metadata mean, the models' own tokenizers for what comes out.
"""
import codecs
import functools
import heapq
import itertools
import operator

import numpy as np

from ggjit.models.files.gguf import StringArray
from ggjit.models.text.pre_tokenizers import BY_NAME, pre_tokenizer
from ggjit.ops.core.errors import IndexRangeError, ModelError, NotSupported, ParamError, extra
from ggjit.ops.core.host_memory import asking
from ggjit.ops.core.whole_numbers import is_whole

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)     # tokenizer.ggml.token_type
SPACE = "\u2581"                # how SentencePiece and llama.cpp's WordPiece write a space
KEY = "tokenizer.ggml."

MAX_SPLIT_WORK = 1 << 28        # characters copied to find the pairs of every token; real vocabularies need a million
# tokens that end a turn or a document, whatever the file's eos and types say (llama.cpp finds them by text, too)
STOP_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|endoftext|>", "<|end_of_text|>",
              "<end_of_turn>", "<end_of_utterance>", "<EOT>", "<｜end▁of▁sentence｜>")


class Tokenizer:
    """What every kind of vocabulary shares.  Make one with `Tokenizer.from_gguf(file)`.

    .n_vocab  .bos_id .eos_id .unk_id (None if the vocabulary has none)  .stop_ids (frozenset: end of turn or document)
    """
    ADD_BOS, ADD_EOS, ADD_SPACE_PREFIX = False, False, False
    DEFAULT_IDS = {}            # where the file names none (llama.cpp's defaults)

    @staticmethod
    def from_gguf(file):
        """A tokenizer for `file`; one that raises on use where the file has no vocabulary or one of unknown kind."""
        model = file.get(KEY + "model", "no_vocab", kind=str)
        return KINDS.get(model, Absent)(file)

    def __init__(self, file):
        self._file = file
        self.n_vocab = len(self._tokens)
        self.bos_id, self.eos_id, self.unk_id = (self._special_id(k) for k in ("bos", "eos", "unknown"))
        self.add_bos = file.get(KEY + "add_bos_token", self.ADD_BOS, kind=bool)
        self.add_eos = file.get(KEY + "add_eos_token", self.ADD_EOS, kind=bool)
        self.add_space_prefix = file.get(KEY + "add_space_prefix", self.ADD_SPACE_PREFIX, kind=bool)
        for name, wanted, id in (("bos", self.add_bos, self.bos_id), ("eos", self.add_eos, self.eos_id)):
            if wanted and id is None:
                self._bad(f"add_{name}_token is set, but {KEY}{name}_token_id is missing")

    # ---------------------------------------------------------------- public
    @asking("encode: the ids of a text")
    def encode(self, text, add_special=True, parse_special=False):
        """Ids of `text`; `add_special`: with the model's begin (and end) token; `parse_special`: "<|im_end|>" written
        out in the text is that token, which must not be allowed for text from strangers."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ParamError(f"text has a lone surrogate at character {e.start}; decode it as UTF-8 first") from e
        except AttributeError:
            raise ParamError(f"text is {type(text).__name__}, expected str") from None
        ids = [self.bos_id] if add_special and self.add_bos else []
        after_special = True
        for part in self._parts(text, parse_special):
            if isinstance(part, str):
                ids += self._to_ids(self._prepare(part, after_special))
            else:
                ids.append(part)
            after_special = not isinstance(part, str)
        return ids + [self.eos_id] if add_special and self.add_eos else ids

    @asking("decode: the text of ids")
    def decode(self, ids, special=False):
        """The text of `ids`; control tokens are left out unless `special`.  Bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(self.piece(i, special) for i in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.add_space_prefix else text

    def piece(self, id, special=False):
        """The bytes token `id` stands for, perhaps a part of a character; b"" for a control token unless `special`."""
        id = self._check_id(id)
        kind = self._types[id]
        if kind in (CONTROL, UNKNOWN):
            return self._tokens.raw(id) if special else b""
        if kind in (NORMAL, BYTE):
            return self._bytes(id, kind)
        return self._tokens.raw(id) if kind == USER_DEFINED else b""

    def stream(self, at_start=False):
        """A StreamDecoder; `at_start`: the ids are no continuation, so the space before the first word goes."""
        return StreamDecoder(self, at_start)

    @functools.cached_property
    def stop_ids(self):
        """Ids after which generation ends: eos, bos (models write it between documents), end-of-turn tokens."""
        named = (self.bos_id, self.eos_id, self._special_id("eot"), self._special_id("eom"))
        return frozenset({i for i in named if i is not None} | self._stops_by_text)

    # ---------------------------------------------------------------- what the kinds fill in
    def _build(self, tokenizers):
        """The function that turns a part without special tokens into a list of ids."""
        raise NotSupported(f"{type(self).__name__} does not build")

    def _prepare(self, part, after_special):
        return part

    def _bytes(self, id, kind):
        """Bytes of a normal or byte token."""
        raise NotSupported(f"{type(self).__name__} has no bytes")

    # ---------------------------------------------------------------- the vocabulary
    @functools.cached_property
    def _to_ids(self):
        return self._build(extra("tokenizers", "models"))

    @functools.cached_property
    def _tokens(self):
        tokens = self._file.get(KEY + "tokens", kind=StringArray)
        if not len(tokens):
            self._bad(f"{KEY}tokens is empty")
        return tokens

    @functools.cached_property
    def _vocab(self):
        """Text -> id; the last of equal texts counts, as in llama.cpp."""
        return {text or _name_empty(i): i for i, text in enumerate(self._tokens)}

    @property
    def _unk_text(self):
        """What stands for text without any token; None if the vocabulary has nothing for it."""
        return None if self.unk_id is None else self._tokens[self.unk_id] or _name_empty(self.unk_id)

    @functools.cached_property
    def _types(self):
        types = self._array("token_type", np.full(self.n_vocab, NORMAL, np.int32), "iu").copy()
        types[list(self._stops_by_text)] = CONTROL          # many files give them as user-defined
        return types

    @functools.cached_property
    def _stops_by_text(self):
        return {self._vocab[text] for text in STOP_TEXTS if text in self._vocab}

    def _array(self, name, default, kinds):
        """A numeric array with one entry per token."""
        a = self._file.get(KEY + name, default, kind=np.ndarray)
        if len(a) != self.n_vocab or a.dtype.kind not in kinds:
            self._bad(f"{KEY}{name} holds {len(a)} {a.dtype}, there are {self.n_vocab} tokens")
        return a

    def _special_id(self, name):
        key = f"{KEY}{name}_token_id"
        id = self._file.get(key, None, kind=int)
        if id is None:
            id = self.DEFAULT_IDS.get(name)
            return id if id is not None and id < self.n_vocab else None
        if not 0 <= id < self.n_vocab:
            self._bad(f"{key} is {id}, there are {self.n_vocab} tokens")
        return id

    def _check_id(self, id):
        if not is_whole(id):
            raise ParamError(f"token id is {id!r}, expected an int")
        id = operator.index(id)
        if not 0 <= id < self.n_vocab:
            raise IndexRangeError(f"token id {id} is outside the vocabulary, 0 to {self.n_vocab - 1}")
        return id

    def _bad(self, what):
        raise ModelError(f"{self._file.path}: {what}; convert the model again")

    @functools.cached_property
    def _specials(self):
        """(id, text, always matched) of tokens that are cut out of text whole, longest first."""
        found = [(i, self._tokens[i], self._types[i] == USER_DEFINED)
                 for i in np.flatnonzero(np.isin(self._types, (CONTROL, USER_DEFINED, UNKNOWN))).tolist()]
        return sorted((s for s in found if s[1]), key=lambda s: -len(s[1].encode()))

    def _parts(self, text, parse_special):
        """`text` as a list of str and special token ids; a longer token wins over a shorter one."""
        parts = [text] if text else []
        for id, special, always in self._specials:
            if (always or parse_special) and special in text:
                parts = [p for part in parts for p in (_cut(part, special, id) if isinstance(part, str) else (part,))]
        return parts


def _name_empty(i):
    return f"[EMPTY_{i}]"       # llama.cpp's name for a token without text


def _cut(text, special, id):
    """"a<x>b<x>" -> "a", id, "b", id"""
    first, *rest = text.split(special)
    return [p for p in (first, *(q for r in rest for q in (id, r))) if p != ""]


def _runner(engine):
    return lambda part: engine.encode(part, add_special_tokens=False).ids


class SentencePiece(Tokenizer):
    """"llama": starts from single characters and merges the pair whose merged text scores best, leftmost first; what is
    no token in the end becomes the tokens of its UTF-8 bytes."""
    ADD_BOS, ADD_SPACE_PREFIX = True, True
    DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}

    def _build(self, tokenizers):
        merges, tied = self._merges()
        if tied:
            return self._merge_by_score
        model = tokenizers.models.BPE(vocab=self._vocab, merges=merges, unk_token=self._unk_text, byte_fallback=True,
                                      fuse_unk=False)
        return _runner(tokenizers.Tokenizer(model))

    @functools.cached_property
    def _mergeable(self):
        """Text -> id of what merging may produce.  llama.cpp lets it produce control tokens, too; SentencePiece does
        not, and text from strangers must not."""
        types = self._types.tolist()
        return {text: id for text, id in self._vocab.items() if types[id] not in (CONTROL, UNKNOWN)}

    def _merges(self):
        """(pairs, tied): the pairs that make each token, best score first, which is what a BPE engine needs to do
        SentencePiece's merges; `tied` if two tokens score the same, for then position decides, not rank."""
        known, scores = self._mergeable, self._scores
        if sum(len(text) ** 2 for text in known) > MAX_SPLIT_WORK:
            self._bad(f"{KEY}tokens holds texts of {max(map(len, known))} characters and more, as no vocabulary does")
        pairs = [(-scores[id], text[:i], text[i:]) for text, id in known.items() for i in range(1, len(text))
                 if text[:i] in known and text[i:] in known]
        pairs.sort(key=operator.itemgetter(0))
        tied = any(a[0] == b[0] and a[1] + a[2] != b[1] + b[2] for a, b in itertools.pairwise(pairs))
        return [pair[1:] for pair in pairs], tied

    @functools.cached_property
    def _scores(self):
        return self._array("scores", np.zeros(self.n_vocab, np.float32), "f").tolist()

    def _merge_by_score(self, part):
        """The definition itself, for vocabularies with equal scores, which a BPE engine cannot express."""
        known, scores, pieces, heap = self._mergeable, self._scores, list(part), []
        before, after = list(range(-1, len(pieces) - 1)), [*range(1, len(pieces)), -1]

        def offer(left, right):
            id = known.get(pieces[left] + pieces[right]) if left >= 0 and right >= 0 else None
            if id is not None:
                heapq.heappush(heap, (-scores[id], left, right, len(pieces[left]) + len(pieces[right])))

        for i in range(len(pieces) - 1):
            offer(i, i + 1)
        while heap:
            _, left, right, length = heapq.heappop(heap)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != length:
                continue                                    # one of the two has been merged since
            pieces[left], pieces[right] = pieces[left] + pieces[right], ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [id for piece in pieces if piece for id in self._ids_of(piece)]

    def _ids_of(self, piece):
        """The token of `piece`, or those of its bytes, or the unknown token."""
        if piece in self._mergeable:
            return [self._mergeable[piece]]
        ids = [self._mergeable.get(f"<0x{byte:02X}>", self.unk_id) for byte in piece.encode()]
        return ids if self.unk_id not in ids else [self.unk_id] if self.unk_id is not None else []

    def _prepare(self, part, after_special):
        return ((" " if self.add_space_prefix and after_special else "") + part).replace(" ", SPACE)

    def _bytes(self, id, kind):
        raw = self._tokens.raw(id)
        if kind == BYTE:                                    # "<0x0A>"
            try:
                return bytes([int(raw[3:5], 16)])
            except ValueError:
                self._bad(f"byte token {id} is {raw!r}, expected the form <0x0A>")
        return raw.replace(SPACE.encode(), b" ")


class ByteLevelBPE(Tokenizer):
    """"gpt2": bytes as printable characters, words cut by the pre-tokenizer, then merges in the order of the file."""

    def __init__(self, file):
        self._pre_name = file.get(KEY + "pre", "default", kind=str)
        pre = BY_NAME.get(self._pre_name)                   # an unknown name is refused when text is to be encoded
        self.ADD_BOS = pre is not None and pre.add_bos
        super().__init__(file)

    def _build(self, tokenizers):
        pre, vocab = pre_tokenizer(self._pre_name, self._file.path), self._vocab
        merges = {}                                         # the first of equal pairs counts
        for text in self._file.get(KEY + "merges", kind=StringArray):
            at = text.find(" ", 1)
            left, right = text[:at], text[at + 1:]
            if left in vocab and right in vocab and left + right in vocab:
                merges[left, right] = None
        engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=list(merges),
                                                            ignore_merges=pre.ignore_merges))
        P = tokenizers.pre_tokenizers
        cuts = [P.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
        engine.pre_tokenizer = P.Sequence([*cuts, P.ByteLevel(add_prefix_space=False, use_regex=False)])
        return _runner(engine)

    def _bytes(self, id, kind):
        out = bytearray()
        for char in self._tokens[id]:
            byte = BYTE_OF_CHAR.get(char)
            out += bytes([byte]) if byte is not None else char.encode()
        return bytes(out)


def _byte_of_char():
    """GPT-2's printable stand-ins: Latin-1's visible characters are themselves, the other bytes U+0100 onwards."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF_CHAR = _byte_of_char()


class WordPiece(Tokenizer):
    """"bert": lower-cased words without accents, cut greedily into the longest pieces.  The file writes the start of a
    word as "▁word" and its continuation as "ing" where BERT has "word" and "##ing"."""
    ADD_BOS, ADD_EOS = True, True
    DEFAULT_IDS = {"bos": 101, "eos": 102, "unknown": 100}

    def __init__(self, file):
        super().__init__(file)
        sep_id = self._special_id("seperator")              # the format's own spelling
        self.eos_id = sep_id if sep_id is not None else self.eos_id
        self.add_bos = self.add_eos = True                  # the network was never trained without them

    def _build(self, tokenizers):
        if self.unk_id is None:
            self._bad(f"{KEY}unknown_token_id is missing")
        types = self._types.tolist()
        vocab = {(t if types[i] in (CONTROL, UNKNOWN) else t[1:] if t.startswith(SPACE) else "##" + t): i
                 for t, i in self._vocab.items()}
        vocab[self._unk_text] = self.unk_id
        engine = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab=vocab, unk_token=self._unk_text))
        engine.normalizer = tokenizers.normalizers.BertNormalizer()
        engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        return _runner(engine)

    def decode(self, ids, special=False):
        return super().decode(ids, special).removeprefix(" ")

    def _bytes(self, id, kind):
        return self._tokens.raw(id).replace(SPACE.encode(), b" ")


class Absent(Tokenizer):
    """No vocabulary, or one of a kind we cannot read: has ids only."""

    def __init__(self, file):
        self._file = file
        self.model = file.get(KEY + "model", "no_vocab", kind=str)
        self.n_vocab = file.arch_get("vocab_size", 0, kind=int)
        self.bos_id = self.eos_id = self.unk_id = None
        self.stop_ids = frozenset()

    def _refuse(self, *args, **kwargs):
        if self.model in ("no_vocab", "none"):
            raise ModelError(f"{self._file.path}: the file has no vocabulary; give token ids instead of text, "
                             f"to m.decode or m.logits")
        raise NotSupported(f"{self._file.path}: tokenizer model {self.model!r} is not supported (supported: "
                           f"{', '.join(KINDS)}); give token ids instead of text, to m.decode or m.logits")

    encode = decode = piece = stream = _refuse


KINDS = {"llama": SentencePiece, "gpt2": ByteLevelBPE, "bert": WordPiece}


class StreamDecoder:
    """Ids in, whole characters out: `push(id)` gives the text that is complete so far, `flush()` what is left (cut
    characters as U+FFFD)."""

    def __init__(self, tokenizer, at_start=False):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = at_start and tokenizer.add_space_prefix

    def push(self, id):
        text = self._utf8.decode(self._tokenizer.piece(id))
        if self._drop_space and text:
            self._drop_space, text = False, text.removeprefix(" ")
        return text

    def flush(self):
        return self._utf8.decode(b"", final=True)
