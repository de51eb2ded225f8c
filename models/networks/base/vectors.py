"""Texts as vectors and scores.  Functions of `self` are methods of Network."""
import numpy as np

from ggjit.ops.core.errors import NotSupported, TypeMismatch
from ggjit.ops.core.host_memory import empty
from ggjit.ops.core.progress import work

RERANK_PROMPT = "tokenizer.chat_template.rerank"        # with {query} and {document} where they belong


def embed(self, texts):
    """(n, dim) float32, a row of length 1 for each text: pooled as the file says, or load_model's `pooling`.

        v = m.embed(["a cat", "a dog"])
        v @ v.T                                     # how alike they are

    Errors: TypeMismatch, ParamError for a text longer than the context, NotSupported for a model that says no
    pooling.
    """
    texts, _ = _listed([texts] if isinstance(texts, str) else texts, "embed"), _pooling(self).of_embedding()
    out = empty((len(texts), self.n_embd), np.float32, "embed")
    with work("embedding", len(texts)) as step:
        for i, text in enumerate(texts):
            out[i] = self.embed_ids(self.tokenize(text))
            step()
    return out


def _pooling(self):
    """The Pooling of a network that reads texts.  Errors: NotSupported."""
    if self.pooling is None:
        raise NotSupported(f"{self.file.arch} models make no vectors of texts; load a bert model")
    return self.pooling


def rerank(self, query, texts):
    """(n,) float32: how well each text answers the query, by a reranker; the highest score is the best text.

        scores = m.rerank("who wrote Emma?", texts)
        texts[scores.argmax()]

    A text is read with the query as the model was trained: as a pair, or in the file's own prompt.  Scores are the
    first number of its classifier: of BERT and its kin any number (1 / (1 + exp(-score)) is a probability), of
    Qwen 3 the probability of "yes".
    Errors: TypeMismatch, ParamError for a query and text that do not fit the context, NotSupported for a model
    without such a head.
    """
    if not isinstance(query, str):
        raise TypeMismatch(f"rerank takes a query and a list of texts, got a {type(query).__name__} as query")
    texts, _ = _listed(texts, "rerank"), _pooling(self).check_ranks()
    prompt = self.file.get(RERANK_PROMPT, None, str)
    out = empty((len(texts),), np.float32, "rerank")
    with work("ranking", len(texts)) as step:
        for i, text in enumerate(texts):
            pair = self.tokenizer.encode_pair(query, text) if prompt is None else \
                (self.tokenizer.encode_prompt(prompt, query=query, document=text), None)
            out[i] = self.rank_ids(*pair)[0]
            step()
    return out


def _listed(texts, what):
    if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
        got = type(texts).__name__ if not isinstance(texts, list | tuple) else \
            next(repr(t) for t in texts if not isinstance(t, str))
        raise TypeMismatch(f"{what} takes a list of strings, got {got}")
    return texts
