"""Engines side by side: each in a process of its own, taking turns on the same bytes, one awake at a time.

    round 1   ours ####  wheel #######      round 2   wheel #######  ours ####     ...
                        ^ pause: the threads of the engine that is done stop spinning and sleep
"""
import contextlib
import os
import pathlib
import statistics
import tempfile
import time

from benchmarks import machine
from benchmarks.machine import IDLE_CORES, Others
from benchmarks.report import Row, Spread
from benchmarks.work import Graph, Model
from benchmarks.worker import EngineError, Missing, Worker

PAUSE_SECONDS = 0.05        # threads spin after their work: libgomp's 20 ms, OpenBLAS's up to 150
MOST_PAUSES = 20
AWAKE_SECONDS = 0.05        # the kernel counts in steps of 0.01
LIMITED_SHARE, LIMITED_RATIO, LIMITED_ROUNDS = 0.9, 0.97, 7     # both near the read bandwidth: no engine can gain much
LEAST_ROUNDS, PATIENCE_SECONDS = 3, 60                          # slow works have fewer rounds
PEAKS = {"int8": "integer", "f32": "float32"}
NAMES = {"wheel": ("engines.peer",), "onnxruntime": ("engines.ort",), "openvino": ("engines.ov",),
         "numpy": ("engines.arrays", "numpy"), "torch": ("engines.arrays", "torch")}


class Engines:
    """Our worker and the peers' for one number of threads.  `missing`: {peer: why it is not there}.

    only: the peers to start; isa: the instruction set our worker is made to use.
    """

    def __init__(self, n_threads, clock="wall", isa=None, only=None):
        self.n_threads, self.workers, self.missing, self._loaded = n_threads, {}, {}, {}
        # set before numpy is imported; the others are told in `load`
        self.env = {"OPENBLAS_NUM_THREADS": str(n_threads), "OMP_NUM_THREADS": str(n_threads)}
        try:
            self._start("ours", "engines.ours", **({"GGJIT_CPU": isa} if isa else {}))
            for name, how in NAMES.items():
                if only is None or name in only:
                    self._try(name, *how)
            if only is None or "native" in only:
                self._start_native()
            if only is None or "ik" in only:
                self._start_ik()
            for w in self.workers.values():
                w.ask("use_clock", clock)
            self.limits = self.workers["ours"].ask("limits", n_threads)
        except BaseException:
            self.close()
            raise

    def _start(self, name, *how, **env):
        self.workers[name] = Worker(*how, **self.env, **env)

    def _try(self, name, *how):
        try:
            self._start(name, *how)
        except Missing as e:
            self.missing[name] = str(e)

    def _start_native(self):
        """The builds that GGML_LIB_DIR names.  Of two, the one with llamafile's kernels is a peer of its own."""
        folders = [f for f in os.environ.get("GGML_LIB_DIR", "").split(os.pathsep) if f]
        if not folders:
            self.missing["native"] = "GGML_LIB_DIR names no folder with a native build of ggml"
        for folder in folders:
            try:
                worker = Worker("engines.peer", folder, **self.env)
            except Missing as e:
                self.missing["native"] = str(e)
                continue
            name = "llamafile" if len(folders) > 1 and "llamafile" in worker.about["features"] else "native"
            if name in self.workers:
                worker.close()
                raise EngineError(f"GGML_LIB_DIR names two builds of one kind; the second is {folder}")
            self.workers[name] = worker

    def _start_ik(self):
        folder = os.environ.get("IK_LIB_DIR")
        if folder:
            self._try("ik", "engines.ik", folder)
        else:
            self.missing["ik"] = "IK_LIB_DIR names no folder with a build of ik_llama.cpp"

    def introductions(self):
        """(name, what it is) of every engine, the missing ones too."""
        yield from (("ggjit" if name == "ours" else name, "{name} {version} ({features})".format(**w.about))
                    for name, w in self.workers.items())
        yield from ((name, f"missing: {why}") for name, why in self.missing.items())

    def names(self, work):
        """ggjit and those peers of a work that are installed."""
        return ["ours", *(n for n in self.workers if n in work.targets)]

    def load(self, name, path, embed):
        """What the engine says of the model; it keeps one loaded."""
        if self._loaded.get(name, (None, None))[0] != path:
            self.forget(name)
            self._loaded[name] = path, self.workers[name].ask("load", path, n_threads=self.n_threads, embed=embed)
        return self._loaded[name][1]

    def forget(self, *names):
        """Give back what the engines hold (all of them by default)."""
        for name in names or self.workers:
            self._loaded.pop(name, None)
            self.workers[name].ask("unload")

    def bury(self):
        """Peers whose process has ended are missing from now on.  Their names."""
        dead = [n for n, w in self.workers.items() if n != "ours" and w.ended is not None]
        for name in dead:
            self.missing[name] = f"its process ended with status {self.workers[name].ended}"
            self.workers.pop(name).close()
            self._loaded.pop(name, None)
        return dead

    def cpu_seconds(self, but=None):
        return sum(w.cpu_seconds() for n, w in self.workers.items() if n != but)

    def rest(self):
        """Wait until the threads of all engines sleep."""
        for _ in range(MOST_PAUSES):
            before = self.cpu_seconds()
            time.sleep(PAUSE_SECONDS)
            if self.cpu_seconds() == before:
                return

    def close(self):
        for w in self.workers.values():
            with contextlib.suppress(OSError):
                w.close()
        self.workers = {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def compare(engines, work, rounds, seconds):
    """The Rows of a Work: one for each peer.  seconds: how long a graph runs in one turn."""
    return {Model: _compare_models, Graph: _compare_graphs}[type(work)](engines, work, rounds, seconds)


def rows(engines, work, turns, shown, unit, limited=None, note=""):
    """shown: seconds -> the number in the table (a speed, or a time); limited: seconds -> share of the bandwidth."""
    if limited is not None and turns.rounds >= LEAST_ROUNDS and any(
            limited(turns.median(n)) >= LIMITED_SHARE for n in turns.seconds):
        turns.take(LIMITED_ROUNDS - turns.rounds)
    spreads = {n: Spread([shown(s) for s in v], unit) for n, v in turns.seconds.items()}
    peers = [n for n in spreads if n != "ours"]
    for peer in peers or [None]:
        near = peer and limited is not None and min(limited(turns.median(n)) for n in ("ours", peer)) >= LIMITED_SHARE
        target = work.targets.get(peer)
        least = target and min(target, LIMITED_RATIO if near else target)
        ratio = peer and turns.median(peer) / turns.median("ours")
        notes = [note, near and f"both move {LIMITED_SHARE:.0%} of the read bandwidth", turns.disturbed]
        yield Row(work.text, f"{least:.2f} x" if least else "-", spreads["ours"], spreads.get(peer, "-"), ratio,
                  ratio >= least if peer and least else None, "; ".join(n for n in notes if n), key=work.key,
                  n_threads=engines.n_threads, against=peer or "-")


class Turns:
    """Rounds of one measurement, the engines one after the other.  seconds: {engine: [seconds]}

    With one thread all engines of a round run on the same core, those of the next round on the next: cores of a rented
    machine share their units with threads of other machines, and a process that stays on the better one wins by a
    third.
    """

    def __init__(self, engines, names, once):
        """once: (worker, round) -> seconds"""
        self.engines, self.once, self.rounds, self.awake, self.others = engines, once, 0, 0.0, 0.0
        self.seconds = {n: [] for n in names}

    def take(self, rounds):
        start, names = time.perf_counter(), list(self.seconds)
        with Others(self.engines.workers.values()) as others:
            for r in range(self.rounds, self.rounds + max(0, rounds)):
                if r >= LEAST_ROUNDS and time.perf_counter() - start > PATIENCE_SECONDS:
                    break
                for n in names if r % 2 == 0 else names[::-1]:
                    self._turn(n, r)
                self.rounds += 1
        self.others = max(self.others, others.cores)
        return self

    def _turn(self, name, r):
        if self.engines.n_threads > 1:
            self.engines.rest()
        else:
            cores = machine.cores()
            self.engines.workers[name].run_on({cores[r % len(cores)]})
        before = self.engines.cpu_seconds(but=name)
        self.seconds[name].append(self.once(self.engines.workers[name], r))
        self.awake += self.engines.cpu_seconds(but=name) - before

    def median(self, name):
        return Spread(self.seconds[name], "s").median

    @property
    def disturbed(self):
        """What disturbed the measurement.  awake: processor seconds of engines while another one was measured."""
        notes = [disturbance(self.others)]
        notes += [f"DISTURBED: an engine at rest used {self.awake:.2f} s"] if self.awake > AWAKE_SECONDS else []
        return "; ".join(n for n in notes if n)


def disturbance(cores):
    """What to say of other processes that kept so many cores busy."""
    return f"DISTURBED: others used {cores:.2f} cores" if cores >= IDLE_CORES else ""


# ---------------------------------------------------------------- models
def _compare_models(engines, work, rounds, seconds):
    path, embed, names = work.file(), work.measure == "embed", engines.names(work)
    names = [n for n in names if _loads(engines, n, path, embed)]
    sizes = engines.load("ours", path, embed)
    for n in names:
        engines.workers[n].ask("warm", work.measure, work.n)        # plans, kernels, caches: not counted
    turns = Turns(engines, names, lambda w, r: w.ask(work.measure, work.n, seed=r)).take(rounds)
    share = _share(work, sizes, engines)
    peak = PEAKS[work.arithmetic]
    note = share and " / ".join(f"{share(turns.median(n)):.0%}" for n in names) + (
        " of the read bandwidth" if work.measure == "tg" else f" of the {peak} peak")
    limited = share if work.measure == "tg" else None
    yield from rows(engines, work, turns, lambda s: work.n / s, "tok/s", limited, note or "")
    if work.share and share and work.measure == "tg":
        yield _bandwidth_row(engines, work, sizes["read_per_token"], rounds,
                             lambda r: ("tg_and_reads", work.n, engines.n_threads, r))
    elif work.share and share:
        rate = sizes["flops_per_token"] * work.n / 1e9
        speed = Spread([rate / s for s in turns.seconds["ours"]], "GOP/s")
        reached = share(turns.median("ours"))
        yield Row(f"{work.text}, share of the {peak} peak", f"{work.share:.0%}", speed,
                  f"{speed.median / reached:,.0f} GOP/s", reached, reached >= work.share, turns.disturbed,
                  key=f"{work.key}-peak", n_threads=engines.n_threads, against="limit")


def _bandwidth_row(engines, work, nbytes, rounds, ask):
    """What our work reads a second, next to what memory gives in between.  nbytes: of one piece; ask: round -> what our
    worker is asked for, [(seconds of a piece, bytes a second)]"""
    ours, read, limit = engines.workers["ours"], [], []
    with Others(engines.workers.values()) as others:
        for r in range(rounds):
            turns = ours.ask(*ask(r))
            read.append(statistics.median(nbytes / seconds for seconds, _ in turns))
            limit.append(statistics.median(gives for _, gives in turns))
    reached = statistics.median(a / b for a, b in zip(read, limit, strict=True))
    read, limit = (Spread([x / 1e9 for x in values], "GB/s") for values in (read, limit))
    return Row(f"{work.text}, share of the measured read bandwidth", f"{work.share:.0%}", read, limit, reached,
               reached >= work.share, disturbance(others.cores), key=f"{work.key}-bandwidth",
               n_threads=engines.n_threads, against="limit")


def _loads(engines, name, path, embed):
    """A peer that cannot run models is missing for them."""
    try:
        engines.load(name, path, embed)
    except Missing as e:
        engines.missing.setdefault(f"{name}, models", str(e))
        return False
    return True


def _share(work, sizes, engines):
    """seconds -> how near the machine's limit (bytes for decoding, operations for prompts); None: far from any."""
    if sizes["read_per_token"] < engines.limits["bandwidth"] / 1000:
        return None                                 # fits the caches
    if work.measure == "tg":
        least = sizes["read_per_token"] * work.n / engines.limits["bandwidth"]
    else:
        least = sizes["flops_per_token"] * work.n / (engines.limits[work.arithmetic] * engines.n_threads)
    return lambda s: least / s


# ---------------------------------------------------------------- graphs
def _compare_graphs(engines, work, rounds, seconds):
    engines.forget()
    with tempfile.TemporaryDirectory(prefix="ggjit-peers-") as folder:
        path, result = (pathlib.Path(folder) / name for name in ("graph", "result"))
        about = engines.workers["ours"].ask("write_graph", work.key, path, n_threads=engines.n_threads)
        names = engines.names(work)
        for peer in names[1:]:
            _hand_over(engines, peer, work, path, result)
    turns = Turns(engines, names, lambda w, r: w.ask("graph", seconds) / about["n"]).take(rounds)
    share = (lambda s: about["nbytes"] / s / engines.limits["bandwidth"]) if work.cold else None
    least = about["nbytes"] / engines.limits["bandwidth"], about["flops"] / engines.limits["f32"] / engines.n_threads
    if least[1] > least[0]:
        note = " / ".join(f"{about['flops'] / turns.median(n) / 1e9:,.0f}" for n in names) + " GFLOP/s"
    else:
        note = " / ".join(f"{share(turns.median(n)):.0%}" for n in names) + " of the read bandwidth" if share else ""
    yield from rows(engines, work, turns, lambda s: 1e6 * s, "us", share, note)
    if work.share:
        runs = max(3, int(seconds / (about["n"] * turns.median("ours"))))
        yield _bandwidth_row(engines, work, about["nbytes"] * about["n"], rounds,
                             lambda r: ("graph_and_reads", runs, engines.n_threads))


def _hand_over(engines, peer, work, path, result):
    """Load our graph into a peer; it must compute what we compute."""
    worker = engines.workers[peer]
    worker.ask("load_graph", path, n_threads=engines.n_threads)
    worker.ask("run_graph")
    worker.ask("graph_result", result)
    nmse = engines.workers["ours"].ask("difference", result)
    allowed = work.peer_nmse.get(peer, work.max_nmse)
    if not nmse <= allowed:
        raise EngineError(f"{work.key}: {peer}'s result differs from ours by NMSE {nmse:.2g}, allowed is "
                          f"{allowed:.2g}")
