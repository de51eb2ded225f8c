"""LoRA training: an adapter beside the frozen, also quantised, weights of a GGUF model, within a memory limit.

    file -> load_model(lora=[new adapter]) -> TokenLoss -> ggjit.train's loop over A and B -> adapter.gguf

Gradients pass through frozen weights: dx = W^T dy reads W as it is in the file.  Bytes of the process:

    | Python, kernels, plans | weights of the file | adapter, its gradients and moments | what is computed |
      measured                 all of them           counted                             planned: gg.rematerialize
"""
import contextlib
import gc
import math
import os
import pathlib
import sys
import zlib

import numpy as np

import ggjit as gg
from ggjit.alloc.report import mib
from ggjit.core.arguments import typed_call
from ggjit.core.process_memory import give_back_heap, taken_now
from ggjit.models.core.checks import integer, is_path, number, read_text
from ggjit.models.core.other_options import FINETUNING, takes_other_names
from ggjit.models.files.adapter import new_adapter, targets_of
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.files.save import refuse_existing
from ggjit.models.networks.base.memory import (
    Growth,
    MemoryUse,
    process_term,
    term_of,
    terms_of_buffers,
    terms_of_leaves,
    unique_memory,
)
from ggjit.models.networks.load import ARCHITECTURES, EMBEDDED, load_model
from ggjit.models.networks.parts.training import TokenLoss
from ggjit.ops.core.errors import BadFile, NotSupported, ParamError, TypeMismatch
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.machine import resident_nbytes
from ggjit.train import checkpoint as checkpoints
from ggjit.train.dataset import Dataset
from ggjit.train.fit import TrainingLoop
from ggjit.train.optimizers import AdamW
from ggjit.train.training import Training, uninterrupted

TARGETS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
N_CTX, LEAST_ROWS = 256, 4      # tokens of a row, fewer where a text would have fewer rows than that
LEAST_STEPS = 40                # optimizer steps where `epochs` is not given: short texts are read several times
LR_SUM = 0.08                   # learning rate times steps, where `lr` is not given
SAMPLE_TOKENS = 48
MAX_TRIES = 2                   # tries with a smaller arena, where planning itself took memory
SLACK, SLACK_NBYTES = 0.005, 4 << 20    # room for small temporary arrays
PLANS_NBYTES = 3000                     # what a plan within a limit may take more than one without, per node
AGAIN_NBYTES = 2 << 20                  # how far processes that do the same differ


# ---------------------------------------------------------------- texts
def read_ids(data, network):
    """Token ids of `data`: a text, a path of a text or of JSON lines with a "text" each, or ids.

    Every text begins and ends as the model's tokenizer says.  Errors: BadFile (with the line), ModelError, ParamError.
    """
    if isinstance(data, str) and not is_path(data):
        return _with_end(network, network.tokenize(data))
    if isinstance(data, str | os.PathLike):
        return [i for text in _texts(pathlib.Path(data)) for i in _with_end(network, network.tokenize(text))]
    return network._checked_ids(data, sys.maxsize).tolist()


def _texts(path):
    text = read_text(path)
    texts = [text]
    if path.suffix == ".jsonl":           # lines end with \n alone: strings may hold what else ends a line in Unicode
        texts = [_text_of(line, n, path) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not any(texts):
        raise BadFile(f"{path} has no text")
    return texts


def _text_of(line, n, path):
    try:
        found = parse_json(line)
    except ValueError as e:
        raise BadFile(f"{path}, line {n}: {e}; every line is a JSON object with a \"text\"") from None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise BadFile(f"{path}, line {n}: an object with a string \"text\" is expected, got {line[:40]!r}")
    return found["text"]


def _with_end(network, ids):
    end = network.tokenizer.eos_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


# ---------------------------------------------------------------- memory
def _give_back():
    """Return to the system what planning has freed: many arrays."""
    gc.collect()
    give_back_heap()


class _FittingTraining:
    """The Training of a network's adapter that fits into `limit` bytes of the process; `.peak`: what it will take.

    The one without a limit is planned first, which is quick: often it fits; and it says what the process takes beside
    the arena, for every limit.  So a limit is a number of bytes for the arena, `_room`, and back, `_taken`.
    """

    def __init__(self, network, make, limit):
        self.network, self.training = network, make(None)
        self.peak = self._peak()
        if limit is None or self.peak <= limit:
            return
        enough, kept, over = self.peak + AGAIN_NBYTES, self.training.kept_nbytes, 0
        beside = self._beside() + PLANS_NBYTES * len(self.training.first)
        arena = _room(limit) - beside
        for _ in range(MAX_TRIES):
            self.training = least = None                # the old arena is freed before the next one is made
            _give_back()
            before = resident_nbytes()
            try:
                self.training = make(kept + max(arena, 0))
            except gg.BudgetError as e:
                least = e.minimum - kept                # the error itself would hold what was planned
            if least is not None:
                _give_back()
                beside += max(resident_nbytes() - before, 0)    # what the search leaves is there at the next call
                raise self._too_few(limit, min(max(_taken(beside + least), over) + AGAIN_NBYTES, enough))
            over = self.peak = self._peak()
            if self.peak <= limit:
                return
            arena -= self.peak - limit
        raise self._too_few(limit, min(self.peak + AGAIN_NBYTES, enough))

    def _too_few(self, limit, least):
        return gg.BudgetError(
            f"finetune: memory of {mib(limit)} is {mib(least - limit)} too little: the weights take "
            f"{mib(self.network.weights.nbytes)}, and the process has {mib(resident_nbytes())} already; use "
            f"memory={least} or more, a shorter context, or fewer targets", least)

    def _peak(self):
        """Bytes of the process when all is planned and every page was touched."""
        _give_back()
        return _taken(self._beside() + self.training.runs.allocator.buffer_size())

    def _beside(self):
        """Bytes of the process now, and those to come beside the arena: weights, and what kernels work in."""
        training = self.training
        graphs = [g for g in (training.first, training.further, training.step_graph) if g is not None]
        work = max(training.runs.plan(graph).work_nbytes for graph in graphs)
        return resident_nbytes() + work + self.network.weights.nbytes


def _taken(nbytes):
    """What a process may take that is planned to take so many bytes."""
    return math.ceil(nbytes * (1 + SLACK)) + SLACK_NBYTES


def _room(limit):
    """The most bytes that a process may be planned to take within a limit: _taken(_room(limit)) <= limit."""
    return math.floor((limit - SLACK_NBYTES) / (1 + SLACK))


# ---------------------------------------------------------------- what users call
def _refuse_to_replace(out, model, data, checkpoint, force):
    """Errors: ParamError where `out` or `checkpoint` cannot be written, or is one of the files that are read;
    CannotWrite where `out` is there already, but for the adapter of a training that goes on from its checkpoint."""
    files = {"the adapter (out)": out, "the checkpoint": checkpoint, "the model": model, "the data": data}
    files = {what: p for what, p in files.items() if isinstance(p, str | os.PathLike)}
    for written, path in files.items():
        if path is out or path is checkpoint:
            checkpoints.require_folder(path)
            same = next((what for what, p in files.items() if what != written and _same(p, path)), None)
            if same is not None:
                raise ParamError(f"finetune: {os.fspath(path)!r} is {written} and {same}; give each a file of its own")
    if checkpoint is None or not checkpoints.exists(checkpoint) or not _is_adapter(out):
        refuse_existing(out, force)


def _is_adapter(path):
    with contextlib.suppress(BadFile):
        return GGUFFile(path).get("general.type", "", str) == "adapter"
    return False


def _same(a, b):
    return os.path.realpath(a) == os.path.realpath(b)


def _end_of(path):
    """A number that tells one model's file from another's: the CRC-32 of the last 64 KiB, which are weights."""
    with open(path, "rb") as f:
        f.seek(max(os.path.getsize(path) - (1 << 16), 0))
        return zlib.crc32(f.read())


class Finetuning:
    """A training that is planned: `.peak` (bytes of the process), `.n_steps`, `.n_params`; `run()`."""

    def __init__(self, *args):
        """Those of `finetune`, `model` to `callback` without `out`."""
        try:
            self._plan(*args)
        except gg.BudgetError as e:
            self.__dict__.clear()       # who keeps the error keeps its frames: the network would count at the next try
            raise e.with_traceback(None) from None

    def _plan(self, model, data, rank, alpha, targets, n_ctx, memory, epochs, steps, lr, batch, seed, n_threads,
              checkpoint, callback):
        self._before = taken_now()
        epochs = None if epochs is None else integer("epochs", epochs, 1, 1 << 31)
        steps = math.inf if steps is None else integer("steps", steps, 1, 1 << 62)
        batch = integer("batch", batch, 1, 1 << 20)
        asked = None if n_ctx is None else integer("n_ctx", n_ctx, 2, 1 << 31)
        memory = None if memory is None else integer("memory", memory, 1, 1 << 62, " (bytes)")
        seed = None if seed is None else integer("seed", seed, 0, 1 << 62)
        file = GGUFFile(model)
        if hasattr(ARCHITECTURES.get(file.arch), "encode"):
            raise NotSupported(f"finetune: {file.arch} models write about another text, which a text alone does not "
                               f"give; use a decoder")
        if targets is None:
            there = targets_of(file)
            targets = [t for t in TARGETS if t in there]
            if not targets:
                raise NotSupported(f"finetune: {file.path} has no matrix {', '.join(TARGETS)}; networks of attention "
                                   f"layers can be trained")
        alpha = 2 * rank if alpha is None else number("alpha", alpha)
        self.adapter = new_adapter(file, targets, rank, alpha, seed)
        self.steps = steps
        n_ctx = asked or N_CTX
        n_ctx = min(n_ctx, file.arch_get("context_length", n_ctx, int))
        with contextlib.ExitStack() as stack:
            self.network = m = stack.enter_context(load_model(
                model, n_threads=n_threads, n_ctx=n_ctx, reserve=False, repack=False, lora=[self.adapter]))
            if not hasattr(m, "decode"):
                raise NotSupported(f"finetune: {m.file.arch} models predict no next token; use a decoder")
            self._grown = Growth()
            self._grown.__enter__()
            ids = read_ids(data, m)
            if asked is None:
                n_ctx = max(2, min(n_ctx, (len(ids) - 1) // LEAST_ROWS))
            self._loss = loss = TokenLoss(m, n_ctx)
            data = Dataset(list(loss.rows(ids)))
            if len(data) < batch:
                raise ParamError(f"finetune: {len(data)} rows of {n_ctx} tokens do not fill a batch of {batch}; use a "
                                 f"smaller batch or a shorter context")
            if epochs is None:
                epochs = -(-(steps if steps < math.inf else LEAST_STEPS) // (len(data) // batch))
            self.epochs, self.n_steps = epochs, min(epochs * (len(data) // batch), steps)
            lr = min(2e-3, max(2e-4, LR_SUM / self.n_steps)) if lr is None else lr
            params = [gg.set_param(t) for pair in self.adapter.pairs.values() for t in pair]
            self.n_params = sum(t.nbytes // 4 for t in params)

            def make(budget):
                return Training((loss.tokens, loss.targets), loss.loss, "mean", m.backend, AdamW(lr), params, batch,
                                1.0, budget, evaluates=False, quick=True)
            planned = _FittingTraining(m, make, memory)
            self.peak, training = planned.peak, planned.training
            about = {"model": _end_of(file.path), "data": zlib.crc32(data.inputs[0]), "n_ctx": n_ctx,
                     "alpha": alpha}
            self.loop = TrainingLoop(training, data, data.first(0), seed, checkpoint, callback, about)
            _give_back()
            self._grown.__exit__()
            self._grown.known(sum(term.anonymous for term in self._kept_terms()))
            self._close = stack.pop_all().close

    def run(self, out, progress=True):
        """Train and write the adapter, also when Ctrl-C or an error ends it: that of the last finished step.

        One with values that are not finite is not written.  Returns the History.
        """
        try:
            self.loop.run(self.epochs, None, progress, self.steps)
        finally:
            with uninterrupted():
                if self.loop.n_steps and all(np.isfinite(t.numpy()).all() for t in self.loop.training.params):
                    self.adapter.save(out)
        return self.loop.history

    def sample(self, prompt):
        """What the network writes after `prompt` now, SAMPLE_TOKENS at most."""
        with self.network._lock:
            self.network.reset()            # the cache was filled with an older state of the adapter
            return self.network.generate(prompt, min(SAMPLE_TOKENS, self.network.n_ctx // 2), cache_prompt=False).text

    def memory(self):
        """A MemoryUse of the training, as `m.memory()` is one of a model; `.filled()`: what it will take."""
        memory = self.network.memory()
        inputs = term_of("inputs", unique_memory([b._arena for b in self._loss.ctx.buffers if b._arena is not None]))
        return MemoryUse([*memory.rows[:-1], *self._kept_terms(), inputs, self._grown.term("code"),
                          process_term(self._before)], memory.process, memory.title)

    def _kept_terms(self):
        training = self.loop.training
        leaves = [*training.sums, *(t for own in training.states for t in own)]
        arena = [b for chunks in training.runs.allocator._memory.chunks for b in chunks]
        return [*terms_of_leaves("gradients and moments", leaves), *terms_of_buffers("compute", arena)]

    def close(self):
        self._close()


@takes_other_names(FINETUNING)
@typed_call
def finetune(model=None, data=None, out=None, rank=8, alpha=None, targets=None, n_ctx=None, memory=None, epochs=None,
             steps=None, lr=None, batch=1, seed=0, n_threads=None, checkpoint=None, callback=None, progress=True,
             on_plan=None, force=False, sample=None):
    """Train a LoRA adapter for a GGUF model, whose weights stay as they are, quantised too; returns the History.

        finetune("model.gguf", "letters.txt", "letters.gguf", memory=1_500_000_000)
        load_model("model.gguf", lora=[("letters.gguf", 1.0)])

    model: a path; None: the model that comes with the package.  data: a text, the path of a text file or of a .jsonl
    file with a "text" a line, or token ids; cut into rows of n_ctx tokens (256; a short text into four rows).  out:
    the adapter, in llama.cpp's format.  rank, alpha: of B (A x) alpha / rank (default alpha: 2 rank).  targets: names
    of matrices, "attn_q" (default: those of attention and dense feed-forward).  memory: bytes the process may take;
    what does not fit is computed again.  epochs, steps: whichever ends first; without epochs as many as make these
    steps, without either one, or as many as make 40 steps of a short text.  lr: of AdamW, a number or a schedule;
    None: 0.08 / steps, between 2e-4 (long trainings) and 2e-3 (those of up to 40 steps).  batch: rows of a step.
    checkpoint: a file that is written every minute, after every epoch and when the training ends; the same call goes on
    from it, with the same bits.
    sample: a prompt; what the model writes after it before and after the training is `.before` and `.after` of the
    History, which shows both.
    callback: called with the History after every step; true: stop.  on_plan: called with the Finetuning, whose `.peak`
    is the bytes of the process to come, before the first step.
    However a training ends, `out` is the adapter of the last finished step.  force: a file of that name is replaced,
    which the adapter of a training that goes on from its checkpoint always is.
    Errors: CannotWrite (a file of that name), BudgetError (`.minimum` bytes are enough), BadFile (data), ModelError (no
    tokenizer), ParamError, NotSupported (an architecture without gradients); before anything is written.
    """
    if data is None or out is None:
        raise ParamError("finetune: data and out are needed: what to learn from, and the file to write")
    for name, path in (("out", out), ("model", model), ("checkpoint", checkpoint)):
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeMismatch(f"finetune: {name} is a path, got {type(path).__name__}")
    for name, function in (("callback", callback), ("on_plan", on_plan)):
        if function is not None and not callable(function):
            raise TypeMismatch(f"finetune: {name} is a function, got {type(function).__name__}")
    model = EMBEDDED if model is None else model
    _refuse_to_replace(out, model, data, checkpoint, force)
    job = Finetuning(model, data, rank, alpha, targets, n_ctx, memory, epochs, steps, lr,
                     batch, seed, n_threads, checkpoint, callback)
    try:
        if on_plan is not None:
            on_plan(job)
        before = None if sample is None else job.sample(sample)
        history = job.run(out, progress)
        if sample is not None:
            history.sample, history.before, history.after = sample, before, job.sample(sample)
        return history
    finally:
        job.close()
