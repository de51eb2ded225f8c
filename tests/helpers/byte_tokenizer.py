"""A tokenizer of all bytes and a few words that cut characters, without a model; what a grammar allows of its texts."""
from ggjit.models.text.grammar import Matcher

WORDS = [b"ab", b"abc", b"ba", b"aab", b"\xc3\xa4", b"b\xc3", b"\xa4b", b"\xe2\x82", b"\x82\xac", b"a\xe2\x82\xac",
         b"\xc3\xa9a", b"12", b" a", b"\n ", b'": "', b"}}", b"\xf0\x9f\x98"]
PIECES = [b"", *(bytes([i]) for i in range(1, 256)), *WORDS]            # 0 ends a text
ID = {piece: i for i, piece in enumerate(PIECES)}


class ByteTokenizer:
    """A tokenizer of all bytes and WORDS."""
    n_vocab, stop_ids = len(PIECES), frozenset({0})

    def piece(self, id, special=False):
        return PIECES[id]

    def encode(self, text, add_special=True, parse_special=False):
        return [ID[text.encode()]] if text.encode() in ID else [1, 1]


TOKENIZER = ByteTokenizer()


def matches(text, grammar):
    """Is a text allowed, from its beginning to its end?"""
    m = Matcher(grammar)
    for byte in text.encode():
        if not m.allows(ID[bytes([byte])]):
            return False
        m.accept(ID[bytes([byte])])
    return m.allows(0)
