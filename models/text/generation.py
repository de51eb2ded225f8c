"""Text, token by token."""
import time
import weakref

from ggjit.models.core.checks import integer
from ggjit.models.text.sampling import Sampler
from ggjit.ops.core.errors import ParamError, TypeMismatch


class Generation:
    """Iterator over pieces of text.  `.stats` has the keys that `ggjit generate --json` prints.

    Stops at a stop token, after n_predict tokens, or when the context is full.  Ctrl-C comes out as KeyboardInterrupt;
    the model can be used again at once.
    """

    def __init__(self, model, prompt, n_predict, sampling):
        self.model, self.n_predict = model, integer("n_predict", n_predict, 0, 1 << 31)
        self.sampler = Sampler(model.tokenizer, **sampling)
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise TypeMismatch(f"generate takes a text or a list of token ids, got {type(prompt).__name__}")
        self.prompt_ids = model.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if len(self.prompt_ids) > model.n_ctx:
            raise ParamError(f"the prompt has {len(self.prompt_ids)} tokens, the context {model.n_ctx}; shorten it or "
                             f"load the model with a larger n_ctx")
        self.stats = {"prompt_tokens": len(self.prompt_ids), "tokens": [], "text": "",
                      "prefill_tokens_per_second": 0.0, "decode_tokens_per_second": 0.0,
                      "load_seconds": model.load_seconds, "first_token_seconds": 0.0}
        self._mark = object()               # in `model.holder` while this text is in the model's cache
        self._pieces = Generation._run(weakref.proxy(self))     # held weakly: no cycle that keeps the model

    def __iter__(self):
        return self

    def __repr__(self):
        s = self.stats
        return (f"<Generation: {s['prompt_tokens']} prompt tokens, {len(s['tokens'])} of {self.n_predict} generated"
                f"{', so far ' + repr(s['text']) if s['tokens'] else ''}; iterate over it for the text>")

    def __next__(self):
        return next(self._pieces)

    def _decode(self, ids):
        """Feed `ids` after this text; if the model was used for another one meanwhile, this text is read again."""
        model = self.model
        with model._lock:
            if model.holder is not self._mark:
                model.reset()
                ids = self.prompt_ids + self.stats["tokens"]
            logits = model.decode(ids)
            model.holder = self._mark
            return logits

    def _run(self):
        model, stats, stop = self.model, self.stats, self.model.tokenizer.stop_ids
        decoder = model.tokenizer.stream()
        t0 = time.perf_counter()
        logits = self._decode(self.prompt_ids)
        t1 = time.perf_counter()
        stats["prefill_tokens_per_second"] = len(self.prompt_ids) / (t1 - t0)
        self.sampler.accept(self.prompt_ids)
        n_decoded, decode_seconds = 0, 0.0
        while len(stats["tokens"]) < self.n_predict:
            token = self.sampler.sample(logits)
            stats["tokens"].append(token)
            if len(stats["tokens"]) == 1:
                stats["first_token_seconds"] = time.perf_counter() - t0
            if token in stop:
                break
            piece = decoder.push(token)
            stats["text"] += piece
            if piece:
                yield piece
            if model.n_past >= model.n_ctx or len(stats["tokens"]) == self.n_predict:
                break
            t = time.perf_counter()
            logits = self._decode([token])
            decode_seconds += time.perf_counter() - t
            n_decoded += 1
            stats["decode_tokens_per_second"] = n_decoded / decode_seconds
        rest = decoder.flush()
        stats["text"] += rest
        if rest:
            yield rest
