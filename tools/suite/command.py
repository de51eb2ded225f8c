"""`ggjit ops`: the modes of ggml's test-backend-ops over the case suite.

    test       run the cases; a line per failure, a row per class, exit status 1 if one fails
    perf       time per run, speed, and the real ggml's beside it
    support    which ops the device computes, and how many of their cases; which have a gradient; for a CUDA device
               also what ggml's CUDA backend says yes to (ggml_cuda.py)
    grad       gradients of the cases against differences in float64; exit status 1 if one fails
"""
import collections
import functools
import re
import sys
import time

import numpy as np

from ggjit.api.registry import init_backend, registry
from ggjit.core.backend import TYPE_NULL
from ggjit.cpu.device import CPUBackend
from ggjit.display.progress import bar, compiling
from ggjit.ops.core.errors import GgjitError, MissingExtra, ParamError
from ggjit.ops.core.machine import available_cores
from ggjit.ops.core.record import GLU, OP, UNARY
from ggjit.ops.core.spec import all_specs
from ggjit.ops.native.isa import ISA
from ggjit.tools.suite import ggml_cuda, oracle
from ggjit.tools.suite.cases.case import all_cases
from ggjit.tools.suite.grad import SKIPPED, GradRunner
from ggjit.tools.suite.jobs import spread
from ggjit.tools.suite.perf import measure
from ggjit.tools.suite.report import Journal, Report
from ggjit.tools.suite.runner import FAIL, NOT_SUPPORTED, Built, Runner, threads_of

CASES_A_PROCESS = 64                                    # fewer are not worth starting another one


def select(ops=None, params=None, sample=None, seed=0):
    """Cases whose op or family is in `ops` ("ADD,mul_mat", or a whole "OP(params)"), whose parameters match a pattern.

    sample: at most so many, drawn by `seed`, in the list's order.  Errors: ParamError for a name nothing has.
    """
    cases = all_cases()
    if ops:
        whole = [c for c in cases if str(c) == ops]
        names = {n.strip().lower() for n in ops.split(",")}
        known = {n for c in cases for n in (c.op.lower(), c.family)}
        if not whole and names - known:
            raise ParamError(f"no case has the op {', '.join(sorted(names - known))}; ops: {', '.join(sorted(known))}")
        cases = whole or [c for c in cases if c.op.lower() in names or c.family in names]
    if params:
        try:
            pattern = re.compile(params)
        except re.error as e:
            raise ParamError(f"-p {params!r} is not a regular expression: {e}") from None
        cases = [c for c in cases if pattern.search(c.params)]
    if sample is not None and sample < len(cases):
        keep = np.random.default_rng(seed).choice(len(cases), sample, replace=False)
        cases = [cases[i] for i in sorted(keep)]
    return list(cases)


def backend_of(name, n_threads):
    """The backend of device `name`, of any registered device; ParamError for one that computes nothing."""
    name = name or "CPU"
    device = registry.device(name.partition(":")[0])
    if device.type == TYPE_NULL:
        raise ParamError(f"-b {name}: {device.name} holds no data and computes nothing; name another device")
    backend = init_backend(name)
    if hasattr(backend, "n_threads"):
        backend.n_threads = n_threads
    return backend


def peer_of(args):
    """(oracle or None, what to say about it)"""
    try:
        peer = oracle.connect()
        return peer, f"compared with the ggml of {peer.wheel} and with float64"
    except MissingExtra as e:
        return None, str(e)


def run(args):
    """The command; returns its JSON object.  `failed`: the exit status is 1."""
    cases = select(args.op, args.params, args.sample, args.seed)
    backend = backend_of(args.backend, args.threads or 1)
    peer, words = peer_of(args)
    print(f"{len(cases):,} cases, {words}", file=sys.stderr)
    with compiling():
        return {"test": test, "perf": perf, "support": support, "grad": grad}[args.mode](args, cases, backend, peer)


# ---------------------------------------------------------------- test
def test(args, cases, backend, peer):
    """Runs the cases that the journal does not hold; the report goes to stderr where stdout is for JSON."""
    report, t0 = Report(cases, sys.stderr if args.json else sys.stdout), time.perf_counter()
    journal = Journal(args.resume, settings(args, peer)) if args.resume else None
    known = {c.index: journal.passed(c) for c in cases} if journal else {}
    waiting = [c for c in cases if not known.get(c.index)]
    n_jobs = args.jobs or max(1, min(available_cores(), -(-len(waiting) // CASES_A_PROCESS)))
    if not isinstance(backend, CPUBackend):             # registered in this process, or a GPU, which is not shared
        n_jobs, outcomes = 1, map(Runner(backend, args.seed, peer).run, waiting)
    else:
        outcomes = spread(waiting, backend, args.seed, n_jobs)
    try:
        for outcome in filter(None, known.values()):
            report.add(outcome)
        with bar("cases", len(waiting)) as step:
            for outcome in outcomes:
                report.add(outcome)
                if journal:
                    journal.add(outcome)
                step(description=outcome.case.family)
    finally:
        report.close()
        if journal:
            journal.close()
    if not args.json:
        print(f"{time.perf_counter() - t0:.0f} s in {n_jobs} process{'es' * (n_jobs > 1)}")
    summary = report.summary()
    return {"cases": [o.json for o in sorted(report.outcomes, key=lambda o: o.case.index)], **summary,
            "failed": summary["fail"] + summary["gap"] > 0}


def settings(args, peer):
    """What an outcome depends on besides the case and the sources."""
    device = "" if args.backend in (None, "CPU") else f"{args.backend}, "
    return f"{device}seed {args.seed}, {args.threads or 1} threads, {ISA}, {peer.wheel if peer else 'float64 alone'}"


# ---------------------------------------------------------------- perf, support
def perf(args, cases, backend, peer):
    if not args.op and args.sample is None:
        cases = one_of_each(cases)
    rows = []
    if not args.json:
        print(f"{'case':<96}{'us/run':>11}{'speed':>11}{'ggml us':>11}{'ggml':>9}{'ratio':>7}")
    with bar("cases", len(cases)) as step:
        for case in cases:
            speed = measure(case, backend, args.seed, peer)
            rows.append(speed)
            if not args.json and not speed.error:
                print(line(speed), flush=True)
            step()
    return {"cases": [s.json for s in rows], "threads": threads_of(backend)}


def line(s):
    name, theirs = str(s.case), ""
    if s.peer_seconds:
        theirs = f"{s.peer_seconds * 1e6:>11.1f}{s.rate(s.peer_seconds):>9.2f}{s.peer_seconds / s.seconds:>7.2f}"
    name = name if len(name) < 95 else f"{name[:91]}..."
    return f"{name:<96}{s.seconds * 1e6:>11.1f}{s.rate(s.seconds):>6.2f} {s.unit[:4]}{theirs}"


def one_of_each(cases):
    """The middle case of each op: a first overview."""
    by_op = collections.defaultdict(list)
    for c in cases:
        by_op[c.op].append(c)
    return [same[len(same) // 2] for same in by_op.values()]


def support(args, cases, backend, peer):
    """Builds every case and asks the device; nothing is computed.  ok: supported."""
    runner, rows = Runner(backend, args.seed, peer), []
    with bar("cases", len(cases)) as step:
        for case in cases:
            rows.append(supported(case, runner))
            step()
    if not args.json:
        count, total = collections.Counter(r["op"] for r in rows if r["ok"]), collections.Counter(r["op"] for r in rows)
        theirs, beside = collections.Counter(r["op"] for r in rows if r["ggml_cuda"]), is_cuda(backend)
        ours = f"{'op':<28}{'supported':>10}" + (f"{'ggml CUDA':>11}" if beside else '')
        print(f"{ours}{'cases':>8}  gradient")
        for op in total:
            ggml = f"{theirs[op]:>11}" if beside else ""
            print(f"{op:<28}{count[op]:>10}{ggml}{total[op]:>8}  {'yes' if has_gradient(op) else '-'}")
        print(f"{sum(count.values()):,} of {len(rows):,} cases{by_ggml(rows) if beside else ''}")
    return {"cases": rows}


def is_cuda(backend):
    return backend.device.name.startswith("CUDA")


def by_ggml(rows):
    """What ggml's CUDA backend serves, and how much of that is missing here."""
    theirs = [r for r in rows if r["ggml_cuda"]]
    missing = collections.Counter(r["op"] for r in theirs if not r["ok"])
    words = ", ".join(f"{op} {n:,}" for op, n in missing.most_common()) or "none"
    return f"; ggml's CUDA backend says yes to {len(theirs):,}, of which these are missing: {words}"


def has_gradient(name):
    """Does the op of that name, or the function of UNARY or GLU, declare a gradient?"""
    family = OP.GLU if name in GLU.__members__ else OP.UNARY if name in UNARY.__members__ else None
    spec = all_specs().get(OP.__members__.get(name, family))
    return spec is not None and spec.gradient is not None


# ---------------------------------------------------------------- grad
def grad(args, cases, backend, peer):
    """Gradients of the cases: rules, the device's values, ggml's where it has the gradient (grad.py)."""
    runner, outcomes = GradRunner(backend, args.seed, peer), []
    say = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    with bar("cases", len(cases)) as step:
        for case in cases:
            outcomes.append(runner.run(case))
            if outcomes[-1].status == FAIL:
                say(f"{FAIL}  {case}: {outcomes[-1].error}")
            step(description=case.family)
    by_op = collections.defaultdict(collections.Counter)
    for o in outcomes:
        by_op[o.case.op].update([o.status, *o.checked])
    say("".join([f"{'op':<28}", *(f"{c:>15}" for c in GRAD_COLUMNS)]))
    for op, n in [*by_op.items(), (f"{len(by_op)} ops", sum(by_op.values(), collections.Counter()))]:
        say("".join([f"{op:<28}", *(f"{n[c]:>15,}" for c in GRAD_COLUMNS)]))
    return {"cases": [o.json for o in outcomes], "failed": any(o.status == FAIL for o in outcomes)}


GRAD_COLUMNS = ("ok", "rules", "kernels", "ggml", NOT_SUPPORTED, SKIPPED, FAIL)


def supported(case, runner):
    built, error = None, ""
    try:
        built = Built(case, runner.backend, runner.seed, runner.peer)
        built.require_support()
    except GgjitError as e:
        error = str(e)
    peer = "" if case.ggml_cpu else case.op
    peer = peer if built is None else runner.peer_refuses(built)
    cuda = built is not None and is_cuda(runner.backend) and all(map(ggml_cuda.serves, built.nodes))
    if built is not None:
        built.close()
    return {"op": case.op, "params": case.params, "ok": not error, "error": error, "family": case.family,
            "index": case.index, "peer": peer, "ggml_cuda": cuda}
