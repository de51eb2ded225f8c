"""Where a text ends, and that no part of a stop string comes out before."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggjit.models.text.answer import Answer
from ggjit.models.text.sampling import Sampler
from ggjit.ops.core.errors import GgjitError

PIECES = [b"", b"a", b"b", b"c", b"ab", b"bc", b"abc", b"\xc3", b"\xa4", b"\n", b"user:"]      # 0 ends a text
SPECIAL = len(PIECES)                                                                # "<end>", never written out


class Letters:
    """A tokenizer of PIECES and one special token."""
    n_vocab, stop_ids, add_space_prefix = SPECIAL + 1, frozenset({0}), False

    def piece(self, id, special=False):
        return PIECES[id] if id < SPECIAL else b"<end>" if special else b""

    def encode(self, text, add_special=True, parse_special=False):
        return [SPECIAL] if parse_special and text == "<end>" else [1] * len(text)

    def stream(self):
        from ggjit.models.text.tokenizer import StreamDecoder
        return StreamDecoder(self)


def said(ids, **options):
    """(pieces, the answer) of a model that wants to say `ids`."""
    answer, pieces = Answer(Letters(), Sampler(temp=0), **options), []
    for id in ids:
        if answer.stop_reason:
            break
        pieces.append(answer.take(np.eye(Letters.n_vocab)[id]))
    return [*pieces, answer.finish()], answer


@pytest.mark.parametrize("ids, options, text, reason, n_tokens", [
    ([1, 2, 0, 3], {}, "ab", "stop_token", 3), ([1, 2, 3], dict(n_predict=2), "ab", "length", 2),
    ([1, 2, 3], dict(n_predict=0), "", "length", 0), ([1, 2, 3], {}, "abc", None, 3),
    ([1, 2, 3, 1], dict(stop="bc"), "a", "stop_string", 3), ([6, 1], dict(stop=["b"]), "a", "stop_string", 1),
    ([1, 2, 2, 0], dict(stop="bbb"), "abb", "stop_token", 4), ([1, 2], dict(stop="bc", n_predict=2), "ab", "length", 2),
    ([1, 3, 2], dict(stop=3), "a", "stop_token", 2), ([1, SPECIAL, 2], dict(stop="<end>"), "a", "stop_token", 2),
    ([1, SPECIAL, 2], {}, "ab", None, 3), ([1, 7, 8, 2], dict(stop="ä"), "a", "stop_string", 3),
    ([1, 7, 2], dict(stop="\ufffd"), "a", "stop_string", 3), ([1, 7], dict(stop="\ufffd"), "a", "stop_string", 2),
    ([9, 10, 1], dict(stop=["\nuser:", "user"]), "", "stop_string", 2)])
def test_why_a_text_ends(ids, options, text, reason, n_tokens):
    pieces, answer = said(ids, **options)
    assert ("".join(pieces), answer.text, answer.stop_reason) == (text, text, reason)
    assert answer.tokens == ids[:n_tokens]


@given(st.lists(st.sampled_from(range(1, 10)), max_size=20), st.lists(st.text("abcä\n", min_size=1, max_size=5),
                                                                      max_size=3))
@settings(max_examples=150, deadline=None)
def test_no_part_of_a_stop_string_comes_out(ids, stop):
    pieces, answer = said(ids, stop=stop)
    texts = [b"".join(PIECES[i] for i in ids[:n + 1]).decode("utf-8", "replace") for n in range(len(ids))]
    # the first tokens that hold a stop string, and where
    ended = next(((t, min(t.find(s) for s in stop if s in t)) for t in texts if any(s in t for s in stop)), None)
    assert "".join(pieces) == answer.text
    if ended:
        assert answer.stop_reason == "stop_string" and answer.text == ended[0][:ended[1]]
    else:
        assert answer.stop_reason is None and answer.text == "".join(texts[-1:])


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=4))
def test_text_comes_out_as_soon_as_it_is_certain(text, stop):
    if stop in text:
        return
    answer = Answer(Letters(), Sampler(temp=0), stop=stop)
    for n, letter in enumerate(text, 1):
        answer.take(np.eye(Letters.n_vocab)[PIECES.index(letter.encode())])
        held = next(k for k in range(n, -1, -1) if k < len(stop) and stop.startswith(text[n - k:n]))
        assert answer.text == text[:n - held]


@pytest.mark.parametrize("stop, words", [
    (b"a", "bytes"), (None, "NoneType"), ([b"a"], "b'a'"), ("", "''"), ([1.5], "1.5"), (SPECIAL + 1, str(SPECIAL + 1)),
    (-1, "-1"), ([True], "True")])
def test_bad_stops(stop, words):
    with pytest.raises(GgjitError, match=f"stop .*{words}"):
        Answer(Letters(), Sampler(), stop=stop)
