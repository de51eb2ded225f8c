"""Computations before the first request, so that no request waits for the compiler.

Prompts of some lengths, then as many texts at once as there may be: kernels are compiled, plans made, weights read.
Then a chat: the vocabulary is read, the template compiled.
"""
import contextlib

from ggjit.models.networks.parts.pooling import RANK
from ggjit.models.networks.texts.batches import padded_count
from ggjit.models.text.running_batch import LEAST_PIECE, RunningBatch
from ggjit.ops.core.errors import GgjitError

# tokens: kernels differ by the number of columns
LENGTHS = *range(2, 18), 24, 32, 48, 64, 100, LEAST_PIECE


def warm_up(model, template=None):
    """Compute with the model as requests will.  For a thread that has it alone.  template: of chats."""
    if hasattr(model, "decode") and "tokenizer.ggml.tokens" in model.file.metadata:
        _write(model)
        with contextlib.suppress(GgjitError):       # a template that is missing or fails: requests are told
            model.chat_prompt([{"role": "user", "content": "a"}], template=template)
    if model.pooling.kind not in ("none", RANK):
        for n in _lengths(model):
            model.embed_ids([0] * n)
    elif model.pooling.n_scores:
        for n in _lengths(model):
            model.rank_ids([0] * n)


def _lengths(model):
    whole = getattr(model, "n_batch", LEAST_PIECE)
    return [n for n in sorted({*LENGTHS, whole}) if n < min(model.n_ctx, whole + 1)]


def _write(model):
    batch = RunningBatch(model, exact=True)
    for n in _lengths(model):
        _run(batch, [[0] * n])
    for n in sorted({min(padded_count(n), model.n_seqs) for n in range(1, model.n_seqs + 1)}):
        _run(batch, [[0]] * n)
    batch.close()


def _run(batch, prompts):
    """One token after each prompt, sampled as requests do by default.  Errors: those of the sequences."""
    sequences = [batch.submit(ids, 1, temp=0.8, cache_prompt=False) for ids in prompts]
    while batch.turn():
        pass
    for s in sequences:
        if isinstance(s.error, GgjitError):
            raise s.error
