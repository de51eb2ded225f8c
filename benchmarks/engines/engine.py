"""How every engine is timed, written once: subclasses say how to load, to forget, to decode, to embed and to run a
graph."""
import statistics
import time

import numpy as np

CLOCKS = {"wall": time.perf_counter,
          "cpu": time.process_time}             # on a machine that is not idle; means something with one thread only

WARM_TOKENS = 16


class Engine:
    """Runs in a process of its own (benchmarks/worker.py).  Times are seconds; every timing is preceded by a short
    run that wakes the processor and the engine's threads.

    A subclass has about() and, for what it can run, models, graphs or both:

        about()                         {"name", "version", "features"}
        load(path, n_threads, n_ctx=512, embed=False)
                                        keep one model ready, instead of the one before
        unload()                        give the model, or the graph, back
        reset()                         empty the KV cache
        decode(ids)                     feed int32 ids at the next positions, all at once; ready when the logits of the
                                        last one are
        encode(ids)                     one text as ids -> its embedding
        load_graph(path, n_threads)     keep the graph of a file written by `ours.write_graph` ready, instead of the one
                                        before
        run_graph()                     compute it once
        graph_result(path)              write the bytes of its first result to a file
    """

    now = staticmethod(time.perf_counter)
    n_vocab = 0

    # ------------------------------------------------------------ timing
    def use_clock(self, name):
        self.now = CLOCKS[name]

    def warm(self, measure, n):
        """A first, shorter run of `measure`."""
        getattr(self, measure)(min(n, WARM_TOKENS))

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

    def embed(self, n, seed=0, seconds=0.3):
        """Seconds of one embedding of a text of n tokens: the median over `seconds`."""
        ids = np.arange(1000 + seed, 1000 + seed + n, dtype=np.int32)
        return self._median(lambda: self.encode(ids), seconds)

    def graph(self, seconds):
        """Seconds of one run of the graph: the median over `seconds`."""
        return self._median(self.run_graph, seconds)

    def _median(self, work, seconds):
        work()
        end, out = time.perf_counter() + seconds, []
        while time.perf_counter() < end or len(out) < 3:
            t0 = self.now()
            work()
            out.append(self.now() - t0)
        return statistics.median(out)
