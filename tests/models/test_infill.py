"""Fill-in-the-middle: the prompt of a hole, and what a model without the tokens for it says."""
import numpy as np
import pytest

import ggjit as gg
from ggjit.models import load_gguf, load_model, save_gguf
from ggjit.models.networks.load import EMBEDDED
from ggjit.models.text.infill import SNIPPET, infill_ids

PRE, SUF, MID = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"


class Letters:
    """A tokenizer: a number for each letter."""
    bos_id = 1

    def __init__(self, middle, add_bos=False):
        self.middle_ids, self.add_bos = middle, add_bos

    def encode(self, text, add_special=True):
        return [ord(c) for c in text]


THREE = {"fim_pre": 1001, "fim_suf": 1002, "fim_mid": 1003}


def letters(text):
    return [ord(c) for c in text]


def test_the_order_is_that_of_llama_cpp():
    """format_prompt_infill: prefix, suffix, middle; files before them."""
    t = Letters(THREE)
    assert infill_ids(t, "ab", "c") == [1001, *letters("ab"), 1002, *letters("c"), 1003]
    assert infill_ids(t, "ab", "c", suffix_first=True) == [1002, *letters("c"), 1001, *letters("ab"), 1003]
    assert infill_ids(Letters(THREE, True), "a", "") == [1, 1001, 97, 1002, 1003]
    assert infill_ids(t, "a", "", [("x.py", "1")]) == letters(SNIPPET) + letters("1") + [1001, 97, 1002, 1003]
    t = Letters(THREE | {"fim_rep": 1004, "fim_sep": 1005})
    assert infill_ids(t, "a", "", [("x.py", "1"), ("y", "2")]) == [
        1004, *letters("myproject\n"), 1005, *letters("x.py\n1"), 1005, *letters("y\n2"), 1005,
        *letters("filename\n"), 1001, 97, 1002, 1003]


@pytest.fixture(scope="module")
def code_model(tmp_path_factory):
    """The small model with three of its tokens for bytes that no text has in their place."""
    tensors, metadata = load_gguf(EMBEDDED)
    words = list(metadata["tokenizer.ggml.tokens"])
    for byte, text in zip("ÿþý", (PRE, SUF, MID), strict=True):
        words[words.index(byte)] = text
    path = tmp_path_factory.mktemp("fim") / "m.gguf"
    save_gguf(path, tensors, metadata | {"tokenizer.ggml.tokens": words})
    return path


def test_a_model_fills_the_hole(code_model):
    with load_model(code_model, n_threads=1, n_ctx=128) as m:
        ids = m.tokenizer.middle_ids
        prompt = [ids["fim_pre"], *m.tokenize("It was a", add_special=False), ids["fim_suf"],
                  *m.tokenize(" truth", add_special=False), ids["fim_mid"]]
        want = m.generate(prompt, 12)
        assert m.infill("It was a", " truth", 12).text == want.text and want.text
        np.testing.assert_array_equal(m.infill("It was a", " truth", 2).prompt_ids, prompt)


def test_what_cannot_be_filled_is_said(code_model):
    with load_model(None, n_threads=1, n_ctx=64) as m, pytest.raises(gg.NotSupported, match="fim_pre, fim_suf, fim_m"):
        m.infill("a", "b")
    with load_model(code_model, n_threads=1, n_ctx=64) as m:
        with pytest.raises(gg.TypeMismatch, match="after is a text"):
            m.infill("a", 5)
        with pytest.raises(gg.ParamError, match="others is a list"):
            m.infill("a", "b", others=[("x", 1)])
