"""Token ids of a network: encoding and decoding of texts, and checks of ids that the user gives.

Functions of `self` are methods of Network.
"""
import numpy as np

from ggjit.models.text.tokenizer import Tokenizer
from ggjit.ops.core.errors import IndexRangeError, ParamError, StaleHandle, TypeMismatch


def tokenizer(self):
    """Built from the file's vocabulary when it is first needed."""
    if self._tokenizer is None:
        with self.growth_of_text:
            self._tokenizer = Tokenizer.from_gguf(self.file)
        self._tokenizer.building = self.growth_of_text
    return self._tokenizer


def tokenize(self, text, special=False, add_special=True):
    """Token ids of `text`, a list of int.  A file without vocabulary raises here.

    special      "<|im_end|>" in the text is that token (llama.cpp: parse_special); never for untrusted text
    add_special  with the begin and end tokens that the model was trained with

        m.tokenize("Once upon a time")
    """
    if not isinstance(text, str):
        raise TypeMismatch(f"tokenize takes a string, got {type(text).__name__}")
    return self.tokenizer.encode(text, add_special, special)


def detokenize(self, ids, special=False):
    """The text of token ids, as llama_detokenize gives it; `special`: with control tokens.

    Many vocabularies drop the space before punctuation here ("clean_up_tokenization_spaces"), so it may not be the
    text that the ids came from; `m.tokenizer.decode(ids)` keeps every byte of every token.

        m.detokenize(m.tokenize("Once upon a time"))        # 'Once upon a time'
    """
    return self.tokenizer.detokenize(ids, special)


def ids_of_text(self, text):
    """Ids of a text that is not empty; of an empty one, the vocabulary's begin.  Errors: ParamError."""
    ids = self.tokenize(text)
    if not ids and self.CAUSAL and self.tokenizer.bos_id is not None:
        return [self.tokenizer.bos_id]
    if not ids:
        raise ParamError(f"the text {text!r} has no tokens; give at least one word")
    return ids


def end_of_ids(self):
    """Valid token ids are below this number."""
    return self.n_vocab


def checked_ids(self, ids, n_max):
    """`ids`, or the ids of a text, as int32, each inside the vocabulary and all inside the context."""
    self._hooks.refuse_nesting()
    if self._freed:
        raise StaleHandle(f"{self!r} was freed; load the model again")
    if type(ids) is list and len(ids) == 1 and type(ids[0]) is int and 0 <= ids[0] < self.n_vocab and n_max > 0:
        return np.array(ids, np.int32)      # a decode step: the checks below would take a third of its Python
    if isinstance(ids, str):
        ids = self._ids_of_text(ids)
    try:
        a = np.asarray(ids)
    except ValueError as e:
        raise ParamError(f"token ids must be a non-empty list of integers: {e}") from None
    if a.ndim != 1 or a.size == 0 or a.dtype.kind not in "iu":
        raise ParamError(f"token ids must be a non-empty list of integers, got shape {a.shape} {a.dtype}")
    if a.size > n_max:
        more = f" or load the model with a larger n_ctx (trained for {self.n_ctx_train})" if self.CAUSAL else ""
        past = f" behind the {self.n_ctx - n_max} it holds (m.reset() forgets them)" if n_max < self.n_ctx else ""
        raise ParamError(f"{a.size} tokens do not fit the context of {self.n_ctx}{past}; shorten the text{more}")
    values = a.tolist()
    if min(values) < 0 or max(values) >= self._end_of_ids:
        at = next(i for i, value in enumerate(values) if not 0 <= value < self._end_of_ids)
        raise IndexRangeError(f"token id {values[at]} at position {at} is outside the vocabulary "
                              f"0..{self.n_vocab - 1}")
    return a.astype(np.int32)               # a copy: what was checked is what is computed
