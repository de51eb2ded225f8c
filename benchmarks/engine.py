"""How every engine is timed, written once: subclasses say how to load, to forget, to decode and to embed."""
import time

import numpy as np

CLOCKS = {"wall": time.perf_counter,
          "cpu": time.process_time}             # on a machine that is not idle; means something with one thread only


class Engine:
    """Runs in a process of its own (benchmarks/worker.py).  Times are seconds; every timing is preceded by a short
    run that wakes the processor and the engine's threads."""

    now = staticmethod(time.perf_counter)
    n_vocab = 0

    def about(self):
        """{"name", "version", "features"}"""
        raise NotImplementedError

    def load(self, path, n_threads, n_ctx=512, embed=False):
        """Keep one model ready, instead of the one before."""
        raise NotImplementedError

    def unload(self):
        """Give the model back."""
        raise NotImplementedError

    def reset(self):
        """Empty the KV cache."""
        raise NotImplementedError

    def decode(self, ids):
        """Feed int32 ids at the next positions, all at once; ready when the logits of the last one are."""
        raise NotImplementedError

    def encode(self, ids):
        """One text as ids -> its embedding."""
        raise NotImplementedError

    def use_clock(self, name):
        self.now = CLOCKS[name]

    def _ids(self, n, seed):
        ids = np.random.default_rng(seed).integers(0, self.n_vocab, n, np.int32)
        self.reset()
        self.decode(ids[:1])
        self.reset()
        return ids

    def pp(self, n, seed=0):
        """Seconds of one prompt of n tokens, from an empty cache to the logits of its last token."""
        ids = self._ids(n, seed)
        t0 = self.now()
        self.decode(ids)
        return self.now() - t0

    def tg(self, n, seed=0):
        """Seconds of n tokens one at a time, from an empty cache."""
        ids = self._ids(n, seed)
        t0 = self.now()
        for i in range(n):
            self.decode(ids[i:i + 1])
        return self.now() - t0

    def embed(self, ids, seconds=0.3):
        """Seconds of each embedding of the text `ids`, over and over for `seconds`."""
        ids, out = np.array(ids, np.int32), []
        self.encode(ids)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(out) < 3:
            t0 = self.now()
            self.encode(ids)
            out.append(self.now() - t0)
        return out
