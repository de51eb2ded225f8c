"""A vocabulary as a prefix tree of characters.

    "a" "ab" "abc" "b\\xc3"     root - a: "a" - b: "ab" - c: "abc"
                                    \\ b: then the beginning of a character U+00C0 to U+00FF

Nodes are numbered level by level, the children of a node side by side, so that a level is one NumPy operation.
"""
import weakref

import numpy as np

_TRIES = weakref.WeakKeyDictionary()


class TokenTrie:
    """code_points, first_child, n_children: of each node, (n_nodes,).  ends: (nodes, ids) of the tokens that are a
    whole path.  tails: (nodes, ids, lowest, highest) of those that end within a character, which is one from lowest to
    highest.  continues: ids that begin within a character.  pieces: the bytes of each id, b"" for what is no text."""

    @classmethod
    def of(cls, tokenizer):
        """The tree of a tokenizer's vocabulary, made when it is first asked for."""
        if tokenizer not in _TRIES:
            _TRIES[tokenizer] = cls([tokenizer.piece(i) for i in range(tokenizer.n_vocab)])
        return _TRIES[tokenizer]

    def __init__(self, pieces):
        self.pieces, self.n_vocab = pieces, len(pieces)
        self.continues, found = [], []                          # found: (text, id, completions of what is begun)
        for id, piece in enumerate(pieces):
            text, tail = split(piece)
            if text is not None and piece:
                found.append((text, id, completions(tail) if tail else None))
            elif piece and 0x80 <= piece[0] < 0xC0:
                self.continues.append(id)
        found.sort(key=lambda one: one[0])
        at = self._grow([text for text, *_ in found]).tolist()
        self.ends = _columns([(n, id) for n, (_, id, range_) in zip(at, found, strict=True) if not range_], 2)
        self.tails = _columns([(n, id, *range_) for n, (_, id, range_) in zip(at, found, strict=True) if range_], 4)

    def _grow(self, texts):
        """Make the nodes for sorted texts: the node of each."""
        code_points = np.frombuffer("".join(texts).encode("utf-32-le"), np.int32)
        lengths = np.array([len(t) for t in texts], np.int64)
        starts = np.cumsum(lengths) - lengths
        at, made, parents, n = np.zeros(len(texts), np.int64), [np.zeros(1, np.int32)], [], 1
        for depth in range(lengths.max(initial=0)):
            longer = np.flatnonzero(lengths > depth)
            c, parent = code_points[starts[longer] + depth], at[longer]
            new = np.ones(len(longer), bool)                    # texts that begin alike stand side by side
            new[1:] = (c[1:] != c[:-1]) | (parent[1:] != parent[:-1])
            at[longer] = n - 1 + np.cumsum(new)
            made.append(c[new])
            parents.append(parent[new])
            n += int(new.sum())
        self.code_points = np.concatenate(made)
        self.n_children = np.bincount(np.concatenate([np.zeros(0, np.int64), *parents]), minlength=n)
        self.first_child = 1 + np.cumsum(self.n_children) - self.n_children
        return at


def _columns(rows, n):
    return np.array(rows, np.int64).reshape(-1, n).T


def split(data):
    """(text, bytes of an unfinished character at its end); (None, b"") for bytes that are no UTF-8."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as e:
        if e.end == len(data) and completions(data[e.start:]):
            return data[:e.start].decode(), data[e.start:]
        return None, b""


def completions(tail):
    """(lowest, highest) code point whose UTF-8 begins with `tail`, which is not whole; None if there is none."""
    first = tail[0]
    n = 2 if 0xC2 <= first <= 0xDF else 3 if 0xE0 <= first <= 0xEF else 4 if 0xF0 <= first <= 0xF4 else 0
    if len(tail) >= n:
        return None
    # the second byte's range keeps out overlong forms, surrogates and what is above U+10FFFF
    second = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}.get(first, (0x80, 0xBF))
    if len(tail) > 1 and not (second[0] <= tail[1] <= second[1] and all(0x80 <= b <= 0xBF for b in tail[2:])):
        return None
    low, high = (tail + bytes([second[i]] if len(tail) == 1 else []) for i in (0, 1))
    return tuple(ord((part + fill * (n - len(part))).decode()) for part, fill in ((low, b"\x80"), (high, b"\xbf")))
