"""A running batch: sequences join, run and leave it independently of each other.

    submit -> waiting (by priority, then by arrival) -> in work -> ended, its prefix maybe kept
    a turn      the cancelled leave; the first that find room begin; prompts are read, at most n_batch tokens of them;
                then one token of every sequence that has been read

    memory      the cache is made when the model is loaded, and compute memory for the largest batch.  A sequence takes
                the cache rows of its prompt and n_predict tokens (-1: of the whole context) when it begins: what has
                begun never stops for want of room, and what could never begin is refused by `submit`.
    prefixes    a prompt that begins like a sequence in work, a common system prompt say, waits until that has read the
                beginning, and shares its rows.  With keep=True rows of ended sequences stay until others need them.
    exact       every prompt is read in the pieces that it has alone, one at a time, and shares only what is equal to
                the bit.  Then logits, and greedy answers, are those of the prompt alone.  Without it several prompts
                are one batch, whose sums may be rounded otherwise.

On several devices the tokens are cut into as many groups, so that all devices have one: see `_pipelined`.
"""
import bisect
import collections
import itertools
import threading
import time

import numpy as np

from ggjit.models.core.checks import integer
from ggjit.models.text.generation import Generation
from ggjit.ops.core.errors import ParamError, QueueFull
from ggjit.ops.core.interrupts import defer_interrupts

LEAST_SHARED = 16               # tokens: a shorter common beginning of two prompts is computed again, not copied
LEAST_PIECE = 128               # tokens: longer pieces of a prompt use the same kernels and give the same bits
MAX_PRIORITY = 1 << 31


class BatchSequence:
    """A text of a running batch: `run`, its Generation with stats; `state`: "waiting", "reading", "writing", "ended".

    error: what ended it, or None.  n_shared: tokens of its prompt that were not read again.
    """

    def __init__(self, run, number, priority=0, on_piece=None):
        self.run, self.number, self.priority, self.on_piece = run, number, priority, on_piece
        self.steps, run._steps = run._steps, iter(())           # pieces go to on_piece, not to an iteration of the run
        self.text = None                # in the model's caches
        self.unread = None              # ids that have to be read next; None before it has begun
        self.n_shared, self.is_cancelled, self.error, self.state = 0, False, None, "waiting"

    @property
    def place(self):
        """Its place in the queue: the smallest is first."""
        return -self.priority, self.number

    @property
    def known(self):
        """All its ids so far."""
        return np.array(self.run.prompt_ids + self.run.stats["tokens"], np.int32)

    def cancel(self):
        """Take the sequence out of the batch at the next turn; its stats then say "cancelled".  From any thread, any
        number of times."""
        self.is_cancelled = True

    def give(self, piece):
        if self.on_piece is not None:
            self.on_piece(piece)

    def end(self, error=None):
        """End the sequence, with an error or without."""
        self.state, self.error, self.unread = "ended", error, None
        self.give(None)

    def __repr__(self):
        return f"<BatchSequence {self.number}: {self.state}, {self.run!r}>"


class RunningBatch:
    """Sequences of one model.  `submit` from any thread; `turn` from one at a time.

    n_waiting: sequences that may wait; None: any number.  keep, exact: as above.

        batch = RunningBatch(m)
        s = batch.submit("Once upon a time", n_predict=16, on_piece=print)
        while batch.turn(): pass
    """

    def __init__(self, model, n_waiting=None, keep=False, exact=False):
        self.model, self.keep, self.exact = model, bool(keep), bool(exact)
        self.n_waiting = None if n_waiting is None else integer("n_waiting", n_waiting, 0, 1 << 31)
        self.waiting, self.working, self.kept = [], [], []      # kept: [(Text, tokens that are exact)], oldest first
        self._numbers = itertools.count()
        # groups that are being computed: (sequences, function that waits for their logits)
        self._flying = collections.deque()
        self._mark = object()                   # in `model.cache_owner` while the sequences are in the model's caches
        self._lock = threading.Lock()           # of `waiting`
        self.spent = {"prefill": [0, 0.0], "decode": [0, 0.0]}  # tokens, seconds
        self.n_shared = self.n_ended = 0
        self.is_paused = False                  # while True no sequence begins; those in work go on

    # ------------------------------------------------------------ from outside
    def submit(self, prompt, n_predict=64, temp=0.0, stop=(), ignore_eos=False, priority=0, on_piece=None, **options):
        """A BatchSequence that waits for its turn.  priority: the larger begins first.

        on_piece: called in the thread of `turn` with each piece of text, and with None at the end.  Others: as
        Decoder.generate.  Errors: QueueFull; those of generate.
        """
        priority = integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.is_full:
            raise QueueFull(f"{len(self.waiting)} sequences wait already, and no more than {self.n_waiting} may; try "
                            f"again when some have ended")
        run = Generation(self.model, prompt, n_predict, stop, ignore_eos, temp=temp, **options)
        return self.add(run, priority, on_piece)

    def add(self, run, priority=0, on_piece=None):
        """As `submit`, of a Generation that has not begun."""
        if run.context_shift or run.speculation is not None:
            raise ParamError("context_shift and speculative work for one prompt at a time; leave them out")
        self.model._checked_ids(run.prompt_ids, self.model.n_ctx)
        sequence = BatchSequence(run, next(self._numbers), priority, on_piece)
        with self._lock:
            bisect.insort(self.waiting, sequence, key=lambda s: s.place)
        return sequence

    @property
    def is_full(self):
        """Would `submit` refuse?"""
        return self.n_waiting is not None and len(self.waiting) >= self.n_waiting + self._n_free

    @property
    def _n_free(self):
        return max(self.model.n_seqs - len(self.working), 0)

    @property
    def is_idle(self):
        return not self.waiting and not self.working

    def close(self):
        """Cancel all sequences, and give the kept prefixes up."""
        for sequence in (*self.waiting, *self.working):
            sequence.cancel()
        with self.model._lock:
            self._leave()
            if self.model.cache_owner is self._mark:
                for text, _ in self.kept:
                    self.model.cells.close(text)
            self.kept.clear()

    def fail(self, error):
        """All sequences end by this error; in the thread of `turn`."""
        with self._lock:
            waiting, self.waiting = self.waiting, []
        self._flying.clear()
        if self.model.cache_owner is not self._mark:
            for s in self.working:
                s.text = None
            waiting, self.working = [*waiting, *self.working], []
        for s in (*waiting, *self.working):
            s.steps.close()
            self._ended(s, error)

    # ------------------------------------------------------------ one turn
    def turn(self):
        """Read prompts, then one token of every sequence that was read; False when there is nothing left to do.

        An error of one sequence ends it alone (`.error`).  Another one, or an interrupt, comes out; the next turn reads
        what was read again.
        """
        model = self.model
        with model._lock:
            try:
                if model.cache_owner is not self._mark:
                    self._begin_again()
                self._leave()
                self._admit()
                self._read_prompts()
                tokens = [s for s in self.working if len(s.unread) == 1]
                if self._flying or tokens and model.n_stages > 1:
                    self._pipelined(tokens)
                elif tokens:
                    self._timed("decode", [(s, 1) for s in tokens])
            except BaseException:
                model.cache_owner = None        # the cache may be inconsistent after an error: texts are read again
                raise
        return not self.is_idle

    def _read_prompts(self):
        """n_batch tokens at most: of the first sequences, in one batch, or each in its own where sums are exact."""
        prompts = [s for s in self.working if len(s.unread) > 1]
        if not self.exact:
            if prompts:
                self._timed("prefill", self._together(prompts))
            return
        room = self.model.n_batch
        for s in sorted(prompts, key=lambda s: s.place):
            while room > 0 and s.unread is not None and len(s.unread) > 1:
                n = min(len(s.unread), self.model.n_batch - len(s.text.ids) % self.model.n_batch)
                self._timed("prefill", [(s, n)])
                room -= n

    def _together(self, prompts):
        """[(sequence, how many of its unread tokens)] of one batch."""
        if self.model.recurrent:
            prompts = prompts[:1]
        batch, room = [], self.model.n_batch
        for s in prompts:
            n = min(len(s.unread), room)
            if n:
                batch.append((s, n))
            room -= n
        return batch

    def _timed(self, what, batch):
        """Feed [(sequence, how many of its unread tokens)] and count it."""
        t0 = time.perf_counter()
        rows = self.model.feed([(s.text, s.unread[:n]) for s, n in batch])
        for s, n in batch:
            s.unread = s.unread[n:]
        self._count(what, sum(n for _, n in batch), time.perf_counter() - t0)
        for (s, _), logits in zip(batch, rows, strict=True):
            if not len(s.unread):
                self._advance(s, logits)

    def _count(self, what, n, seconds):
        self.spent[what][0] += n
        self.spent[what][1] += seconds

    def speed(self, what):
        """Tokens a second of "prefill" or "decode"."""
        n, seconds = self.spent[what]
        return n / seconds if seconds else 0.0

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
            wait = self.model.submit([(s.text, s.unread) for s in group])
            self._flying.append((group, wait))
            for s in group:
                s.unread = s.unread[1:]
        group, wait = self._flying.popleft()
        rows = wait()
        self._count("decode", len(group), time.perf_counter() - t0)
        for s, logits in zip(group, rows, strict=True):
            if s.text is not None:
                self._advance(s, logits)

    def _begin_again(self):
        """Another user has taken the model's caches: take them back and read the sequences in work again."""
        self.model.hand_over(self._mark)
        self.kept.clear()
        self._flying.clear()
        with self._lock:
            for s in self.working:
                s.text, s.state = None, "waiting"
                bisect.insort(self.waiting, s, key=lambda s: s.place)
        self.working.clear()

    def _leave(self):
        """End the sequences that were cancelled."""
        flying = {s for group, _ in self._flying for s in group}
        gone = [s for s in (*self.waiting, *self.working) if s.is_cancelled and s not in flying]
        with self._lock:
            self.waiting = [s for s in self.waiting if s not in gone]
        for s in gone:
            s.steps.close()
            s.run.answer.stop_reason = s.run.stats["stop_reason"] = "cancelled"
            self._ended(s)

    # ------------------------------------------------------------ who begins
    def _admit(self):
        while self.waiting and not self.is_paused:
            s = self.waiting[0]
            n_predict, n_ctx = s.run.answer.n_predict, self.model.n_ctx
            n, ids = (len(s.run.prompt_ids) + n_predict if n_predict >= 0 else n_ctx), s.known
            like, n_shared, is_read = self._alike(s, ids)
            if not is_read:
                return                          # wait until the other sequence has read the common ids
            text = self._opened(min(n, n_ctx), like, n_shared)
            if text is None:
                return
            with self._lock:
                self.waiting.remove(s)
            self.working.append(s)
            s.text, s.state = text, "reading"
            if s.unread is not None:            # it was read before, and is read again
                s.unread = ids
            else:
                self._advance(s, None)
            self.n_shared += n_shared
            if n_shared and s.unread is not None:
                s.n_shared, s.unread = n_shared, s.unread[n_shared:]

    def _opened(self, n_tokens, like, n_shared):
        """A Text with so many rows; prefixes that are kept make room for it.  None: there is none."""
        m, cells = self.model, self.model.cells
        while (text := m.open_text(n_tokens, like, n_shared)) is None and self.kept and len(cells.texts) < cells.n_seqs:
            # the text that will be shared is the last to be given up
            at = int(len(self.kept) > 1 and self.kept[0][0] is like)
            cells.close(self.kept.pop(at)[0])
            if like is not None and not any(like is t for t in (*cells.texts, *(t for t, _ in self.kept))):
                like, n_shared = None, 0
        return text

    def _alike(self, sequence, ids):
        """(the Text that has most of the first `ids`, how many of them, has it read them?), or (None, 0, True)."""
        found = None, 0, True
        if not sequence.run.cache_prompt or not self.model.shares or len(ids) <= LEAST_SHARED:
            return found
        for text, others, n_exact in self._prefixes():
            other = others[:len(ids) - 1]
            differ = np.flatnonzero(other != ids[:len(other)])
            n = min(int(differ[0]) if len(differ) else len(other), text.exact)
            if self.exact:
                n = equal_prefix(min(n, n_exact), len(sequence.run.prompt_ids), self.model.n_batch)
            if n >= LEAST_SHARED and n > found[1] and not text.broken:
                found = text, n, len(text.ids) >= n
        return found

    def _prefixes(self):
        """(Text, its ids and those it will have read, how many of them are a prompt's)"""
        for text, n_exact in reversed(self.kept):
            yield text, np.array(text.ids, np.int32), n_exact
        for s in self.working:
            yield (s.text, np.array(s.text.ids + s.unread.tolist(), np.int32),
                   equal_tokens(len(s.run.prompt_ids), self.model.n_batch))

    # ------------------------------------------------------------ a sequence goes on, or ends
    def _advance(self, sequence, logits):
        """Give a sequence its logits: it yields pieces, then the ids that have to be read next, or it ends.

        A Ctrl-C waits for the end of it: a sequence whose next token is chosen in part could not go on.
        """
        with defer_interrupts():
            self._taken(sequence, logits)

    def _taken(self, sequence, logits):
        steps, error = sequence.steps, None
        try:
            got = steps.send(logits)
            while isinstance(got, str):
                sequence.give(got)
                got = next(steps)
            sequence.unread = np.array(got, np.int32)
            sequence.state = "reading" if logits is None else "writing"
        except StopIteration:
            pass
        except Exception as e:
            error = e
        finally:
            if steps.gi_frame is None:          # it has ended, maybe by an error of its own
                self._ended(sequence, error)

    def _ended(self, sequence, error=None):
        if sequence.text is not None:
            self.working.remove(sequence)
            self._put_away(sequence)
            sequence.text = None
        self.n_ended += 1
        sequence.end(error)

    def _put_away(self, sequence):
        """Keep its rows for sequences that begin alike, or free them."""
        text, cells, n = sequence.text, self.model.cells, min(len(sequence.text.ids), sequence.text.exact)
        if not (self.keep and self.model.shares and n > LEAST_SHARED) or text.broken:
            cells.close(text)
            return
        cells.keep(text)
        for other in [k for k in self.kept if k[0].ids == text.ids[:len(k[0].ids)]]:
            self.kept.remove(other)             # the new text begins with all of it
            cells.close(other[0])
        self.kept.append((text, min(n, equal_tokens(len(sequence.run.prompt_ids), self.model.n_batch))))


def equal_tokens(n_prompt, n_batch):
    """How many tokens of a prompt are read in pieces of LEAST_PIECE tokens or more, which all use the same kernels."""
    rest = n_prompt % n_batch
    return n_prompt if rest >= LEAST_PIECE else n_prompt - rest


def equal_prefix(n, n_prompt, n_batch):
    """How many of n tokens a prompt of n_prompt may take over so that the rest is computed as in the prompt alone.

    Alone it is read in pieces that end at multiples of n_batch.  Pieces of LEAST_PIECE tokens or more are computed by
    the same kernels, whose sums do not depend on the length; shorter ones have to be the same.
    """
    if n_batch < LEAST_PIECE:
        return n // n_batch * n_batch
    last = (n_prompt - 1) // n_batch * n_batch          # where the last piece begins
    if n_prompt - last < LEAST_PIECE:
        n = min(n, last)
    end = min(n // n_batch * n_batch + n_batch, n_prompt)
    return n if end - n >= LEAST_PIECE or n % n_batch == 0 else max(end - LEAST_PIECE, n // n_batch * n_batch)
