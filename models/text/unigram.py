"""SentencePiece unigram ("t5"): the pieces with the largest sum of scores, after the normalisation that the file
defines.

A byte string of the file ("precompiled_charsmap") maps texts to texts: the first 4 bytes are the length of a double
array, then comes the array, then the replacements, each ended by a zero.  An entry of the array, 32 bits: bits 0-7 the
byte that leads here, bit 8 that a replacement follows, bits 10-30 the base of the children, 256 times as large if bit 9
is set.  Node n has the children base(n) ^ byte, each of which has the byte that leads there; its child with byte 0 is
the offset of its replacement, with bit 31 set.  Source: SentencePiece's normalizer.cc and Darts-clone.
"""
import re

import numpy as np

from ggjit.models.text.prefixes import Prefixes
from ggjit.models.text.special_tokens import BYTE, NORMAL, UNUSED, USER_DEFINED
from ggjit.models.text.vocabulary import KEY, SPACE, Tokenizer, library, runner

MAX_KEY_NBYTES = 256            # of a charsmap; SentencePiece's own have up to 18


class Unigram(Tokenizer, models=("t5",)):
    """Text in no token is the unknown token, once for a run of it."""
    ADD_EOS = True
    DEFAULT_IDS = {"eos": 1, "unknown": 2}

    def _build(self):
        if self.unk_id is None:
            self._bad(f"{KEY}unknown_token_id is missing")
        types, scores = self._types, np.array(self._scores)
        matched = np.isin(types, (NORMAL, USER_DEFINED, UNUSED))
        least = min(scores[types == NORMAL].tolist(), default=0.0)      # unknown text counts 10 less than this
        scores[types == USER_DEFINED] = 0.0
        # a token without text never matches, but keeps the place of its id
        pieces = [(text if found else "", score if found else least) for text, found, score
                  in zip(self._tokens, matched.tolist(), scores.tolist(), strict=True)]
        run = runner(library().Tokenizer(library().models.Unigram(pieces, self.unk_id, False)))
        normal = self._normaliser()
        return lambda part: run(text) if (text := normal(part)) else []

    def _normaliser(self):
        """The function that writes a part as the vocabulary does: replacements, then spaces as "▁"."""
        replace = replacer(self._charsmap())
        merge = self._file.get(KEY + "remove_extra_whitespaces", False, kind=bool)

        def normal(part):
            text = replace(part)
            if merge:
                return "".join(SPACE + word for word in text.split(" ") if word)
            n_spaces = len(text) - len(text.lstrip(" "))
            if self.add_space_prefix and n_spaces < len(text):          # before the first word, after spaces before it
                text = text[:n_spaces] + " " + text[n_spaces:]
            return text.replace(" ", SPACE)
        return normal

    def _charsmap(self):
        """{text: replacement} of the file."""
        blob = self._file.get(KEY + "precompiled_charsmap", None, kind=np.ndarray)
        if blob is None or not len(blob):
            return {}
        if blob.dtype.itemsize != 1:
            self._bad(f"{KEY}precompiled_charsmap holds {blob.dtype}, expected bytes")
        try:
            return charsmap(blob.tobytes())
        except ValueError as e:
            self._bad(f"{KEY}precompiled_charsmap is damaged ({e})")

    def _bytes(self, id, kind):
        return self._byte_of(id) if kind == BYTE else self._tokens.raw(id).replace(SPACE.encode(), b" ")


def charsmap(blob):
    """{text: replacement} of a precompiled_charsmap; ValueError for one that is damaged."""
    n = int.from_bytes(blob[:4], "little") // 4 * 4
    if len(blob) < 5 or 4 + n >= len(blob) or not n:
        raise ValueError(f"{len(blob)} bytes, of which the array takes {n}")
    nodes, texts, found = np.frombuffer(blob, "<u4", n // 4, 4), blob[4 + n:], {}
    byte = np.arange(1, 256, dtype=np.uint32)
    todo, n_visits = [(b"", _base(nodes[0]))], 0
    while todo:
        key, base = todo.pop()
        n_visits += 1
        if n_visits > len(nodes) or len(key) > MAX_KEY_NBYTES:
            raise ValueError("it runs in a circle")
        children = base ^ byte
        inside = children < len(nodes)
        inside[inside] = nodes[children[inside]] & 0x800000FF == byte[inside]
        for child, c in zip(children[inside].tolist(), byte[inside].tolist(), strict=True):
            node, longer = nodes[child], key + bytes([c])
            base_of_child = child ^ _base(node)
            if node >> np.uint32(8) & 1:
                found[longer.decode()] = _text_at(texts, nodes, base_of_child)
            todo.append((longer, base_of_child))
    return found


def _base(node):
    return (int(node) >> 10 << ((int(node) & 0x200) >> 6)) & 0xFFFFFFFF


def _text_at(texts, nodes, place):
    """The replacement whose offset the array holds at `place`."""
    if place >= len(nodes):
        raise ValueError(f"entry {place} of {len(nodes)}")
    start = int(nodes[place]) & 0x7FFFFFFF
    end = texts.find(b"\0", start)
    if start >= len(texts) or end < 0:
        raise ValueError(f"a replacement at byte {start} of {len(texts)}")
    return texts[start:end].decode()


def replacer(mapping):
    """The function that replaces the longest key at each place, from left to right."""
    if not mapping:
        return lambda text: text
    prefixes, long = Prefixes(mapping), [key for key in mapping if len(key) > 1]
    # characters that keys start with: others are skipped
    starts = re.compile(f"{_any_of({key for key in mapping if len(key) == 1})}"
                        f"|{_any_of({key[0] for key in long})}(?={_any_of({key[1] for key in long})})")

    def replace(text):
        out, done = [], 0
        for m in starts.finditer(text):
            if (start := m.start()) >= done:
                n, new = prefixes.longest(text, start)
                if n:
                    out += text[done:start], new
                    done = start + n
        return "".join(out) + text[done:]
    return replace


def _any_of(chars):
    """A pattern for one of `chars`; one that never matches for none."""
    return "[" + "".join(map(re.escape, sorted(chars))) + "]" if chars else r"(?!)"
