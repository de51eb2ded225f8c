"""Rows of measurements, and the Markdown table they make.

    python -m benchmarks.report FILE.md     # the README's lines out of a table
"""
import dataclasses
import pathlib
import statistics
import sys


@dataclasses.dataclass
class Spread:
    """Repeated measurements of one thing: median, min and max of `values`, shown in `unit`."""
    values: list
    unit: str

    @property
    def median(self):
        return statistics.median(self.values)

    def __str__(self):
        lo, mid, hi = (number(f(self.values)) for f in (min, statistics.median, max))
        span = "" if len(self.values) == 1 else f" ({lo} - {hi})"
        return f"{mid} {self.unit}{span}"


@dataclasses.dataclass
class Row:
    """One line.  peer: a Spread, or a text; passed: None where nothing was promised; against: the peer's name."""
    work: str
    target: str
    ours: object
    peer: object = "-"
    ratio: float | None = None
    passed: bool | None = None
    note: str = ""
    key: str = ""
    n_threads: int = 1
    against: str = "-"

    HEAD = ("work", "threads", "against", "target", "ggjit", "peer", "ratio", "verdict", "note")

    def cells(self):
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        verdict = {True: "pass", False: "**MISS**", None: "-"}[self.passed]
        return (self.work, str(self.n_threads), self.against, self.target, str(self.ours), str(self.peer), ratio,
                verdict, self.note)


@dataclasses.dataclass
class Part:
    """One run behind a table: how often each engine took its turn, and what the machine did meanwhile.

    before, after: cores that other processes kept busy; limits: {threads: (GB/s that memory is read at, GFLOP/s of one
    core in float32)}
    """
    name: str
    rounds: int
    before: float | None = None
    after: float | None = None
    limits: dict = dataclasses.field(default_factory=dict)


def number(x):
    """Three or four significant digits, without exponents."""
    digits = 0 if abs(x) >= 1000 else 1 if abs(x) >= 100 else 2 if abs(x) >= 10 else 3
    return f"{x:,.{digits}f}"


def markdown(rows):
    lines = [" | ".join(("", *Row.HEAD, "")).strip(), "|" + "---|" * len(Row.HEAD)]
    lines += ["| " + " | ".join(c.replace("|", "/") for c in row.cells()) + " |" for row in rows]
    return "\n".join(lines)


def tables(rows):
    """One Markdown table for each number of threads, under what was reached against whom."""
    out = []
    for n in sorted({r.n_threads for r in rows}, key=str):
        here = [r for r in rows if r.n_threads == n]
        out += [f"## Whole commands\n\n{markdown(here)}" if n == "-" else
                f"## {n} thread{'s' * (n > 1)}\n\n{summary(here)}\n\n{markdown(here)}"]
    return "\n\n".join(out)


def summary(rows):
    """How many targets are reached against each peer, and the ratios."""
    lines = ["| against | targets reached | least ratio | median | most |", "|---|---|---|---|---|"]
    for peer in dict.fromkeys(r.against for r in rows if r.passed is not None and r.ratio is not None):
        judged = [r for r in rows if r.against == peer and r.passed is not None and r.ratio is not None]
        ratios = [r.ratio for r in judged]
        cells = [f"{f(ratios):.2f}" for f in (min, statistics.median, max)]
        lines.append(f"| {peer} | {sum(r.passed for r in judged)} of {len(judged)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


LEAD = "Each row compares the speed of ggjit with another engine, or with a limit of the machine, on the same work."

LEGEND = """\
## How to read the tables

- **work**: "decode" generates one token at a time, "prompt" reads a prompt. A "shape" is a model with the dimensions of
  the named model and random weights. In `mul_mat` rows, `n` is the number of tokens that are multiplied at once (the
  columns of the activations, ggml's `ne1`).
- **against**: the engine that ggjit is compared with, called the peer. `wheel` is llama.cpp from PyPI (xllamacpp),
  `native` is llama.cpp built for this processor, and `ik` is ik_llama.cpp; the section "Engines" has their versions.
  `limit` is the read bandwidth or the arithmetic peak of this machine, measured beside the row. A row against `n - 1`
  compares ggjit's throughput at `n` tokens with its own throughput at `n - 1` tokens.
- **ratio**: ggjit's speed divided by the peer's. Above 1, ggjit is faster.
- **target** and **verdict**: the smallest ratio that passes, and whether the measured ratio passes. A target is reached
  if the verdict is "pass".
- **ggjit** and **peer**: medians of the rounds, with the minimum and the maximum in brackets.
- **note**: of several figures separated by slashes, the first is ggjit's and the next ones are the peers', in the order
  in which the rows of this work name them. `DISTURBED` means that other processes used the processor during the row."""

MACHINE = "The rows above were measured on this machine, with these versions:"

RUNS = """\
The benchmark measured the rows above in several runs, which the next table lists. A run consists of rounds; in each
round every engine is measured once. "Other processes" is the number of cores that were busy with other work, before and
after the run. The last columns describe the machine during the run: the speed at which it reads memory, and the most
float32 operations that a core computes in a second. Rows whose speed is near the read bandwidth have up to 7 rounds."""


def conditions(about, engines, parts):
    """The end of a page: engines [(name, what it is)], `about` as a list, and what the machine did in each Part."""
    threads = sorted({n for part in parts for n in part.limits})
    head = ["run", "rounds", "other processes before, cores", "after, cores",
            *(f"memory is read at, GB/s, {n} thread{'s' * (n > 1)}" for n in threads),
            *(f"float32 peak of a core, GFLOP/s, {n} thread{'s' * (n > 1)}" for n in threads)]

    def cells(part):
        load = ["-" if x is None else f"{x:.2f}" for x in (part.before, part.after)]
        limits = [part.limits.get(n) for n in threads]
        return [part.name, str(part.rounds), *load, *("-" if x is None else f"{x[0]:.1f}" for x in limits),
                *("-" if x is None else f"{x[1]:.0f}" for x in limits)]

    def table(head, rows):
        return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])

    machine = "\n".join(f"- {line}" for line in about)
    return (f"## Engines\n\n{table(['engine', 'what it is'], engines)}\n\n## Machine\n\n{MACHINE}\n\n{machine}\n\n"
            f"{RUNS}\n\n{table(head, map(cells, parts))}")


# ---------------------------------------------------------------- the README's table
README = (                              # (work, against)
    *((f"TinyLlama-1.1B shape {type}, decode", peer) for type in ("Q4_0", "Q8_0", "Q4_K_M", "F16")
      for peer in ("wheel", "ik")),
    *((f"mul_mat Q4_0 [2048 x 2048], n = {n}", peer) for n in (1, 8) for peer in ("native", "onnxruntime", "openvino")),
    ("MiniLM F32, length 64", "onnxruntime"), *(("mul_mat F32 [2048 x 2048], n = 512", p) for p in ("numpy", "torch")),
    ("TinyLlama-1.1B shape Q4_0, prompt of 512, share of the integer peak", "limit"))


def readme(text):
    """One line for each of README that the table has, of one thread, and one for each target missed by a tenth."""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.count("|") == 10]
    rows = [r for r in rows if r[1] == "1"]
    chosen = [r for key in README for r in rows if (r[0], r[2]) == key]
    chosen += [r for r in rows if "MISS" in r[7] and r[6] != "-" and r[3][:-2].replace(".", "").isdigit()
               and float(r[6]) < 0.9 * float(r[3][:-2]) and r not in chosen]
    lines = ["| work, next to | ggjit | peer | ratio |", "|---|---|---|---|"]
    for work, _, against, _, *figures, ratio, _, _ in chosen:
        ours, peer = (figure.split(" (")[0] for figure in figures)
        lines.append(f"| {work}, {against} | {ours} | {peer} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(readme(pathlib.Path(sys.argv[1]).read_text("utf-8")))
