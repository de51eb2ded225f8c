"""Byte-pair encoding: the pre-tokenizer splits a text into words, then merges apply in the order of the file.

    gpt2        bytes as printable characters; or raw characters, where the pre-tokenizer says so
    gemma4      raw characters, spaces as "▁": SentencePiece's alphabet with merges in place of scores
    whitespace  words between white space, which is lost; perhaps lower-cased (jina-embeddings-v2-base-zh)
    hybriddna   between <dna> and </dna> groups of six bases, elsewhere as gpt2
"""
import functools
import re

from ggjit.models.core.byte_chars import BYTE_OF_CHAR
from ggjit.models.files.gguf import StringArray
from ggjit.models.text.pre_tokenizers import BY_NAME, KEEP_SPACES, expressions, pre_tokenizer
from ggjit.models.text.special_tokens import BYTE
from ggjit.models.text.vocabulary import KEY, SPACE, Tokenizer, library, runner

# the file marks tokens of six bases with it, to tell them from words of the same letters
DNA_MARK = "\ue000"
N_BASES = 6
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


class BPE(Tokenizer, models=("gpt2",)):
    """Byte-pair encoding.  Where the file says nothing of begin tokens, the pre-tokenizer decides."""

    def __init__(self, file):
        self._pre_name = self._named_pre(file) or "default"
        self._pre = BY_NAME.get(self._pre_name)             # an unknown name is refused when text is to be encoded
        self.ADD_BOS = self._pre is not None and self._pre.add_bos
        self.CLEAN_SPACES = self._pre_name not in KEEP_SPACES
        super().__init__(file)
        if self._pre is not None and self._pre.lines:       # as llama.cpp, whatever the file says
            self.add_bos = self.bos_id is not None or self._bad(f"{KEY}bos_token_id is missing")

    def _named_pre(self, file):
        return file.get(KEY + "pre", "default", kind=str)

    def _build(self):
        pre = pre_tokenizer(self._pre_name, self._file.path)
        run = self._engine(pre)
        if not pre.lines:
            return run
        vocab = self._vocab

        def by_lines(part):
            return [id for piece in re.split("(\n+)", part) if piece
                    for id in ([vocab[piece]] if piece[0] == "\n" and piece in vocab else run(piece))]
        return by_lines

    def _engine(self, pre):
        tokenizers, vocab = library(), dict(self._vocab)
        merges = {}                                         # the first of equal pairs counts
        for text in self._merge_texts():
            at = text.find(" ", 1)
            merges[text[:at], text[at + 1:]] = None
        for left, right in merges:                          # intermediate results of merges need not be tokens
            for text in (left, right, left + right):
                vocab.setdefault(text, len(vocab))
        if not vocab.keys() >= (set(BYTE_TOKENS) if pre.raw else BYTE_OF_CHAR.keys()):
            vocab.setdefault("", len(vocab))                # stands between its neighbours, then is dropped
        engine = tokenizers.Tokenizer(tokenizers.models.BPE(
            vocab=vocab, merges=list(merges), ignore_merges=pre.ignore_merges, byte_fallback=pre.raw,
            unk_token="" if "" in vocab else None))
        P = tokenizers.pre_tokenizers
        cuts = [P.Split(tokenizers.Regex(pattern), "isolated") for pattern in expressions(pre)]
        alphabet = [] if pre.raw else [P.ByteLevel(add_prefix_space=False, use_regex=False)]
        engine.pre_tokenizer = P.Sequence([*cuts, *alphabet])
        run = runner(engine)
        if len(vocab) == self.n_vocab:
            return run
        none = {id: self._of_characters(text, pre.raw) for text, id in vocab.items() if id >= self.n_vocab}
        return lambda part: [i for id in run(part) for i in none.get(id, (id,))]

    def _merge_texts(self):
        if self._pre_name == "kimi-k2" and KEY + "merges" not in self._file.metadata:
            return ()
        return self._file.get(KEY + "merges", kind=StringArray)

    def _of_characters(self, text, raw):
        """Ids of a text that is no token itself: those of its bytes, as far as the vocabulary has tokens for them."""
        names = [BYTE_TOKENS[byte] for byte in text.encode()] if raw else [c for c in text if c.isascii()]
        return [self._vocab[name] for name in names if name in self._vocab]

    def _prepare(self, part, after_special):
        return part.replace(" ", SPACE) if self._pre is not None and self._pre.escape else part

    def _bytes(self, id, kind):
        if kind == BYTE:
            return self._byte_of(id)
        if self._pre is not None and self._pre.raw:
            return self._tokens.raw(id).replace(SPACE.encode(), b" ") if self._pre.escape else self._tokens.raw(id)
        out = bytearray()
        for char in self._text(id):
            byte = BYTE_OF_CHAR.get(char)
            out += bytes([byte]) if byte is not None else char.encode()
        return bytes(out)

    def _text(self, id):
        return self._tokens[id]


class Gemma4(BPE, models=("gemma4",)):
    """Gemma 4's byte-pair encoding: its files name no pre-tokenizer."""

    def _named_pre(self, file):
        return "gemma4"


class Whitespace(BPE, models=("whitespace",)):
    """Words between white space, which itself is no token."""

    def _build(self):
        run = super()._build()
        lower = self._file.get(KEY + "normalizer.lowercase", self._pre_name != "whitespace", kind=bool)

        def words(part):
            part = "".join(c.lower()[0] for c in part) if lower else part       # İ is i, without the dot above
            return [id for word in re.split(WHITE_SPACE, part) if word for id in run(word)]
        return words


class HybridDNA(BPE, models=("hybriddna",)):
    """Groups of bases are the last tokens of the vocabulary, behind <oov>; a group that is cut off is filled with A."""

    @functools.cached_property
    def _first_kmer(self):
        return self._vocab.get("<oov>", self.n_vocab) + 1

    def _text(self, id):
        text = super()._text(id)
        return text.removesuffix(DNA_MARK) if id >= self._first_kmer and len(text) > 1 else text

    def _build(self):
        run, vocab = super()._build(), self._vocab
        marks = [vocab.get(text) for text in ("<dna>", "</dna>", "<oov>")]
        if None in marks:
            return run
        begin, end, unknown = marks

        def kmers(text):
            bases = text.encode().upper().decode("latin-1")             # a byte each
            for i in range(0, len(bases), N_BASES):
                yield vocab.get(bases[i:i + N_BASES].ljust(N_BASES, "A") + DNA_MARK, unknown)

        def sections(part):
            ids = []
            while part:
                words, opened, part = part.partition("<dna>")
                ids += run(words) if words else []
                if opened:
                    bases, closed, part = part.partition("</dna>")
                    ids += [begin, *kmers(bases), *([end] if closed else [])]
            return ids
        return sections


# what \s is in a pattern; Python's own has the four separators U+001C to U+001F, too
WHITE_SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"
