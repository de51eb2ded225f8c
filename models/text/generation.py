"""Generation of one text, token by token."""
import collections
import inspect
import itertools
import math
import sys
import time
import weakref
from typing import TYPE_CHECKING

from ggjit.models.core.checks import integer, known_options
from ggjit.models.core.other_options import GENERATION
from ggjit.models.text.answer import Answer
from ggjit.models.text.grammar import matcher
from ggjit.models.text.logprobs import tokens_html
from ggjit.models.text.sampling import OPTIONS, Sampler
from ggjit.models.text.speculation import Speculation, guesser_of
from ggjit.models.text.text_inside import TextInside
from ggjit.ops.core.errors import NoSuchAttribute, NotSupported, ParamError, TypeMismatch
from ggjit.ops.native.jit import CACHE

REDRAW_SECONDS = 0.15          # between two drawings of a cell while its text is generated
INSIDE_TOKENS, INSIDE_NBYTES = 48, 512 << 20    # the most for which a cell shows the inside
INSIDE_TOP = 3                  # likeliest tokens after each layer


class Generation:
    """Iterator over pieces of text.  `.stats` has the keys that `ggjit generate --json` prints; "stop_reason" is None
    while there is more to come, then one of those of Answer: "stop_token", "stop_string", "length", "grammar",
    "context".

    n_predict, stop: as in Answer.  ignore_eos: the vocabulary's ends of turn and document are never chosen.  grammar:
    GBNF text that the answer fits (models/text/gbnf.py); json_schema: a JSON Schema (models/text/json_schema.py).
    grammar_triggers: texts, compiled patterns and ids; the grammar holds from the first of them on (LazyMatcher in
    models/text/grammar.py).
    logprobs: None, or how many alternatives `.tokens` and stats["logprobs"] have beside each token's log-probability.
    cache_prompt, context_shift, n_keep, speculative: as in Decoder.generate.  sampling: llama.cpp's options, listed in
    models/text/sampling.py.
    Ctrl-C comes out as KeyboardInterrupt; the model can be used again at once.
    """

    def __init__(self, model, prompt, n_predict=64, stop=(), ignore_eos=False, grammar=None, json_schema=None,
                 grammar_triggers=None, cache_prompt=True, context_shift=False, n_keep=0, logprobs=None,
                 speculative=None, **sampling):
        known_options("generate", sampling, ("n_predict", *OPTIONS, "stop", "ignore_eos", "grammar", "json_schema",
                                             "grammar_triggers", "cache_prompt", "context_shift", "n_keep", "logprobs",
                                             "speculative"), GENERATION)
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise TypeMismatch(f"generate takes a text or a list of token ids, got {type(prompt).__name__}")
        self.model = model
        if ignore_eos:
            never = dict.fromkeys(model.tokenizer.stop_ids, -math.inf)
            given = sampling.get("logit_bias", {})
            OPTIONS["logit_bias"].checked(given)
            sampling["logit_bias"] = never | given
        sampler = Sampler(model.tokenizer, matcher(model.tokenizer, grammar, json_schema, grammar_triggers),
                          **sampling)
        self.answer = Answer(model.tokenizer, sampler, n_predict, stop, logprobs)
        self.prompt_ids = model._ids_of_text(prompt) if isinstance(prompt, str) else list(prompt)
        if not self.prompt_ids:
            raise ParamError("generate: the prompt has no tokens; give a text or at least one id")
        if len(self.prompt_ids) > model.n_ctx:
            raise ParamError(f"the prompt has {len(self.prompt_ids)} tokens, the context {model.n_ctx}; shorten it or "
                             f"load the model with a larger n_ctx")
        self.stats = {"prompt_tokens": len(self.prompt_ids), "tokens": self.answer.tokens, "text": "",
                      "stop_reason": None, "prefill_tokens_per_second": 0.0, "decode_tokens_per_second": 0.0,
                      "load_seconds": model.load_seconds, "first_token_seconds": 0.0}
        self.cache_prompt, self.context_shift = bool(cache_prompt), bool(context_shift)
        self.n_keep = integer("n_keep", n_keep, 0, model.n_ctx - 1)
        guesser = guesser_of(model, speculative)
        self.speculation = guesser and Speculation(guesser)
        self._ahead = collections.deque()   # (id that was guessed, logits after it): they follow _read in the cache
        self._read = []                     # ids of this text that are in the model's cache, or would be
        self._mark = object()               # in `model.cache_owner` while this text is in the model's cache
        # pieces that were generated for `text` and still have to come out of the iteration
        self._pieces = collections.deque()
        self._is_begun = False
        self._steps = Generation._run(weakref.proxy(self))      # held weakly: no cycle that keeps the model

    @property
    def _text_ids(self):
        """Tokens of the prompt, less those of pictures."""
        return [id for id in self.prompt_ids if id < self.model.n_vocab]

    def __iter__(self):
        return self

    def __repr__(self):
        s, n = self.stats, self.answer.n_predict
        of = f" of {n}" if n >= 0 else ""
        return (f"<Generation: {s['prompt_tokens']} prompt tokens, {len(s['tokens'])}{of} generated"
                f"{', so far ' + repr(s['text']) if s['tokens'] else ''}; iterate over it for the text>")

    @property
    def text(self):
        """The whole text: what is not generated yet is generated now, and still comes out of the iteration.

        stats["text"] is the text so far; one of several texts (`runs[i].text`) has that here, too.
        """
        while (piece := self._next_piece()) is not None:
            self._pieces.append(piece)
        return self.answer.text

    @property
    def tokens(self):
        """A list of TokenLogprob: `.id .text .logprob .alternatives .seconds`; the last one of a text that ended by
        itself is its end.  With `logprobs=None` the log-probabilities are None.  Before the first piece was asked for
        the whole text is generated; afterwards these are the tokens so far.

            g = m.generate("Elizabeth was", n_predict=8, logprobs=3)
            for t in g.tokens: print(t.text, t.logprob, [a.text for a in t.alternatives])
        """
        if not self._is_begun:
            _ = self.text
        return list(self.answer.scored)

    def __getitem__(self, index):
        """Errors: TypeMismatch, always."""
        raise TypeMismatch(f"a Generation is read in order: `for piece in g`; g.text[{index!r}] is of the text, "
                           f"g.tokens[{index!r}] of its tokens")

    if not TYPE_CHECKING:               # checkers would take every attribute for granted
        def __getattr__(self, name):
            """An AttributeError; for names of str it says where the text is."""
            hint = f"; write g.text.{name}" if hasattr(str, name) else ""
            raise NoSuchAttribute(f"a Generation has no attribute {name!r}{hint}", name=name, obj=self)

    def __aiter__(self):
        return self

    async def __anext__(self):
        """The next piece, computed in another thread: `async for piece in g` leaves the event loop free."""
        import asyncio  # imported here: it takes a twentieth of the time of importing ggjit, and is seldom needed
        piece = await asyncio.to_thread(next, self, None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    def _repr_html_(self):
        """The whole text, each token coloured by its probability; alternatives on hover and by a click, and with them
        the model's insides where the text is short (`inside` for longer ones)."""
        whole = self.text and self.tokens
        opened = self._opened(whole)
        return opened._repr_html_() if opened else tokens_html(whole, self.model.detokenize(self._text_ids))

    def _opened(self, whole):
        """The TextInside of a text that ended, if it takes a second or two at most; else None."""
        model, n = self.model, len(self._text_ids) + len(whole)
        if self.answer.n_alternatives is None or not whole or len(self._text_ids) != len(self.prompt_ids) \
                or n > INSIDE_TOKENS or model.is_watched or model.weights.nbytes > INSIDE_NBYTES:
            return None
        try:
            return TextInside(model, self._text_ids, whole, INSIDE_TOP)
        except NotSupported:                            # a network without layers that can be read as the last one
            return None

    def _ipython_display_(self):
        """In a notebook the cell grows while the text is generated; what is saved is the whole text."""
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
            raise NotImplementedError                       # IPython then shows the repr, the text's state
        from IPython.display import display
        prompt = self.model.detokenize(self._text_ids)
        page = display(self._shown(prompt), raw=True, display_id=True)
        drawn = time.perf_counter()
        while (piece := self._next_piece()) is not None:
            self._pieces.append(piece)
            if time.perf_counter() - drawn > REDRAW_SECONDS:
                page.update(self._shown(prompt), raw=True)
                drawn = time.perf_counter()
        page.update(self._shown(prompt), raw=True)
        if opened := self._opened(self.tokens):
            page.update({"text/html": opened._repr_html_(), "text/plain": repr(self)}, raw=True)

    def _shown(self, prompt):
        return {"text/html": tokens_html(list(self.answer.scored), prompt), "text/plain": repr(self)}

    def inside(self, top=INSIDE_TOP):
        """The text with the model's insides: a click on a token opens what each layer would have said in its place,
        what the model looked at, and how large the layers' values were.  The model's text so far is forgotten.

            g = m.generate("The capital of France is", n_predict=8, logprobs=5)
            g.inside()
        """
        whole = self.text and self.tokens
        return TextInside(self.model, self._text_ids, whole, top)

    def __next__(self):
        piece = self._pieces.popleft() if self._pieces else self._next_piece()
        if piece is None:
            raise StopIteration
        return piece

    def _next_piece(self):
        """The next piece of text, or None at its end."""
        self._is_begun = True
        try:
            return self._computed_piece()
        except StopIteration:
            with self.model._lock:
                self._forget_guesses()
                if self.speculation is not None:
                    self.speculation.is_on = False
            return None

    def _computed_piece(self):
        got = next(self._steps)
        while not isinstance(got, str):
            try:
                logits = self._decode(got)
            except BaseException as e:
                self._steps.throw(e)                # the generator ends by this error
                raise
            got = self._steps.send(logits)
        return got

    def _decode(self, ids):
        """Feed `ids` after this text; if the model was used for another one meanwhile, this text is read again."""
        model = self.model
        with model._lock:
            mine = model.cache_owner is self._mark
            if self._ahead and mine and [self._ahead[0][0]] == ids:
                self.speculation.accept()
                self._read += ids
                return self._ahead.popleft()[1]
            self._forget_guesses()
            if self.context_shift and len(self._read) + len(ids) > model.n_ctx:
                n = max((len(self._read) - self.n_keep) // 2, 1)
                if mine:
                    model.shift_context(self.n_keep, n)
                del self._read[self.n_keep:self.n_keep + n]
            self._read += ids
            if mine and self.speculation is not None and not model.is_watched:
                logits = self._speculated(ids)
            else:
                if not mine:
                    ids = self._read[model.keep_prefix(self._read) if self.cache_prompt else model.reset():]
                logits = model.decode(ids)
            model.cache_owner = self._mark
            return logits

    def _speculated(self, ids):
        """Logits after the last token.  Guessed ids are read in the same batch, and the logits after them are kept."""
        model, s, answer = self.model, self.speculation, self.answer
        left = answer.n_predict - len(answer.tokens) if answer.n_predict >= 0 else model.n_ctx
        guesses, seconds = s.guess(self._read, min(left - 1, model.n_ctx - len(self._read), model.n_batch - 1))
        # ids from n_vocab on are pictures
        guesses = list(itertools.takewhile(lambda id: id < model.n_vocab, guesses))
        # planned before the time is taken, once for each number of guesses
        while guesses and not model.plan_apart(len(guesses) + 1):
            guesses = s.narrowed(guesses)
        t0 = time.perf_counter()
        if not guesses:
            logits = model.decode(ids)
            s.was_plain(time.perf_counter() - t0)
            return logits
        rows = model.decode_apart(ids + guesses)
        s.begin(len(guesses), seconds + time.perf_counter() - t0)
        self._ahead.extend(zip(guesses, rows[1:], strict=True))
        return rows[0]

    def _forget_guesses(self):
        """Cut the cache at the end of the text: guesses that did not come are dropped."""
        if self._ahead and self.model.cache_owner is self._mark:
            self.model.cut_text(len(self._read))
            self.model.cache_owner = self._mark
        self._ahead.clear()
        if self.speculation is not None:
            self.speculation.settle()
            self.stats["drafted_tokens"] = self.speculation.n_drafted
            self.stats["accepted_tokens"] = self.speculation.n_accepted

    def _run(self):
        """Yields pieces, and ids whose logits are to be sent."""
        stats, answer, n_ctx = self.stats, self.answer, self.model.n_ctx
        answer.begin()
        t0, n_compiled = time.perf_counter(), CACHE.compiled
        logits = yield self.prompt_ids
        stats["prefill_tokens_per_second"] = len(self.prompt_ids) / (time.perf_counter() - t0)
        answer.sampler.accept(self._text_ids)
        decode_seconds = 0.0
        while not answer.stop_reason:
            piece = answer.take(logits)
            stats["text"] = answer.text
            if answer.n_alternatives is not None:
                stats.setdefault("logprobs", []).append(answer.scored[-1].as_dict())
            stats["first_token_seconds"] = stats["first_token_seconds"] or time.perf_counter() - t0
            full = stats["prompt_tokens"] + len(answer.tokens) > n_ctx and not self.context_shift
            if full and not answer.stop_reason:
                answer.stop_reason = "context"
            if piece:
                yield piece
            if not answer.stop_reason:
                t = time.perf_counter()
                logits = yield answer.tokens[-1:]
                decode_seconds += time.perf_counter() - t
                stats["decode_tokens_per_second"] = len(answer.tokens) / decode_seconds
        rest = answer.finish()
        stats["text"], stats["stop_reason"] = answer.text, answer.stop_reason
        if CACHE.compiled == n_compiled:            # else these are times of compiling
            self.model.last_speed = {"prompt": stats["prefill_tokens_per_second"],
                                     "decode": stats["decode_tokens_per_second"]}
        if rest:
            yield rest


# {option of Decoder.generate and chat: its default}
GENERATION_OPTIONS = {
    **{p.name: p.default for p in inspect.signature(Generation).parameters.values() if p.default is not p.empty},
    **{name: option.default for name, option in OPTIONS.items()}}
