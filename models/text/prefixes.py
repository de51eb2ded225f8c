"""Tokenizers that match the prefixes of a text: those of RWKV ("rwkv") and PLaMo 2 ("plamo2").

Neither puts begin or end tokens around a text.
"""
import functools
import math
import operator
import re

from ggjit.models.text.special_tokens import BYTE, CONTROL, UNKNOWN
from ggjit.models.text.vocabulary import Tokenizer

MAX_PREFIXES_NBYTES = 1 << 28       # of all prefixes of a vocabulary; real ones take a few MB
ESCAPES = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
ESCAPED = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)


class Prefixes(dict):
    """Every prefix of every key -> the key's value, None where a prefix is no key.  Keys are all str or all bytes."""

    def __init__(self, items):
        super().__init__()
        items = dict(items)
        if sum(len(key) ** 2 for key in items) // 2 > MAX_PREFIXES_NBYTES:
            raise ValueError(f"texts of up to {max(map(len, items))} characters, as no vocabulary has")
        for key, value in items.items():
            for n in range(1, len(key)):
                self.setdefault(key[:n], None)
            self[key] = value

    def matches(self, text, start):
        """(length, value) of the keys that `text` has at `start`, shortest first."""
        for end in range(start + 1, len(text) + 1):
            part = text[start:end]
            if part not in self:
                return
            if self[part] is not None:
                yield end - start, self[part]

    def longest(self, text, start):
        """(length, value) of the longest of them; (0, None) if there is none."""
        return max(self.matches(text, start), default=(0, None), key=operator.itemgetter(0))


class ByPrefix(Tokenizer):
    """Base of vocabularies whose tokens are found as prefixes of the rest of the text."""

    def piece(self, id, special=False):
        kind = self._types[id := self._check_id(id)]
        return b"" if kind in (CONTROL, UNKNOWN) and not special else self._bytes(id, kind)

    def _prefixes(self, items):
        try:
            return Prefixes(items)
        except ValueError as e:
            self._bad(f"the vocabulary has {e}")


class RWKV(ByPrefix, models=("rwkv",)):
    """The longest token that fits, again and again.  Tokens are bytes, written with Python's escapes."""

    def _build(self):
        return functools.partial(self._longest, self._prefixes((self._bytes(id, None), id)
                                                               for id in self._mergeable.values()))

    def _longest(self, prefixes, part):
        raw, at, ids = part.encode(), 0, []
        while at < len(raw):
            n, id = prefixes.longest(raw, at)
            if not n and self.unk_id is None:
                self._bad(f"no token is a prefix of {raw[at:at + 8]!r}, and there is no unknown_token_id")
            ids.append(id if n else self.unk_id)
            at += n or 1
        return ids

    def _bytes(self, id, kind):
        return ESCAPED.sub(lambda m: bytes([int(m[1], 16)]) if m[1] else ESCAPES.get(m[2], m[2]), self._tokens.raw(id))


class PLaMo2(ByPrefix, models=("plamo2",)):
    """The tokens with the largest sum of scores, the longest of equals, found from the end of the text; a character in
    no token is bytes.  A byte order mark at the start is dropped."""
    DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
    UNKNOWN_COST, MAX_COST = 10_000_000, 20_000_000         # of a score: in units of -1e-4

    def _build(self):
        types, scores = self._types.tolist(), self._scores
        tokens = {text: id for text, id in self._mergeable.items() if types[id] != BYTE}
        costs = {text: _rounded(-scores[id] * 1e4) for text, id in tokens.items()}
        of_bytes = [self._vocab.get(f"<0x{byte:02X}>") for byte in range(256)]
        if None in of_bytes:
            self._bad(f"the token <0x{of_bytes.index(None):02X}> is missing")
        return functools.partial(self._best, self._prefixes((text, (tokens[text], cost)) for text, cost in costs.items()
                                                            if cost < self.MAX_COST), of_bytes)

    def _best(self, prefixes, of_bytes, part):
        text = part.removeprefix("\ufeff")
        cost, step = [0] * (len(text) + 1), [None] * len(text)          # from here to the end; (length, id or None)
        for i in reversed(range(len(text))):
            cost[i], step[i] = cost[i + 1] + self.UNKNOWN_COST, (1, None)
            for n, (id, own) in prefixes.matches(text, i):
                if own + cost[i + n] <= cost[i]:
                    cost[i], step[i] = own + cost[i + n], (n, id)
        ids, i = [], 0
        while i < len(text):
            n, id = step[i]
            ids += [of_bytes[byte] for byte in text[i].encode()] if id is None else [id]
            i += n
        return ids

    def _bytes(self, id, kind):
        return self._byte_of(id) if kind == BYTE else self._tokens.raw(id)


def _rounded(x):
    """To the nearest integer, halves away from zero."""
    return int(math.copysign(math.floor(abs(x) + 0.5), x))
