"""One model for many clients: one thread computes, requests wait for their results.

    event loop      prepare -> RunningBatch.submit        pieces of text <- call_soon_threadsafe
    the thread      RunningBatch.turn, again and again    embeddings and rankings between turns, when nothing is in work

A sequence whose request has gone is cancelled.  Nothing here knows HTTP: app.py does.
"""
import asyncio
import collections
import concurrent.futures
import contextlib
import threading
import time
import traceback

from ggjit.models.text.running_batch import RunningBatch
from ggjit.ops.core.errors import Cancelled, ModelError, NotSupported, OutOfMemory

LEAST_ANSWER = 256              # tokens of an answer if the request has no max_tokens and the context has room
MAX_FAILURES = 3                # turns that fail one after the other, before what is in work is given up


class Answering:
    """The pieces of one sequence, as they come: `async for piece in answering`.

    Each is (text, how many tokens there are by now).  Errors: that of the sequence, when it has ended by one.
    """

    def __init__(self):
        self.sequence, self._loop, self._pieces = None, asyncio.get_running_loop(), asyncio.Queue()

    def take(self, piece):
        """In the thread that computes."""
        n = len(self.sequence.run.answer.tokens) if self.sequence is not None else 0
        with contextlib.suppress(RuntimeError):             # the loop is closed, so no request waits
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (piece, n))

    async def __aiter__(self):
        while True:
            piece, n = await self._pieces.get()
            if piece is None:
                if self.sequence.error is not None:
                    raise self.sequence.error
                return
            yield piece, n


class Service:
    """A model and the thread that computes with it.

    n_waiting: requests that may wait for a place; n_predict: tokens of an answer whose request gives no number, None:
    what each of n_seqs sequences has of the cache.

        with Service(m) as service:
            answering = await service.submit("Once upon a time", n_predict=16)
            async for piece, n in answering: ...
    """

    def __init__(self, model, n_waiting=256, n_predict=None):
        self.model, self.n_predict, self.started = model, n_predict, time.time()
        self.generates = hasattr(model, "decode")
        self.batch = RunningBatch(model, n_waiting, keep=True, exact=True) if self.generates else None
        self.is_stopping, self.failures = False, 0
        self.n_requests = collections.Counter()             # by what they ended with
        self._jobs, self._wake = collections.deque(), threading.Condition()
        self._prepare = concurrent.futures.ThreadPoolExecutor(1, "ggjit-prepare")     # tokenizer, templates, grammars
        self._thread = threading.Thread(target=self._run, name="ggjit-serve", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self.stop()

    def stop(self):
        """End the thread; what is in work is cancelled.  A second call does nothing."""
        with self._wake:
            self.is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._prepare.shutdown(cancel_futures=True)

    # ------------------------------------------------------------ for requests
    async def prepared(self, function, *args, **options):
        """What `function` gives, computed beside the event loop, one after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._prepare, lambda: function(*args, **options))

    async def submit(self, prompt, n_predict=None, **options):
        """An Answering to a text or ids.  n_predict: None: as long as there is room for, see answer_room.

        Errors: those of RunningBatch.submit; NotSupported for a model that writes nothing.
        """
        self._check_running()
        if not self.generates:
            what, has = ("writes all tokens at once, which is not served", "m.generate") if self.model.AT_ONCE else \
                ("writes no text", "embeddings")
            raise NotSupported(f"{self.model.file.path} ({self.model.file.arch}) {what}; serve a llama model for "
                               f"completions, this one has {has}")
        answering = Answering()
        answering.sequence = await self.prepared(self._submitted, prompt, n_predict, answering.take, options)
        with self._wake:
            self._wake.notify()
        return answering

    def _submitted(self, prompt, n_predict, on_piece, options):
        ids = self.model.tokenize(prompt) if isinstance(prompt, str) else prompt
        n = self.answer_room(len(ids)) if n_predict is None or n_predict < 0 else n_predict
        return self.batch.submit(ids, n, on_piece=on_piece, **options)

    def answer_room(self, n_prompt):
        """Tokens of an answer whose request gives no number: `n_predict`, or its share of the cache."""
        m = self.model
        share = max(m.n_cells // m.n_seqs - n_prompt, LEAST_ANSWER) if self.n_predict is None else self.n_predict
        return max(min(share, m.n_ctx - n_prompt), 1)

    async def computed(self, function, *args):
        """What `function` gives in the thread that computes, once no sequence is in work."""
        self._check_running()
        future = concurrent.futures.Future()
        with self._wake:
            self._jobs.append((future, function, args))
            self._wake.notify()
        return await asyncio.wrap_future(future)

    def cancel(self, answering):
        """No request waits for it now."""
        answering.sequence.cancel()
        with self._wake:
            self._wake.notify()

    def _check_running(self):
        if self.is_stopping:
            raise Cancelled("the server is stopping; ask again when it is back")

    # ------------------------------------------------------------ the thread
    def _run(self):
        while True:
            with self._wake:
                while not self.is_stopping and not self._jobs and (self.batch is None or self.batch.is_idle):
                    self._wake.wait()
                if self.is_stopping:
                    break
            self._turn()
        self._end()

    def _turn(self):
        """One job where nothing is in work, else a turn of the batch."""
        if self.batch is not None:
            self.batch.is_paused = bool(self._jobs)             # jobs take the caches: what is in work ends first
        if self._jobs and (self.batch is None or not self.batch.working):
            self._compute(*self._jobs.popleft())
            return
        try:
            self.batch.turn()
            self.failures = 0
        except Exception as e:                      # not one sequence's own: memory, a broken computation
            self._failed(e)

    def _compute(self, future, function, args):
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as e:
                future.set_exception(e)

    def _failed(self, error):
        """The batch reads again what was read; after MAX_FAILURES in a row what is in work ends by the error."""
        traceback.print_exception(error)
        self.failures += 1
        if self.failures >= MAX_FAILURES:
            self.failures = 0
            self.batch.fail(error)

    def _end(self):
        error = Cancelled("the server is stopping; ask again when it is back")
        while self._jobs:
            future, *_ = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        if self.batch is not None:
            self.batch.fail(error)
            self.batch.close()

    # ------------------------------------------------------------ what is going on
    def slots(self):
        """A dict for each sequence that could be in work, as llama.cpp's /slots has them."""
        m, found = self.model, []
        working = list(self.batch.working) if self.batch is not None else []
        for i in range(m.n_seqs if self.generates else 1):
            slot = {"id": i, "n_ctx": getattr(m, "n_ctx", 0), "is_processing": i < len(working)}
            if i < len(working):
                s = working[i]
                slot |= {"id_task": s.number, "state": s.state, "n_prompt_tokens": len(s.run.prompt_ids),
                         "n_prompt_tokens_cache": s.n_shared, "n_decoded": len(s.run.stats["tokens"])}
            found.append(slot)
        return found

    def counts(self):
        """Numbers for /metrics: {name: (value, kind, help)}."""
        if self.batch is None:
            return {}
        b, cells = self.batch, self.model.cells
        used = {w: float((n > 0).mean()) for w, n in cells._n_texts.items()}
        (n_read, read_s), (n_written, written_s) = b.spent["prefill"], b.spent["decode"]
        return {
            "prompt_tokens_total": (n_read, "counter", "Prompt tokens read"),
            "prompt_seconds_total": (read_s, "counter", "Seconds of reading prompts"),
            "prompt_tokens_shared_total": (b.n_shared, "counter", "Prompt tokens taken over from others"),
            "tokens_predicted_total": (n_written, "counter", "Tokens written"),
            "tokens_predicted_seconds_total": (written_s, "counter", "Seconds of writing tokens"),
            "prompt_tokens_seconds": (b.speed("prefill"), "gauge", "Prompt tokens a second"),
            "predicted_tokens_seconds": (b.speed("decode"), "gauge", "Tokens written a second"),
            "requests_processing": (len(b.working), "gauge", "Sequences in work"),
            "requests_deferred": (len(b.waiting), "gauge", "Sequences that wait"),
            "requests_ended_total": (b.n_ended, "counter", "Sequences that have ended"),
            "kv_cache_usage_ratio": (max(used.values(), default=0.0), "gauge", "Share of the cache that is in use")}


def require_decoder(model):
    """Check that the server can use the model.  Errors: ModelError for one without text and embeddings."""
    if not hasattr(model, "decode") and not hasattr(model, "embed_ids"):
        raise ModelError(f"{model.file.path} ({model.file.arch}) neither writes text nor makes embeddings; serve "
                         f"another model")


def plan_cells(memory_nbytes, fixed_nbytes, row_nbytes, n_ctx, n_seqs):
    """Cache rows for all sequences within memory_nbytes: whole pages, n_ctx at least, n_ctx for each at most.

    fixed_nbytes: weights and compute memory; row_nbytes: of one cache row.  Errors: OutOfMemory.
    """
    most = n_ctx * n_seqs
    room = (memory_nbytes - fixed_nbytes) // max(row_nbytes, 1) // 64 * 64
    if room < n_ctx:
        raise OutOfMemory(f"the model takes {fixed_nbytes:,} bytes and a context of {n_ctx} tokens "
                          f"{row_nbytes * n_ctx:,}, more than the {memory_nbytes:,} it may have; give --n-ctx or "
                          f"--memory")
    return min(room, most)
