"""Generation of many texts at once, by a running batch (running_batch.py) that starts with all of them."""
import collections.abc
import numbers

from ggjit.models.text.generation import Generation
from ggjit.models.text.running_batch import RunningBatch
from ggjit.ops.core.errors import ParamError


def is_many(prompt):
    """Is it a list of prompts, not of token ids?"""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and not isinstance(prompt[0], numbers.Number)


def _several_times(value):
    """An option that every text reads from its beginning: an iterator becomes a tuple."""
    return tuple(value) if isinstance(value, collections.abc.Iterator) else value


def _taker(pieces, i):
    """The function that takes the pieces of text i."""
    return lambda piece: None if piece is None else pieces.append((i, piece))


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
        if options.get("speculative") is not None:
            raise ParamError("speculative works for one prompt at a time; several are computed together anyway")
        stop, options = _several_times(stop), {name: _several_times(value) for name, value in options.items()}
        self.runs = [Generation(model, prompt, n_predict, stop, ignore_eos, **options) for prompt in prompts]
        for run in self.runs:
            model._checked_ids(run.prompt_ids, model.n_ctx)
        self._batch, self._pieces = RunningBatch(model), collections.deque()
        self._sequences = [self._batch.add(run, on_piece=_taker(self._pieces, i)) for i, run in enumerate(self.runs)]

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.runs)

    def __getitem__(self, i):
        return self.runs[i]

    def __repr__(self):
        return (f"<Generations: {len(self.runs)} texts, {len(self._batch.working)} in work, "
                f"{len(self._batch.waiting)} waiting; iterate over it for (number, piece)>")

    @property
    def texts(self):
        """The texts so far, in the order of their prompts."""
        return [run.stats["text"] for run in self.runs]

    @property
    def stats(self):
        """Statistics of all texts together: tokens, and how fast they were read and written."""
        batch = self._batch
        return {"prompt_tokens": sum(len(run.prompt_ids) for run in self.runs), "shared_tokens": batch.n_shared,
                "tokens": sum(len(run.stats["tokens"]) for run in self.runs),
                "prefill_tokens_per_second": batch.speed("prefill"),
                "decode_tokens_per_second": batch.speed("decode")}

    def __next__(self):
        while not self._pieces:
            self._raise_one()
            if self._batch.is_idle:
                raise StopIteration
            self._batch.turn()
        return self._pieces.popleft()

    def _raise_one(self):
        """Raise the error of a text that ended by one, once for each text."""
        for s in self._sequences:
            if s.error is not None:
                error, s.error = s.error, None
                raise error
