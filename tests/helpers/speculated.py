"""Texts that a second network, or a layer of the first, guesses ahead."""
import numpy as np


def text_is_that_of_plain_decoding(m, speculative, **options):
    """Also where other calls use the model in between.  options: of m.generate."""
    prompt = np.random.default_rng(5).integers(0, 90, 30).tolist()
    want = m.generate(prompt, 60, cache_prompt=False, **options)
    list(want)
    for use in (None, lambda: m.logits([1, 2]), lambda: list(m.generate([3, 4], 3))):
        g = m.generate(prompt, 60, speculative=speculative, **options)
        for _ in range(20):
            next(g)
        if use:
            use()
        list(g)
        assert g.stats["tokens"] == want.stats["tokens"] and g.stats["drafted_tokens"] > 0
        assert m.text.ids == prompt + want.stats["tokens"][:-1]
