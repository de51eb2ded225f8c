"""Text diffusion: all tokens of an answer begin as masks, and every step decides some of them.

    ids = prompt, then masks
    every step: a token is drawn for every mask from the logits there, and the surest of these tokens stay

How many stay, the schedule:
    eps             time t goes from 1 to eps in equal parts; of the masks left a share of 1 - t'/t is decided (Dream)
    block_length    one block of the answer after the other, as many tokens at each of its steps (LLaDA)
How sure a token is, the algorithm: SURENESS; "origin" decides each mask with the same probability.
With cfg_scale s the logits are u + (s + 1) (l - u), u being those where masks stand for the prompt, too.

Sources: arXiv 2502.09992 (LLaDA), Dream's generation_utils.py, llama.cpp's examples/diffusion.  There the highest
entropy is the surest; here the lowest is, as in Dream.  LLaDA's Gumbel noise draws as the temperature does.
"""
import math
import time

import numpy as np

from ggjit.models.core.checks import integer, known_options, number, one_of
from ggjit.models.text.answer import Answer
from ggjit.models.text.sampling import OPTIONS
from ggjit.ops.core.errors import NotSupported, ParamError, TypeMismatch

# how sure the tokens are that were drawn: of their probabilities p [n], and of all [n, n_vocab]
SURENESS = {"confidence": lambda p, all_p: p,
            "margin": lambda p, all_p: np.diff(np.partition(all_p, -2, axis=1)[:, -2:], axis=1)[:, 0],
            "entropy": lambda p, all_p: (all_p * np.log(all_p + 1e-10)).sum(axis=1)}
ALGORITHMS = (*SURENESS, "random", "origin")
OWN = "steps", "eps", "block_length", "algorithm", "alg_temp", "cfg_scale"
FILTERS = {"temp": 0.0, "top_k": 0, "top_p": 1.0}        # and off: what they cut off would make many tokens as sure
SAMPLING = (*FILTERS, "seed")
AT_MOST = 256                   # tokens of an answer without a limit
# values of decoders' options that change nothing; of those that go with these, any does
OFF = {**{name: OPTIONS[name].default for name in (
    "typical_p", "top_n_sigma", "xtc_probability", "dynatemp_range", "repeat_penalty", "frequency_penalty",
    "presence_penalty", "dry_multiplier", "mirostat", "adaptive_target", "logit_bias", "samplers")},
    "min_p": 0.0, "n_keep": 0, "images": (), "grammar_triggers": ()}
OF_OTHERS = ("cache_prompt", "xtc_threshold", "dynatemp_exponent", "penalty_last_n", "dry_base", "dry_allowed_length",
             "dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta", "adaptive_decay")
OF_DECODERS = ("grammar", "json_schema", "grammar_triggers", "cache_prompt", "context_shift", "n_keep", "logprobs",
               "speculative", "images", "audio", *(name for name in OPTIONS if name not in SAMPLING))


def shares(n_steps, eps):
    """Of the masks that are left, the share that each step decides; the last one decides all.

        shares(2, 0.0)                  # [0.5, 1.0]
    """
    t = [1.0 - k / n_steps * (1.0 - eps) for k in range(n_steps + 1)]
    return [1.0 - after / before for before, after in zip(t[:-1], t[1:], strict=True)][:-1] + [1.0]


def equal_parts(n, n_steps):
    """How many of n tokens each step decides: the first ones one more.

        equal_parts(7, 3)               # [3, 2, 2]
    """
    return [n // n_steps + (k < n % n_steps) for k in range(n_steps)]


def probabilities(logits, temp, top_k, top_p):
    """[n, n_vocab] of logits [n, n_vocab], float64: those of the filtered tokens, 0 for the others."""
    logits = logits.astype(np.float64)
    if 0 < top_k < logits.shape[1]:
        logits[logits < np.partition(logits, -top_k, axis=1)[:, -top_k, None]] = -math.inf
    p = _softmax(logits)
    if top_p < 1.0:
        order = np.argsort(-p, axis=1, kind="stable")
        before = np.cumsum(np.take_along_axis(p, order, 1), axis=1) - np.take_along_axis(p, order, 1)
        cut = np.zeros_like(p, bool)
        np.put_along_axis(cut, order, before >= top_p, 1)
        cut[np.arange(len(p)), order[:, 0]] = False
        logits[cut] = -math.inf
    return _softmax(logits / temp if temp > 0 else logits)


def _softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


class _Decided:
    """In the place of a Sampler: the token is chosen already."""
    grammar = None

    @staticmethod
    def sample(token):
        return token


class Diffusion:
    """Iterator over pieces of text.  `.stats` as of Generation, and "steps": how many were computed; `.ids`: the tokens
    of prompt and answer, with the mask where none is decided.

    Arguments: as in Diffuser.generate.
    """

    def __init__(self, model, prompt, n_predict=64, stop=(), ignore_eos=False, steps=None, eps=None, block_length=None,
                 algorithm="confidence", alg_temp=0.0, cfg_scale=0.0, **sampling):
        sampling = _own_sampling(model, sampling)
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise TypeMismatch(f"generate takes a text or a list of token ids, got {type(prompt).__name__}")
        self.model, self.prompt_ids = model, model._checked_ids(prompt, model.n_ctx).tolist()
        room = model.n_ctx - len(self.prompt_ids)
        if not room:
            raise ParamError(f"the prompt has {len(self.prompt_ids)} tokens, as many as the context: there is no room "
                             f"for an answer; shorten it")
        n = min(room, AT_MOST) if n_predict == -1 else integer(
            "n_predict", n_predict, 1, room, f": the prompt has {len(self.prompt_ids)} tokens, the context "
            f"{model.n_ctx}, and all tokens are written at once")
        self.algorithm = one_of("algorithm", algorithm, ALGORITHMS)
        self.alg_temp, self.cfg_scale = (_at_least_0(*pair) for pair in (("alg_temp", alg_temp),
                                                                          ("cfg_scale", cfg_scale)))
        self._sampling = [OPTIONS[name].checked(sampling.get(name, off)) for name, off in FILTERS.items()]
        self._rng = np.random.default_rng(OPTIONS["seed"].checked(sampling.get("seed")))
        self._parts = _parts(n, integer("steps", n if steps is None else steps, 1, 1 << 20), eps, block_length,
                             model.schedule)
        self._never = [model.mask_id, *(model.tokenizer.stop_ids if ignore_eos else ())]
        self.answer = Answer(model.tokenizer, _Decided, n, stop)
        self.ids = np.array(self.prompt_ids + [model.mask_id] * n, np.int32)
        self.stats = {"prompt_tokens": len(self.prompt_ids), "tokens": self.answer.tokens, "text": "",
                      "stop_reason": None, "steps": 0, "prefill_tokens_per_second": 0.0,
                      "decode_tokens_per_second": 0.0,
                      "load_seconds": model.load_seconds, "first_token_seconds": 0.0}
        self._pieces, self._run = [], self._written()

    def __iter__(self):
        return self

    def __next__(self):
        return self._pieces.pop(0) if self._pieces else next(self._run)

    def __repr__(self):
        n = int((self.ids[len(self.prompt_ids):] != self.model.mask_id).sum())
        return (f"<Diffusion: {len(self.prompt_ids)} prompt tokens, {n} of {len(self.ids) - len(self.prompt_ids)} "
                f"decided after {self.stats['steps']} steps; iterate over it for the text>")

    @property
    def text(self):
        """The whole text: what is not written yet is written now, and still comes out of the iteration."""
        self._pieces += list(self._run)
        return self.answer.text

    @property
    def tokens(self):
        """The tokens of the answer so far, up to the first that is not decided, a list of TokenLogprob."""
        return list(self.answer.scored)

    # ------------------------------------------------------------ the loop
    def _written(self):
        t0, stats, answer = time.perf_counter(), self.stats, self.answer
        for piece in self._decided_pieces():
            stats["text"] = answer.text
            stats["first_token_seconds"] = stats["first_token_seconds"] or time.perf_counter() - t0
            if piece:
                yield piece
            if answer.stop_reason:
                break
        rest = answer.finish()
        stats["text"], stats["stop_reason"] = answer.text, answer.stop_reason
        stats["decode_tokens_per_second"] = len(answer.tokens) / (time.perf_counter() - t0)
        if rest:
            yield rest

    def _decided_pieces(self):
        """The piece of each token, once it and all before it are decided."""
        at = start = len(self.prompt_ids)
        for first, end, counts in self._parts:
            for share in counts:
                masks = start + first + np.flatnonzero(self.ids[start + first:start + end] == self.model.mask_id)
                n = share if isinstance(share, int) else int(len(masks) * share)
                if not min(n, len(masks)):
                    continue
                self._decide(masks, min(n, len(masks)))
                while at < len(self.ids) and self.ids[at] != self.model.mask_id:
                    at += 1
                    yield self.answer.take(int(self.ids[at - 1]))

    def _decide(self, masks, n):
        """Draw tokens for the masks, and keep n of them."""
        p = probabilities(self._logits_at(masks), *self._sampling)
        tokens = p.argmax(1) if self._sampling[0] <= 0 else \
            np.minimum((p.cumsum(1) < self._rng.random((len(p), 1))).sum(1), p.shape[1] - 1)
        self.stats["steps"] += 1
        if self.algorithm == "origin":
            kept = self._rng.permutation(len(masks))[:n]
        else:
            sure = self._rng.random(len(masks)) if self.algorithm == "random" else \
                SURENESS[self.algorithm](p[np.arange(len(p)), tokens], p)
            if self.alg_temp:               # the largest of them are drawn with exp(sure / alg_temp), none twice
                sure = sure / self.alg_temp + self._rng.gumbel(size=len(sure))
            kept = np.argsort(-sure, kind="stable")[:n]
        self.ids[masks[kept]] = tokens[kept]

    def _logits_at(self, masks):
        at = np.maximum(masks - 1, 0) if self.model.shifts_logits else masks
        logits = self.model.logits_at(self.ids, at)
        if self.cfg_scale:
            bare = self.ids.copy()
            bare[:len(self.prompt_ids)] = self.model.mask_id
            without = self.model.logits_at(bare, at)
            logits = without + np.float32(self.cfg_scale + 1.0) * (logits - without)
        logits[:, self._never] = -math.inf
        return logits


def _own_sampling(model, sampling):
    """The options without those of decoders that ask for nothing.  Errors: NotSupported, ParamError."""
    others = [name for name in sampling if name in OF_DECODERS]
    given = [name for name in others if _asks(name, sampling[name])]
    if given:
        raise NotSupported(f"{model.file.arch} models write all tokens at once, in no order: {', '.join(given)} fit "
                           f"models that write from left to right; leave that out")
    known_options("generate", sampling, ("n_predict", "stop", "ignore_eos", *others, *SAMPLING, *OWN))
    return {name: value for name, value in sampling.items() if name not in others}


def _asks(name, value):
    """Would this value change what a decoder writes, or tells?"""
    if value is None or value is False or name in OF_OTHERS:
        return False
    off = OFF.get(name)
    if isinstance(value, list | tuple):
        return off is None or tuple(value) != off
    return off is None or not isinstance(value, int | float | dict | np.number) or value != off


def _at_least_0(name, value):
    if number(name, value) < 0:
        raise ParamError(f"{name} is {value!r}, expected a number from 0 on")
    return float(value)


def _parts(n, n_steps, eps, block_length, default):
    """[(first, end, what each step decides)] of an answer of n tokens: numbers of tokens, or shares of the masks."""
    if eps is not None and block_length is not None:
        raise ParamError("generate takes eps or block_length, two schedules; leave one of them out")
    if eps is None and block_length is None:
        eps, block_length = default.get("eps"), default.get("block_length")
    if block_length is None:
        if not 0 <= number("eps", eps) < 1:
            raise ParamError(f"eps is {eps!r}, expected a number from 0 and below 1")
        return [(0, n, shares(n_steps, eps))]
    size = integer("block_length", block_length, 1, 1 << 20)
    firsts = range(0, n, size)
    if n_steps < len(firsts):
        raise ParamError(f"steps is {n_steps}, expected at least one for each of the {len(firsts)} blocks of "
                         f"{size} tokens; raise steps or block_length")
    steps = equal_parts(n_steps, len(firsts))
    return [(first, min(first + size, n), equal_parts(min(first + size, n) - first, k))
            for first, k in zip(firsts, steps, strict=True)]
