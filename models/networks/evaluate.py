"""Evaluation of a model on a text, in chunks of n_ctx tokens: perplexity, KL divergence from a better model, and
the importance of each column of each matrix (an importance matrix).

    chunk   t0 t1 ... t[n/2] | t[n/2+1] ... t[n-1]      t0 becomes the beginning-of-text token, where a model has one
            read only          predicted: -log p of each, given all before it

    perplexity = exp(mean of -log p)        KL = mean over positions of sum_v p(v) (log p(v) - log q(v)), p the better

These are llama.cpp's methods, so the numbers can be compared with its; so can files of log-probabilities:

    "_logits_" | n_ctx, n_vocab, n_chunks | tokens | for each predicted position: scale, smallest log p as float32,
    uint16 codes of n_vocab (rounded up to even): log p = scale code + smallest          (int32, little endian)
"""
import contextlib
import dataclasses
import math
import os
import struct

import numpy as np

from ggjit.core.arguments import typed_call
from ggjit.display.progress import bar
from ggjit.models.core.checks import integer, is_path, read_text
from ggjit.models.files.imatrix import Imatrix, ImportanceSums
from ggjit.models.files.save import CannotWrite, refuse_existing
from ggjit.models.networks.base.network import Network
from ggjit.ops.core.errors import BadFile, ModelError, NotSupported, ParamError, TypeMismatch
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F32
from ggjit.ops.core.whole_file import whole_file
from ggjit.sched.scheduler import Scheduler

LOGITS_MAGIC = b"_logits_"
N_CTX = 512
SMALLEST_LOG_P = 16             # smallest log-probability of a file, relative to the largest of its row
LEAST_N_CTX = 32                # shorter contexts say nothing about a text


# ---------------------------------------------------------------- chunks
def chunks_of(m, data, n_ctx, n_chunks=None):
    """int32 (n, n_ctx): tokens of `data`, a text, a path of one or token ids, in whole chunks.  Errors: ParamError."""
    if not isinstance(m, Network):
        raise TypeMismatch(f"a model is expected, such as load_model(PATH), got {type(m).__name__}")
    if not hasattr(m, "decode"):
        raise NotSupported(f"{m.file.path}: {m.file.arch} predicts no tokens; take a model that generates text")
    n_ctx = min(N_CTX, m.n_ctx) if n_ctx is None else n_ctx
    integer("n_ctx", n_ctx, LEAST_N_CTX, m.n_ctx,
            f" (the context of this model, which was trained for {m.n_ctx_train})")
    data = read_text(data) if is_path(data) else data
    ids = np.asarray(m.tokenize(data) if isinstance(data, str) else data)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) < 2 * n_ctx:
        raise ParamError(f"the text has {ids.size} tokens, chunks of {n_ctx} need at least {2 * n_ctx}; take a longer "
                         f"text, or shorter chunks with n_ctx= (--n-ctx)")
    n = len(ids) // n_ctx
    if n_chunks is not None:
        n = min(n, integer("n_chunks", n_chunks, 1, 1 << 31))
    return ids[:n * n_ctx].astype(np.int32).reshape(n, n_ctx)


def _logits(m, chunk, first):
    """Logits (n, n_vocab) after the tokens from `first` to the last but one, a batch at a time: an iterator."""
    ids = chunk.copy()
    if m.file.get("tokenizer.ggml.model", "no_vocab") != "no_vocab" and m.tokenizer.add_bos:
        ids[0] = m.tokenizer.bos_id
    m.reset()
    for start in range(0, len(ids), m.n_batch):
        part = ids[start:start + m.n_batch]
        logits = m.decode(part, all_logits=True)
        keep = logits[max(first - start, 0):len(ids) - 1 - start]
        if len(keep):
            yield m._finite(keep, "the logits")


def _log_softmax(logits):
    """log p in float64."""
    z = logits.astype(np.float64)
    z -= z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


# ---------------------------------------------------------------- perplexity
@dataclasses.dataclass
class Mean:
    """Mean and standard error of numbers that come in pieces."""
    n: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, x):
        self.n, self.total, self.squares = self.n + x.size, self.total + x.sum(), self.squares + (x * x).sum()

    @property
    def mean(self):
        return float(self.total / self.n)

    @property
    def error(self):
        variance = self.squares / self.n - self.mean ** 2
        return math.sqrt(max(variance, 0.0) / max(self.n - 1, 1))


@typed_call
def perplexity(m, data, n_ctx=None, n_chunks=None, base=None, save_logits=None, progress=True, force=False):
    """How well the model predicts a text: {"perplexity", "error", "n_tokens", "n_chunks"}; smaller is better.

        perplexity(load_model("q4.gguf"), open("wiki.txt").read(), base=load_model("f16.gguf"))

    m: a model that generates text; data: a text, the path of one, or token ids, cut into chunks of n_ctx tokens (512,
    or the model's context where that is shorter).  base: a better model with the same vocabulary, or a file of its
    log-probabilities (save_logits, or llama-perplexity's): then also "kl_divergence" (mean, in nats), "kl_error",
    "kl_median", "kl_99", "kl_max", "same_top" (share of positions where both find the same token likeliest) and
    "base_perplexity".  save_logits: path of a file for the log-probabilities of `m`, 16 bits each; force: it is
    replaced if it is there.
    Errors: ParamError for a text of less than two chunks, ModelError for another vocabulary, BadFile, CannotWrite.
    Source: llama.cpp's llama-perplexity.
    """
    if save_logits is not None:
        refuse_existing(save_logits, force)
    if isinstance(base, str | os.PathLike):
        base = SavedLogits(base)
        n_ctx = base.n_ctx
        data = base.tokens.reshape(-1) if data is None else data
    chunks = chunks_of(m, data, n_ctx, n_chunks)
    n_ctx = chunks.shape[1]
    if base is not None:
        chunks = _comparable(m, base, chunks)
    first, nll, base_nll, kl, same = n_ctx // 2, Mean(), Mean(), [], Mean()
    with _log_file(save_logits, m, chunks) as write, bar("chunks", len(chunks), drawn=progress) as step:
        for c, chunk in enumerate(chunks):
            theirs = None if base is None else base.chunk(c) if isinstance(base, SavedLogits) else \
                np.concatenate([_log_softmax(part) for part in _logits(base, chunk, first)])
            at = 0
            for logits in _logits(m, chunk, first):
                write(logits)
                q, wanted = _log_softmax(logits), chunk[first + 1 + at:first + 1 + at + len(logits)]
                rows = np.arange(len(wanted))
                nll.add(-q[rows, wanted])
                if theirs is not None:
                    p = theirs[at:at + len(logits)]
                    base_nll.add(-p[rows, wanted])
                    kl.append(np.where(p > -SMALLEST_LOG_P, np.exp(p) * (p - q), 0.0).sum(1))
                    same.add((p.argmax(1) == q.argmax(1)).astype(np.float64))
                at += len(logits)
            step()
    m.reset()
    value = math.exp(min(nll.mean, 700.0))
    out = {"perplexity": value, "error": value * nll.error, "n_tokens": nll.n, "n_chunks": len(chunks), "n_ctx": n_ctx}
    return out if base is None else out | _divergence(np.concatenate(kl), base_nll, same)


def _divergence(kl, base_nll, same):
    return {"kl_divergence": float(kl.mean()), "kl_error": float(kl.std() / math.sqrt(max(len(kl) - 1, 1))),
            "kl_median": float(np.median(kl)), "kl_99": float(np.quantile(kl, 0.99)), "kl_max": float(kl.max()),
            "same_top": same.mean, "base_perplexity": math.exp(min(base_nll.mean, 700.0))}


def _comparable(m, base, chunks):
    """As many of `chunks` as the base has.  Errors: ParamError where the base has another vocabulary or text."""
    named = base.path if isinstance(base, SavedLogits) else base.file.path if isinstance(base, Network) else None
    if named is None:
        raise TypeMismatch(f"base is a model or the path of a file of log-probabilities, got {type(base).__name__}")
    if base.n_vocab != m.n_vocab:
        raise ModelError(f"{named}: {base.n_vocab} tokens, {m.file.path} has {m.n_vocab}; distributions over different "
                         f"vocabularies cannot be compared")
    if isinstance(base, SavedLogits):
        chunks = chunks[:len(base.tokens)]
        if not (chunks == base.tokens[:len(chunks)]).all():
            raise ModelError(f"{named}: made from another text, or with another tokenizer; make it again from "
                             f"this text")
    elif chunks.shape[1] > base.n_ctx:
        raise ParamError(f"{named}: its context has {base.n_ctx} tokens, chunks have {chunks.shape[1]}; load it with a "
                         f"larger n_ctx")
    return chunks


# ---------------------------------------------------------------- files of log-probabilities
class SavedLogits:
    """A file of log-probabilities: `.n_ctx .n_vocab .tokens` (n_chunks, n_ctx), `chunk(i)`.  Errors: BadFile."""

    def __init__(self, path):
        self.path = os.fspath(path)
        try:
            data = np.memmap(self.path, np.uint8, "r")
        except (OSError, ValueError) as e:
            raise BadFile(f"{self.path}: {getattr(e, 'strerror', None) or e}; check the path") from e
        if data.size < 20 or data[:8].tobytes() != LOGITS_MAGIC:
            raise BadFile(f"{self.path}: not a file of log-probabilities; write one with --save-logits, or name "
                          f"a model")
        self.n_ctx, self.n_vocab, n = struct.unpack("<3i", data[8:20].tobytes())
        if not (LEAST_N_CTX <= self.n_ctx < 1 << 24 and 0 < self.n_vocab < 1 << 24 and 0 < n < 1 << 24):
            raise BadFile(f"{self.path}: {n} chunks of {self.n_ctx} tokens out of {self.n_vocab}; the file is damaged")
        self.n_words = 2 * ((self.n_vocab + 1) // 2) + 4
        self._start = 20 + 4 * n * self.n_ctx
        self._n_rows = self.n_ctx - 1 - self.n_ctx // 2
        if data.size < self._start + 2 * n * self._n_rows * self.n_words:
            raise BadFile(f"{self.path}: {data.size} bytes do not hold {n} chunks; the file is truncated, make it "
                          f"again")
        self.tokens = data[20:self._start].view("<i4").reshape(n, self.n_ctx)
        self._data = data

    def chunk(self, i):
        """log p (n_ctx / 2 - 1, n_vocab) of the predicted positions, float64."""
        nbytes = 2 * self._n_rows * self.n_words
        rows = self._data[self._start + i * nbytes:self._start + (i + 1) * nbytes].view("<u2").reshape(self._n_rows, -1)
        scale, smallest = np.ascontiguousarray(rows[:, :4]).view("<f4").astype(np.float64).T
        return scale[:, None] * rows[:, 4:4 + self.n_vocab] + smallest[:, None]


@contextlib.contextmanager
def _log_file(path, m, chunks):
    """A function that writes the log-probabilities of some rows; of nothing where `path` is None."""
    if path is None:
        yield lambda logits: None
        return
    try:
        with whole_file(path) as f:
            f.write(LOGITS_MAGIC + struct.pack("<3i", chunks.shape[1], m.n_vocab, len(chunks)))
            f.write(chunks.astype("<i4").tobytes())
            yield lambda logits: f.write(_codes(logits).tobytes())
    except OSError as e:
        raise CannotWrite(f"{path}: {e.strerror or e}; nothing is left of it: make space or choose another "
                          f"place") from e


def _codes(logits):
    """Rows of uint16: scale and smallest log p as float32, then the codes."""
    x = logits.astype(np.float32)
    top = x.max(1, keepdims=True)
    low = np.maximum(x.min(1, keepdims=True), top - np.float32(SMALLEST_LOG_P))
    log_sum = np.log(np.exp(x - top).sum(1, dtype=np.float64, keepdims=True)).astype(np.float32)
    scale = (top - low) / np.float32(65535)
    out = np.zeros((len(x), 2 * ((x.shape[1] + 1) // 2) + 4), "<u2")
    out[:, :4] = np.concatenate([scale, low - top - log_sum], 1).astype("<f4").view("<u2")
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint(np.maximum(x - low, 0) * np.where(scale > 0, 1 / scale, 0).astype(np.float32))
    out[:, 4:4 + x.shape[1]] = codes
    return out


# ---------------------------------------------------------------- importance matrix
@typed_call
def measure_imatrix(m, data, n_ctx=None, n_chunks=None, output=False, dataset="", progress=True):
    """The Imatrix of a model on a text: for each column of each matrix the sum of squares it was multiplied with.

        measure_imatrix(load_model("f16.gguf", n_ctx=512), open("wiki.txt").read()).save("imatrix.gguf")

    data: a text, or token ids; output: the output matrix as well; dataset: what the file will name as its source.
    Matrices of experts have sums for every expert.  Errors: ParamError for a text of less than two chunks.
    Source: llama.cpp's llama-imatrix.
    """
    chunks = chunks_of(m, data, n_ctx, n_chunks)
    seen = _Collector(m.file, output)
    with m._lock, _watched(m, seen), bar("chunks", len(chunks), drawn=progress) as step:
        for chunk in chunks:
            for _ in _logits(m, chunk, 0):
                seen.step()
            step()
    if not seen.sums:
        raise NotSupported(f"{m.file.path}: no matrix of a layer is multiplied with the tokens one by one")
    sums = {name: ImportanceSums(values.astype(np.float32), counts.astype(np.float32))
            for name, (values, counts) in seen.sums.items()}
    return Imatrix(sums, (dataset,) if dataset else (), len(chunks), chunks.shape[1])


@contextlib.contextmanager
def _watched(m, callback):
    """In the block `callback` is called for the nodes of m's graphs, which run through a scheduler."""
    before = m.scheduler
    m._steps.clear()
    m.scheduler = before or Scheduler([m.backend])
    m.scheduler.set_eval_callback(callback)
    try:
        yield
    finally:
        m.scheduler.set_eval_callback(None)
        m.reset()
        m._steps.clear()
        if before is None:
            m.scheduler.free()
        m.scheduler = before


class _Collector:
    """An eval callback.  sums: {name: (values (n_matrices, n_columns), counts (n_matrices,))}, float64."""

    def __init__(self, file, output):
        self.tensors, self.output, self.sums, self._last = file.tensors, output, {}, (None, None)

    def step(self):
        """Another run begins: squares kept of the last tensor are no longer valid."""
        self._last = (None, None)

    def __call__(self, t, ask):
        if t.op not in (OP.MUL_MAT, OP.MUL_MAT_ID):
            return False
        name, x = self._name(t.src[0]), t.src[1]
        wanted = name is not None and x.type is F32
        if wanted and not ask:
            (self._of_experts if t.op == OP.MUL_MAT_ID else self._of_all)(name, t)
        return True if not ask else wanted

    def _name(self, w):
        """The file's name of a weight; copies on other devices are called DEVICE#name#number."""
        name = w.name.split("#")[1] if w.name.count("#") >= 2 else w.name
        known = name in self.tensors and (name.startswith("blk.") or (self.output and name == "output.weight"))
        return name if known else None

    def _squares(self, x):
        """x^2 in float64; of the last one asked for it is kept, since q, k and v read the same."""
        if self._last[0] != x.id:
            self._last = x.id, np.square(x.numpy(), dtype=np.float64)
        return self._last[1]

    def _entry(self, name, n_matrices, n_columns, n_counts):
        if name not in self.sums:
            self.sums[name] = np.zeros((n_matrices, n_columns)), np.zeros(n_counts)
        return self.sums[name]

    def _of_all(self, name, t):
        w, x = t.src[:2]
        n3, n2 = w.ne[3], w.ne[2]
        squares = self._squares(x).reshape(-1, n3, x.ne[2] // n2, n2, x.ne[1], x.ne[0]) if n2 * n3 > 1 else \
            self._squares(x).reshape(1, 1, 1, 1, -1, x.ne[0])
        values, counts = self._entry(name, n2 * n3, x.ne[0], 1)
        values += squares.sum((0, 2, 4)).reshape(n2 * n3, -1)
        counts += math.prod(x.ne[1:]) // (n2 * n3)

    def _of_experts(self, name, t):
        w, x, ids = t.src[:3]
        squares, ids = self._squares(x).reshape(x.ne[2], x.ne[1], x.ne[0]), ids.numpy().reshape(x.ne[2], -1)
        values, counts = self._entry(name, w.ne[2], x.ne[0], w.ne[2])
        for slot in range(ids.shape[1]):
            np.add.at(values, ids[:, slot], squares[:, slot % x.ne[1]])
        counts += np.bincount(ids.reshape(-1), minlength=w.ne[2])
