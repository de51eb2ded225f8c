"""Text, token by token."""
import time

from ggjit.models.sampling import Sampler
from ggjit.ops.errors import ParamError


class Generation:
    """Iterator over pieces of text.  `.stats` has the keys that `ggjit generate --json` prints.

    Stops at a stop token, after n_predict tokens, or when the context is full.  Ctrl-C comes out as KeyboardInterrupt;
    the model can be used again at once.
    """

    def __init__(self, model, prompt, n_predict, temp, sampling):
        if not isinstance(n_predict, int) or n_predict < 0:
            raise ParamError(f"n_predict must be an integer >= 0, got {n_predict!r}")
        self.model, self.n_predict = model, n_predict
        self.sampler = Sampler(temp=temp, **sampling)
        self.prompt_ids = model.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if len(self.prompt_ids) > model.n_ctx:
            raise ParamError(f"the prompt has {len(self.prompt_ids)} tokens, the context {model.n_ctx}; shorten it or "
                             f"load the model with a larger n_ctx")
        self.stats = {"prompt_tokens": len(self.prompt_ids), "tokens": [], "text": "",
                      "prefill_tokens_per_second": 0.0, "decode_tokens_per_second": 0.0,
                      "load_seconds": model.load_seconds, "first_token_seconds": 0.0}
        self._pieces = self._run()

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._pieces)

    def _run(self):
        model, stats, stop = self.model, self.stats, self.model.tokenizer.stop_ids
        decoder = model.tokenizer.stream()
        t0 = time.perf_counter()
        model.reset()
        logits = model.decode(self.prompt_ids)
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
            logits = model.decode([token])
            decode_seconds += time.perf_counter() - t
            n_decoded += 1
            stats["decode_tokens_per_second"] = n_decoded / decode_seconds
        rest = decoder.flush()
        stats["text"] += rest
        if rest:
            yield rest
