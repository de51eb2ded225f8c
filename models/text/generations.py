"""Many texts at once: continuous batching.

    waiting     prompts that found no room yet
    texts       those in the caches, as many as the model has sequences and rows for
    a turn      texts begin; one batch of prompts is read; then one token of every text that has been read

On several devices that batch is cut into as many groups, so that all devices have one: see `_pipelined`.

A text's rows for its prompt and n_predict tokens (-1: all rows) are taken when it begins, so that it never stops for
want of room.
When one ends, the next begins in its place.  A prompt that begins like a text in work, a common system prompt say,
waits until that has read the beginning, and shares its rows.
"""
import collections.abc
import numbers
import time

import numpy as np

from ggjit.models.text.generation import Generation
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.interrupts import defer_interrupts

LEAST_SHARED = 16               # tokens: fewer are read again


def is_many(prompt):
    """Is it a list of prompts, not of token ids?"""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and not isinstance(prompt[0], numbers.Number)


def _several_times(value):
    """What every text reads from the beginning: an iterator as a tuple, others as they are."""
    return tuple(value) if isinstance(value, collections.abc.Iterator) else value


class Generations:
    """Iterator over (which text, piece of it); `runs[i].stats` of each, `.stats` of all.

    After an interrupt the iteration goes on where it was.  An error that concerns one text, broken logits say, comes
    out once, and the others go on.

        runs = m.generate(["One", "Two"], n_predict=16)
        for i, piece in runs: ...
        runs[0].stats["text"], runs.stats["decode_tokens_per_second"]
    """

    def __init__(self, model, prompts, n_predict=64, stop=(), ignore_eos=False, **options):
        if options.get("context_shift"):
            raise ParamError("context_shift works for one prompt at a time; each of several has room of its own")
        self.model = model
        stop, options = _several_times(stop), {name: _several_times(value) for name, value in options.items()}
        self.runs = [Generation(model, prompt, n_predict, stop, ignore_eos, **options) for prompt in prompts]
        for run in self.runs:
            model._checked_ids(run.prompt_ids, model.n_ctx)
        self._steps = [run._steps for run in self.runs]
        for run in self.runs:
            run._steps = iter(())           # its pieces come out here
        self._waiting = collections.deque(range(len(self.runs)))
        self._texts = {}                    # {number of a text: its Text in the model's caches}
        self._unread = {}                   # {number of a text that has begun: ids that it wants to be read}
        self._flying = collections.deque()  # groups of texts whose token is on its way: (numbers, function that waits)
        self._pieces = collections.deque()
        self._mark = object()               # in `model.cache_owner` while the texts are in the model's caches
        self._spent = {"prefill": [0, 0.0], "decode": [0, 0.0]}         # tokens, seconds
        self.stats = {"prompt_tokens": sum(len(run.prompt_ids) for run in self.runs), "shared_tokens": 0, "tokens": 0,
                      "prefill_tokens_per_second": 0.0, "decode_tokens_per_second": 0.0}

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.runs)

    def __getitem__(self, i):
        return self.runs[i]

    def __repr__(self):
        return (f"<Generations: {len(self.runs)} texts, {len(self._texts)} in work, {len(self._waiting)} waiting; "
                f"iterate over it for (number, piece)>")

    @property
    def texts(self):
        """The texts so far, in the order of their prompts."""
        return [run.stats["text"] for run in self.runs]

    def __next__(self):
        while not self._pieces:
            if not self._waiting and not self._texts:
                raise StopIteration
            self._turn()
        return self._pieces.popleft()

    # ------------------------------------------------------------ one turn
    def _turn(self):
        model = self.model
        with model._lock:
            try:
                if model.cache_owner is not self._mark:
                    self._begin_again()
                self._admit()
                if prompts := [i for i in self._texts if len(self._unread[i]) > 1]:
                    self._timed("prefill", self._batch(prompts))
                tokens = [i for i in self._texts if len(self._unread[i]) == 1]
                if self._flying or tokens and model.n_stages > 1:
                    self._pipelined(tokens)
                elif tokens:
                    self._timed("decode", [(i, 1) for i in tokens])
            except BaseException:
                model.cache_owner = None    # what was read is not known any more: it is read again
                raise

    def _timed(self, what, batch):
        """Feed [(text, how many of its unread tokens)] and count it."""
        t0 = time.perf_counter()
        self._feed(batch)
        self._count(what, sum(n for _, n in batch), time.perf_counter() - t0)

    def _count(self, what, n, seconds):
        spent = self._spent[what]
        spent[0] += n
        spent[1] += seconds
        self.stats[what + "_tokens_per_second"] = spent[0] / spent[1]
        self.stats["tokens"] = sum(len(run.stats["tokens"]) for run in self.runs)

    def _pipelined(self, tokens):
        """One group for each device is sent on its way, then the oldest comes in: while the last device computes one
        group, the first computes the next.

            device 1    a0 b0 a1 b1 a2 ...
            device 2       a0 b0 a1 b1 ...
        """
        t0, n = time.perf_counter(), self.model.n_stages
        size = -(-(len(tokens) + sum(len(group) for group, _ in self._flying)) // n)
        while tokens and len(self._flying) < n:
            group, tokens = tokens[:size], tokens[size:]
            wait = self.model.submit([(self._texts[i], self._unread[i]) for i in group])
            self._flying.append((group, wait))
            for i in group:
                self._unread[i] = self._unread[i][1:]
        group, wait = self._flying.popleft()
        rows = wait()
        self._count("decode", len(group), time.perf_counter() - t0)
        for i, logits in zip(group, rows, strict=True):
            self._advance(i, logits)

    def _begin_again(self):
        """The caches are someone else's: they are taken, and the texts in work are read again."""
        model, again = self.model, list(self._texts)
        model.hand_over(self._mark)
        self._texts.clear()
        self._flying.clear()
        self._waiting.extendleft(reversed(again))

    def _admit(self):
        while self._waiting:
            i = self._waiting[0]
            run = self.runs[i]
            n = len(run.prompt_ids) + run.answer.n_predict if run.answer.n_predict >= 0 else self.model.n_ctx
            ids = np.array(run.prompt_ids + run.stats["tokens"], np.int32)
            like, n_shared = self._alike(run, ids)
            if like is not None and len(like.ids) < n_shared:
                return                      # until that has read them
            text = self.model.cells.open(min(n, self.model.n_ctx), like, n_shared)
            if text is None:
                return
            self._waiting.popleft()
            self._texts[i] = text
            if i in self._unread:           # it was read once
                self._unread[i] = ids
            else:
                self._advance(i, None)
            self.stats["shared_tokens"] += n_shared
            if n_shared and i in self._texts:
                self._unread[i] = self._unread[i][n_shared:]

    def _alike(self, run, ids):
        """(the text in work that has most of the first `ids` in common, how many of them), or (None, 0)."""
        found = None, 0
        if not run.cache_prompt or not self.model.shares or len(ids) <= LEAST_SHARED:
            return found
        for j, text in self._texts.items():
            other = np.array(text.ids + self._unread[j].tolist(), np.int32)[:len(ids) - 1]
            differ = np.flatnonzero(other != ids[:len(other)])
            n = min(int(differ[0]) if len(differ) else len(other), text.exact)
            if n >= LEAST_SHARED and n > found[1] and not text.broken:
                found = text, n
        return found

    def _batch(self, prompts):
        """[(text, how many of its unread tokens)] of one batch."""
        if self.model.recurrent:
            prompts = prompts[:1]
        batch, room = [], self.model.n_batch
        for i in prompts:
            n = min(len(self._unread[i]), room)
            if n:
                batch.append((i, n))
            room -= n
        return batch

    def _feed(self, batch):
        rows = self.model.feed([(self._texts[i], self._unread[i][:n]) for i, n in batch])
        for i, n in batch:
            self._unread[i] = self._unread[i][n:]
        for (i, _), logits in zip(batch, rows, strict=True):
            if not len(self._unread[i]):
                self._advance(i, logits)

    def _advance(self, i, logits):
        """The text takes its logits: pieces, then the ids it wants to be read; or it ends.

        A Ctrl-C waits for the end of it: a text whose next token is chosen in part could not go on.
        """
        with defer_interrupts(lambda frame: True):
            self._taken(i, logits)

    def _taken(self, i, logits):
        steps = self._steps[i]
        try:
            got = steps.send(logits)
            while isinstance(got, str):
                self._pieces.append((i, got))
                got = next(steps)
            self._unread[i] = np.array(got, np.int32)
        except StopIteration:
            pass
        finally:
            if steps.gi_frame is None:      # it has ended, maybe by an error of its own
                self.model.cells.close(self._texts.pop(i))
