"""The common part of all tokenizers: the vocabulary of the file, special tokens, ids -> text.

A kind of vocabulary is a subclass that says which `tokenizer.ggml.model` it reads: `class X(Tokenizer, models=("x",))`.
"""
import codecs
import contextlib
import functools
import operator
import re
from typing import TYPE_CHECKING

import numpy as np

from ggjit.core.arguments import nearest
from ggjit.models.files.gguf import StringArray
from ggjit.models.text.special_tokens import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, space_stripping, specials
from ggjit.ops.core.errors import (
    IndexRangeError,
    ModelError,
    NoSuchAttribute,
    NotSupported,
    ParamError,
    TypeMismatch,
    extra,
)
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.whole_numbers import is_whole

SPACE = "\u2581"                # how SentencePiece and llama.cpp's WordPiece write a space
KEY = "tokenizer.ggml."
WHITE = " \t\n\v\f\r"           # characters that special tokens with `lstrip` or `rstrip` remove
ROLE_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}      # older names of keys

BEFORE_MARKS, CONTRACTIONS = re.compile(rb" (?=[?!.,])"), re.compile(rb" (?='(?:[sm]|[rv]e))")

# names of other libraries' tokenizers, and what to write here
OTHER_NAMES = {
    **dict.fromkeys(("tokenize", "encode_plus", "batch_encode_plus"), "tokenizer.encode(text), for each text"),
    **dict.fromkeys(("detokenize", "batch_decode"), "tokenizer.decode(ids), for each list of ids"),
    **dict.fromkeys(("vocab_size", "n_tokens"), "tokenizer.n_vocab"),
    **dict.fromkeys(("get_vocab", "vocab"), "{tokenizer.piece(i): i for i in range(tokenizer.n_vocab)}"),
    **dict.fromkeys(("convert_ids_to_tokens", "id_to_token", "id_to_piece"), "tokenizer.piece(id), the token's bytes"),
    **dict.fromkeys(("convert_tokens_to_ids", "token_to_id", "piece_to_id"),
                    "tokenizer.encode(token, add_special=False, parse_special=True)"),
    **{f"{name}_token_id": f"tokenizer.{name}_id" for name in ("bos", "eos", "unk")},
    **{f"{name}_token": f"tokenizer.piece(tokenizer.{name}_id, special=True)" for name in ("bos", "eos", "unk")},
    **dict.fromkeys(("all_special_ids", "special_tokens_map"), "tokenizer.stop_ids, the ends of turn and document"),
    **dict.fromkeys(("apply_chat_template", "chat_template"), "m.chat_prompt(messages), or m.chat(messages)")}
KINDS = {}                      # tokenizer.ggml.model -> Tokenizer subclass


class Tokenizer:
    """What every kind of vocabulary shares.  Make one with `Tokenizer.from_gguf(file)`.

    .n_vocab  .bos_id .eos_id .unk_id (None if the vocabulary has none)  .stop_ids (frozenset: end of turn or document)
    """
    ADD_BOS, ADD_EOS, ADD_SPACE_PREFIX, CLEAN_SPACES = False, False, False, False
    DEFAULT_IDS = {}            # where the file names none (llama.cpp's defaults)
    building = contextlib.nullcontext()             # entered while tables are made, which may count their memory

    def __init_subclass__(cls, models=()):
        KINDS.update(dict.fromkeys(models, cls))

    @staticmethod
    def from_gguf(file):
        """A tokenizer for `file`; one that raises on use where the file has no vocabulary or one of unknown kind."""
        return KINDS.get(file.get(KEY + "model", "no_vocab", kind=str), Absent)(file)

    def __init__(self, file):
        self._file = file
        self.n_vocab = len(self._tokens)
        self.bos_id, self.eos_id, self.unk_id = (self._special_id(k) for k in ("bos", "eos", "unknown"))
        self.add_bos = file.get(KEY + "add_bos_token", self.ADD_BOS, kind=bool)
        self.add_eos = file.get(KEY + "add_eos_token", self.ADD_EOS, kind=bool)
        self.add_sep = file.get(KEY + "add_sep_token", None, kind=bool)
        self.add_space_prefix = file.get(KEY + "add_space_prefix", self.ADD_SPACE_PREFIX, kind=bool)
        self.clean_spaces = self.CLEAN_SPACES
        for name, wanted, id in (("bos", self.add_bos, self.bos_id), ("eos", self.add_eos, self.eos_id)):
            if wanted and id is None:
                self._bad(f"add_{name}_token is set, but {KEY}{name}_token_id is missing")

    def __reduce__(self):
        """A pickle, or a copy, reads the vocabulary from the file again."""
        return Tokenizer.from_gguf, (self._file.stored,)

    def __repr__(self):
        return f"<{type(self).__name__} of {self.n_vocab:,} tokens, {self._file.path}>"

    def __len__(self):
        """How many tokens there are."""
        return self.n_vocab

    def __call__(self, text, *others, **options):
        """Errors: TypeMismatch, always: other libraries give a dictionary here."""
        raise TypeMismatch("tokenizer(text): write tokenizer.encode(text), a list of ids, or m.tokenize(text)")

    if not TYPE_CHECKING:               # checkers would take every attribute for granted
        def __getattr__(self, name):
            """An AttributeError that says what other libraries' name is here."""
            hint = f"; write {OTHER_NAMES[name]}" if name in OTHER_NAMES else ""
            raise NoSuchAttribute(f"a tokenizer has no attribute {name!r}{hint}", name=name, obj=self)

    # ---------------------------------------------------------------- text -> ids
    @oom_guard("encode: the ids of a text")
    def encode(self, text, add_special=True, parse_special=False):
        """Ids of `text`; `add_special`: with the model's begin (and end) token; `parse_special`: "<|im_end|>" written
        out in the text is that token, which must not be allowed for untrusted text."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ParamError(f"text has a lone surrogate at character {e.start}; decode it as UTF-8 first") from e
        except AttributeError:
            raise ParamError(f"text is {type(text).__name__}, expected str") from None
        ids, to_ids = [self.bos_id] if add_special and self.add_bos else [], self._to_ids
        after_special = True
        for part in self._parts(text, parse_special):
            if isinstance(part, str):
                ids += to_ids(self._prepare(part, after_special))
            else:
                ids.append(part)
            after_special = not isinstance(part, str)
        return ids + [self.eos_id] if add_special and self.add_eos else ids

    def encode_pair(self, first, second):
        """(ids of two texts as one, how many of them are the first's), as rerankers were trained on pairs.

            [CLS] first [SEP] second [SEP]              BERT and similar models
            <s> first </s> </s> second </s>             RoBERTa and similar models
        """
        head, tail = self.encode(first), self.encode(second)
        texts = [None if id is None else self.piece(id, special=True) for id in (self.bos_id, self.eos_id)]
        if texts == [b"<s>", b"</s>"] and self.add_eos and self.add_sep is not False:
            head = [*head, self.eos_id]
        return [*head, *tail[self.add_bos:]], len(head)

    def encode_prompt(self, prompt, **texts):
        """Ids of a prompt of the model's own with {names} where the texts belong; a special token that is written out
        is one in the prompt alone, not in the texts."""
        ids = [self.bos_id] if self.add_bos else []
        for part in self._parts(prompt, True):
            if isinstance(part, str):
                ids += self.encode(re.sub(r"\{(\w+)\}", lambda m: texts.get(m[1], m[0]), part), add_special=False)
            else:
                ids.append(part)
        return ids

    @functools.cached_property
    def _specials(self):
        """(id, text, always matched) of tokens that are cut out of text whole, longest first."""
        found = [(i, self._tokens[i] or _name_empty(i), self._types[i] == USER_DEFINED) for i in self._special_ids]
        return sorted(found, key=lambda s: -len(s[1].encode()))

    @functools.cached_property
    def _special_ids(self):
        return np.flatnonzero(np.isin(self._types, (CONTROL, USER_DEFINED, UNKNOWN))).tolist()

    @functools.cached_property
    def _space_stripping(self):
        get = functools.partial(self._file.get, default="", kind=str)
        return space_stripping(get(KEY + "pre"), get("general.architecture"), get("general.name"), self._vocab,
                          self._special_ids)

    def _parts(self, text, parse_special):
        """`text` as a list of str and special token ids; a longer token wins over a shorter one."""
        parts, found = [text] if text else [], self._specials_in(text)
        for id, special, always in self._specials if found else ():
            if (always or parse_special) and special in found:
                strip = [id in ids for ids in self._space_stripping]
                parts = [p for part in parts
                         for p in (_cut(part, special, id, *strip) if isinstance(part, str) else (part,))]
        return parts

    @functools.cached_property
    def _special_texts(self):
        """(the special tokens' texts, {first character: their lengths})"""
        lengths = {}
        for _, special, _ in self._specials:
            lengths.setdefault(special[0], set()).add(len(special))
        return {special for _, special, _ in self._specials}, lengths

    def _specials_in(self, text):
        """The texts of special tokens that `text` holds: vocabularies have thousands of them, few texts have any."""
        known, lengths = self._special_texts
        firsts, found = lengths.keys() & set(text), set()
        if not firsts:
            return found
        for m in re.finditer("[" + "".join(map(re.escape, sorted(firsts))) + "]", text):
            at = m.start()
            found.update(text[at:at + n] for n in lengths[text[at]])
        return found & known

    # ---------------------------------------------------------------- ids -> text
    @oom_guard("decode: the text of ids")
    def decode(self, ids, special=False):
        """The text of `ids`; control tokens are left out unless `special`.  Bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(self.piece(i, special) for i in _listed(ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.add_space_prefix else text

    @oom_guard("detokenize: the text of ids")
    def detokenize(self, ids, special=False, clean_spaces=None):
        """The text of `ids` as llama_detokenize gives it; `special`: with control tokens.  `clean_spaces`: without the
        spaces before . , ? ! 's 're (None: where the vocabulary is written so); then the text may differ from the
        tokens' own.  A begin token that `encode` has added is left out before the first word's space is looked for."""
        ids = [self._check_id(id) for id in _listed(ids)]
        if not special and self.add_bos and ids[:1] == [self.bos_id]:
            ids = ids[1:]
        pieces = [self.piece(i, special) for i in ids]
        if pieces and self.add_space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        raw = b"".join(pieces)
        return (_clean(raw) if (self.clean_spaces if clean_spaces is None else clean_spaces) else raw) \
            .decode("utf-8", "replace")

    def piece(self, id, special=False):
        """The bytes token `id` stands for, perhaps a part of a character; b"" for a control token unless `special`."""
        id = self._check_id(id)
        kind = self._types[id]
        if kind in (CONTROL, UNKNOWN):
            return self._tokens.raw(id) if special else b""
        if kind in (NORMAL, BYTE):
            return self._bytes(id, kind)
        return self._tokens.raw(id) if kind == USER_DEFINED else b""

    def stream(self, at_start=False, special=False):
        """A StreamDecoder; `at_start`: the ids are no continuation, so the space before the first word goes;
        `special`: control tokens are written out."""
        return StreamDecoder(self, at_start, special)

    def _byte_of(self, id):
        """The byte of a token of the form <0x0A>."""
        raw = self._tokens.raw(id)
        try:
            return bytes([int(raw[3:5], 16)])
        except ValueError:
            self._bad(f"byte token {id} is {raw!r}, expected the form <0x0A>")

    # ---------------------------------------------------------------- what the kinds fill in
    def _build(self):
        """The function that turns a part without special tokens into a list of ids."""
        raise NotSupported(f"{type(self).__name__} does not build")

    def _prepare(self, part, after_special):
        return part

    def _bytes(self, id, kind):
        """The bytes that a normal token or a byte token stands for."""
        raise NotSupported(f"{type(self).__name__} has no bytes")

    # ---------------------------------------------------------------- the vocabulary
    @functools.cached_property
    def _to_ids(self):
        """Made when a text is encoded for the first time."""
        with self.building:
            if len(self._vocab) < self.n_vocab:
                seen = {}
                for id, text in enumerate(self._tokens):
                    if seen.setdefault(text or _name_empty(id), id) != id:
                        self._bad(f"tokens {seen[text or _name_empty(id)]} and {id} are both {text!r}")
            to_ids, _ = self._build(), self._specials           # both are tables
            return to_ids

    @functools.cached_property
    def _tokens(self):
        tokens = self._file.get(KEY + "tokens", kind=StringArray)
        if not len(tokens):
            self._bad(f"{KEY}tokens is empty")
        return tokens

    @functools.cached_property
    def _vocab(self):
        """Text -> id."""
        return {text or _name_empty(i): i for i, text in enumerate(self._tokens)}

    @functools.cached_property
    def _mergeable(self):
        """Text -> id of what words may become.  llama.cpp lets them become control tokens, too; the models' own
        tokenizers do not, and untrusted text must not."""
        types = self._types.tolist()
        return {text: id for text, id in self._vocab.items() if types[id] not in (CONTROL, UNKNOWN)}

    @property
    def _unk_text(self):
        """The text of the unknown token; None if the vocabulary has none."""
        return None if self.unk_id is None else self._tokens[self.unk_id] or _name_empty(self.unk_id)

    @functools.cached_property
    def _special_tokens(self):
        types = self._array("token_type", np.full(self.n_vocab, NORMAL, np.int32), "iu")
        return specials(types, self._vocab, self._roles())

    @property
    def _types(self):
        return self._special_tokens.types

    @property
    def stop_ids(self):
        """Ids after which generation ends: eos, bos (models write it between documents), end-of-turn tokens."""
        return self._special_tokens.stop_ids

    @property
    def middle_ids(self):
        """{"fim_pre" "fim_suf" "fim_mid" ...: id}: the tokens of fill-in-the-middle that the vocabulary has."""
        return self._special_tokens.middle

    def _roles(self):
        """Role -> id, for the roles that end a text or stand for its holes."""
        older = {role: self._special_id(key) for role, key in ROLE_KEYS.items()}
        return {"bos": self.bos_id, "eos": self.eos_id, "eot": self._special_id("eot"), "eom": self._special_id("eom"),
                **{role: self._special_id(role) for role in ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep",
                                                             "fim_sep")},
                **{role: id for role, id in older.items() if id is not None}}

    def _array(self, name, default, kinds):
        """A numeric array with one entry per token."""
        a = self._file.get(KEY + name, default, kind=np.ndarray)
        if len(a) != self.n_vocab or a.dtype.kind not in kinds:
            self._bad(f"{KEY}{name} holds {len(a)} {a.dtype}, there are {self.n_vocab} tokens")
        return a

    @functools.cached_property
    def _scores(self):
        scores = self._array("scores", np.zeros(self.n_vocab, np.float32), "fi").astype(np.float32)
        if np.isnan(scores).any():
            self._bad(f"{KEY}scores holds a NaN, at token {int(np.isnan(scores).argmax())}")
        return scores.tolist()

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


def library():
    """The package `tokenizers`: merges, word pieces and unigrams, in compiled code."""
    return extra("tokenizers", "models")


def runner(engine):
    return lambda part: engine.encode(part, add_special_tokens=False).ids


def _listed(ids):
    if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
        raise ParamError(f"token ids are {type(ids).__name__}, expected a list of ints")
    return list(ids)


def _name_empty(i):
    return f"[EMPTY_{i}]"       # llama.cpp's name for a token without text


def _cut(text, special, id, left=False, right=False):
    """"a<x>b<x>" -> "a", id, "b", id; `left`, `right`: without the white space on that side of <x>."""
    pieces = text.split(special)
    if left:
        pieces[:-1] = [p.rstrip(WHITE) for p in pieces[:-1]]
    if right:
        pieces[1:] = [p.lstrip(WHITE) for p in pieces[1:]]
    return [p for p in (pieces[0], *(q for r in pieces[1:] for q in (id, r))) if p != ""]


def _clean(raw):
    """`raw` without the spaces that "clean_up_tokenization_spaces" drops: first those before ? ! . , then those around
    a lone ', then those before 's 'm 're 've."""
    return CONTRACTIONS.sub(b"", re.sub(b" ' ", b"'", BEFORE_MARKS.sub(b"", raw)))


class Absent(Tokenizer):
    """No vocabulary, or one of a kind we cannot read: has ids only."""

    def __init__(self, file):
        self._file = file
        self.model = file.get(KEY + "model", "no_vocab", kind=str)
        self.n_vocab = file.arch_get("vocab_size", 0, kind=int)
        self.bos_id = self.eos_id = self.unk_id = None

    stop_ids = frozenset()

    def _refuse(self, *args, **kwargs):
        if self.model in ("no_vocab", "none"):
            raise ModelError(f"{self._file.path}: the file has no vocabulary; give token ids instead of text, "
                             f"to m.decode or m.logits")
        raise NotSupported(f"{self._file.path}: tokenizer model {self.model!r} is not supported"
                           f"{nearest(self.model, KINDS)} (supported: {', '.join(sorted(KINDS))}); give token ids "
                           f"instead of text, to m.decode or m.logits")

    encode = encode_pair = encode_prompt = decode = detokenize = piece = stream = _refuse


class StreamDecoder:
    """Ids in, whole characters out: `push(id)` gives the text that is complete so far, `flush()` what is left (cut
    characters as U+FFFD)."""

    def __init__(self, tokenizer, at_start=False, special=False):
        self._tokenizer, self._special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = at_start and tokenizer.add_space_prefix

    def push(self, id):
        text = self._utf8.decode(self._tokenizer.piece(id, self._special))
        if self._drop_space and text:
            self._drop_space, text = False, text.removeprefix(" ")
        return text

    def flush(self):
        return self._utf8.decode(b"", final=True)
