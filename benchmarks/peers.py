"""ggjit next to its peers: every figure of docs/measured.md, one table, one plot.

    python -m benchmarks.peers                      # everything, more than an hour
    python -m benchmarks.peers --quick              # fewer shapes and rounds, twenty minutes
    python -m benchmarks.peers --only q4_0,flash    # lines whose key contains one of these (--list shows the keys);
                                                    # with a star it is a pattern for whole keys: 'mul_mat-*-n1'
    python -m benchmarks.peers --isa avx2           # our AVX2 kernels
    python -m benchmarks.peers --table              # what a processor is judged by (TABLE), into peers-PROCESSOR.md
    python -m benchmarks.peers --table --prepare    # before it: models are written and kernels compiled, nothing counts

Engines run in processes of their own and take turns on the same bytes; the others sleep meanwhile, results of graphs
are compared, and the machine is checked before, during and after.  Medians over the rounds, minimum and maximum in
brackets.  ratio: our speed over the peer's.  Our side is what a user gets without options: weights repacked where that
is the default, choices that were measured here before (`ggjit warm-up`).  Ctrl-C ends the run; what was measured is
written where --out says, and nowhere else.  A peer that is not installed is named as missing:

    pip install xllamacpp onnx onnxruntime openvino torch      # any of them may be absent
    GGML_LIB_DIR=FOLDER[:FOLDER]        native builds of ggml and llama.cpp
    IK_LIB_DIR=FOLDER                   a build of ik_llama.cpp
"""
import argparse
import datetime
import fnmatch
import pathlib
import sys
import time

from benchmarks import machine
from benchmarks.catalogue import SECTIONS
from benchmarks.compare import Engines, compare
from benchmarks.costs import COSTS
from benchmarks.engines.engine import CLOCKS
from benchmarks.report import LEAD, LEGEND, Part, Row, conditions, markdown, tables
from benchmarks.worker import ROOT, EngineError, Missing
from ggjit.ops.native import isa

RESULTS = ROOT / "benchmarks" / "results"
STOPPED = 130               # exit status after Ctrl-C
COLUMNS = ",".join(f"mul_mat-*-n{n}" for n in (1, 2, 4, 8, 16))
MOVES = "op-cpy-,op-cont-,op-get_rows-,op-set_rows-,op-silu-,op-swiglu_split-,op-reglu_split-"
TABLE = {                   # --table is these runs, one after the other; the first ones matter most
    "decoding": "--quick --only *-tg --rounds 2 --peers wheel,ik",
    "matrix products of 1 to 16 tokens": f"--quick --only {COLUMNS} --peers wheel,native,onnxruntime,openvino",
    "MiniLM": "--quick --only minilm- --peers onnxruntime",
    "matrix products of 512 tokens": "--quick --only mul_mat-f32-n512 --peers numpy,torch",
    "copies, get_rows, set_rows, SwiGLU": f"--quick --only {MOVES} --peers native",
    "prompts of 512 tokens": "--quick --only tinyllama-*-pp512 --rounds 1 --peers none",
    "one token more": "--quick --only columns- --threads 1",
    "AVX2": "--quick --only smollm-q4_0-tg,smollm-q8_0-tg,minilm-64,mul_mat-*-n1,mul_mat-*-n8,op-silu-,"
            "op-swiglu_split- --rounds 2 --threads 1 --isa avx2 --peers wheel",
}


class Run:
    """Rows by section, the engines, the Parts with the machine's load, and remarks; all are said as they come."""

    def __init__(self, args, say=print, end=None, name="all"):
        """end: of time.monotonic(), after which no further line is begun; name: of the Part that this run is."""
        self.args, self.say, self.rows, self.lines, self.stopped = args, say, {}, [], False
        self.end, self.engines = end, []
        self.rounds, self.seconds = (3, 0.04) if args.quick else (5, 0.15)
        self.rounds = args.rounds or self.rounds
        self.parts = [Part(name, self.rounds)]

    def tell(self, line):
        if line not in self.lines:
            self.lines.append(line)
            self.say(line)

    def introduce(self, name, about):
        if (name, about) not in self.engines:
            self.engines.append((name, about))
            self.say(f"{name}: {about}")

    def _others(self, when):
        busy = machine.others_busy()
        self.say(machine.idle_line(when, busy))
        return busy

    def wanted(self, section):
        return [w for w in SECTIONS[section] if self._chosen(w.key) and (w.quick or not self.args.quick)]

    def _chosen(self, key):
        return not self.args.only or any(fnmatch.fnmatch(key, part) if "*" in part else part in key
                                         for part in self.args.only)

    def measure(self):
        """All rows; Ctrl-C leaves those measured so far, and `stopped` is true."""
        try:
            self._measure()
        except KeyboardInterrupt:
            self.stopped = True

    def _measure(self):
        here, = self.parts
        here.before = self._others("before")
        for n_threads in self.args.threads:
            with Engines(n_threads, self.args.clock, self.args.isa, self.args.peers) as engines:
                self._compare(engines)
        costs = [k for k in COSTS if self._chosen(k) and not self.args.isa]
        if costs:
            with Engines(1, self.args.clock, only=()) as engines:
                for key in costs:
                    self._add("costs", key, lambda k=key: [COSTS[k](engines.workers["ours"], self.rounds)], 1)
        here.after = self._others("after")

    def measure_table(self):
        """The runs of TABLE, all rows in this one; without those of an instruction set of another architecture."""
        self.parts = []
        for name, line in TABLE.items():
            given = arguments(line.split())
            if given.isa and given.isa not in isa.NAMES:
                continue
            part = Run(given, self.say, self.end, name)
            if self.args.prepare:
                part.args.peers, part.rounds, part.seconds = ["none"], 1, 0.0
            part.measure()
            for section, rows in part.rows.items():
                self.rows.setdefault(section, []).extend(rows)
            self.parts += part.parts
            self.engines += [engine for engine in part.engines if engine not in self.engines]
            self.lines += [line for line in part.lines if line not in self.lines]
            self.stopped = self.stopped or part.stopped

    def late(self, what):
        """Has the time run out?  Says what is left out."""
        if self.end is None or time.monotonic() < self.end:
            return False
        self.tell(f"the time ran out before: {what}")
        self.stopped = True
        return True

    def _compare(self, engines):
        n = engines.n_threads
        for name, about in engines.introductions():
            self.introduce(name, about)
        bandwidth, peak = engines.limits["bandwidth"] / 1e9, engines.limits["f32"] / 1e9
        self.parts[0].limits[n] = bandwidth, peak
        self.say(f"{n} thread{'s' * (n > 1)}: memory is read at {bandwidth:.1f} GB/s, float32 peak of a core "
                 f"{peak:.0f} GFLOP/s")
        for section in SECTIONS:
            for work in self.wanted(section):
                if not self.late(f"{work.text}, {n} thread{'s' * (n > 1)}"):
                    self._add(section, work.text, lambda w=work: self._rows(engines, w), n)
            engines.forget()
        for name, why in engines.missing.items():
            self.introduce(name, f"missing: {why}")

    def _rows(self, engines, work):
        """Rows of a work; a peer whose process ends meanwhile is named, and missing from then on."""
        try:
            return list(compare(engines, work, self.rounds, self.seconds))
        except EngineError:
            dead = engines.bury()
            if not dead:
                raise
        return [Row(work.text, "-", "-", engines.missing[name], key=work.key, n_threads=engines.n_threads, against=name)
                for name in dead] + self._rows(engines, work)

    def _add(self, section, text, make, n_threads):
        """The rows, or one that says why there are none."""
        try:
            made = make()
        except Missing as e:
            made = [Row(text, "-", "not measured", note=str(e), n_threads=n_threads)]
        except EngineError as e:
            made = [Row(text, "-", "failed", passed=False, note=" ".join(str(e).split()), n_threads=n_threads)]
        for row in made if self.args.isa else ():
            row.work = f"{self.args.isa.upper()}: {row.work}"
        self.rows.setdefault(section, []).extend(made)
        self.say("\n".join(markdown(made).splitlines()[2:]))

    @property
    def missed(self):
        return [r for rows in self.rows.values() for r in rows if r.passed is False]

    def write(self, path):
        """Table, machine and misses to `path`.md, the plot to `path`.png."""
        from benchmarks.plots import plot_ratios
        about = [f"{datetime.date.today()}, {machine.cpu_model()}",
                 ", ".join(f"{k} {v or 'not installed'}" for k, v in machine.versions().items()),
                 f"all times are {'wall' if self.args.clock == 'wall' else 'processor'} time", *self.lines]
        rows = [r for section in self.rows.values() for r in section]
        judged = [r for r in rows if r.passed is not None]
        command = "python -m benchmarks.peers " + " ".join(self.args.given)
        reached = f"{len(judged) - len(self.missed)} of {len(judged)} targets reached"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".md").write_text(
            f"# ggjit next to its peers\n\n`{command.strip()}`: {reached}{', stopped before the end' * self.stopped}."
            f" {LEAD}\n\n{LEGEND}\n\n{tables(rows)}\n\n{conditions(about, self.engines, self.parts)}\n", "utf-8")
        drawn = plot_ratios(self.rows, path.with_suffix(".png"))
        self.say(f"\nwritten to {path}.md{' and .png' * drawn}")


def arguments(argv):
    def parts(text):
        return [p for p in text.split(",") if p]

    def counts(text):
        return [int(p) for p in parts(text)]
    p = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.peers", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="fewer shapes, shorter turns, three rounds")
    p.add_argument("--rounds", type=int, help="turns of every engine (5; --quick: 3)")
    p.add_argument("--threads", type=counts, default=[1, 2], help="thread counts (1,2)")
    p.add_argument("--isa", choices=("avx2", "generic"), help="make our kernels use this instruction set")
    p.add_argument("--peers", type=parts, help="only these peers, e.g. wheel,numpy")
    p.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, where the machine is not idle")
    p.add_argument("--only", type=parts, default=[], help="parts of keys, or patterns with *, separated by commas")
    p.add_argument("--list", action="store_true", help="print the keys")
    p.add_argument("--table", action="store_true", help="the runs a processor is judged by")
    p.add_argument("--prepare", action="store_true", help="with --table: write models and compile kernels beforehand")
    p.add_argument("--minutes", type=float, help="begin no line after so many")
    p.add_argument("--out", type=pathlib.Path, help="where table and plot go, without suffix (default: "
                   "benchmarks/results/peers, peers-ISA with --isa, peers-PROCESSOR with --table; with --only nothing "
                   "is written)")
    args = p.parse_args(argv)
    args.given = sys.argv[1:] if argv is None else argv
    return args


def main(argv=None):
    args = arguments(argv)
    run = Run(args, end=args.minutes and time.monotonic() + 60 * args.minutes)
    if args.list:
        keys = [w.key for section in SECTIONS for w in run.wanted(section)]
        print("\n".join([*keys, *(k for k in COSTS if run._chosen(k))]))
        return 0
    run.measure_table() if args.table else run.measure()
    for row in () if args.prepare else run.missed:
        print("missed:", markdown([row]).splitlines()[-1])
    name = f"peers-{machine.slug()}" if args.table else f"peers-{args.isa}" if args.isa else "peers"
    out = args.out or (None if args.only or run.stopped and not args.minutes else RESULTS / name)
    if out and run.rows and not args.prepare:
        run.write(out)
    return STOPPED if run.stopped else int(bool(run.missed))


if __name__ == "__main__":
    sys.exit(main())
