"""ggml's case suite: a seeded sample of it, and the suite's own machinery.

The whole suite is `ggjit ops test` (see docs/measured.md).
"""
import dataclasses
import io
import json
import os
import signal
import sys
import time
import types

import numpy as np
import pytest
from helpers import devices, sample
from helpers.requirements import need
from helpers.suite_list import N_CASES, OWN_OPS

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.types import F32
from ggjit.tools.suite import command, compare, ggml, oracle
from ggjit.tools.suite.cases.case import SuiteCase, all_cases
from ggjit.tools.suite.cases.inputs import hadamard, kq_mask, shuffled, subsets, triangle, uniform
from ggjit.tools.suite.jobs import READY, spread
from ggjit.tools.suite.report import COLUMNS, Journal, Report, verdict
from ggjit.tools.suite.runner import FAIL, NOT_SUPPORTED, OK, REFUSED, Outcome, Runner
from ggjit.tools.suite.sample import balanced

# compiling costs most: one case of each op needs 130 to 145 kernels; further cases share those there are
SAMPLE, KERNELS, JOBS = 1000, 140, 2
SEED = 20                                   # of the values; the cases are drawn by the seed of the run


def peer():
    try:
        return oracle.connect()
    except gg.MissingExtra as e:
        pytest.skip(str(e))


@pytest.fixture
def runner():
    return Runner(gg.init_backend("CPU:n_threads=1"), SEED, peer())


def test_own_cases_give_ggmls_results(runner):
    """Of ops that ggml's program does not test."""
    outcomes = [runner.run(c) for c in all_cases()[N_CASES:]]
    assert not [f"{o.case}: {o.error}" for o in outcomes if o.status != OK]
    assert ["ggml" in o.checked for o in outcomes] == [not o.case.wrong and not o.peer for o in outcomes]
    # o.peer: what an older ggml lacks or refuses
    lacking = [f"{o.case}: {o.peer}" for o in outcomes if o.peer and o.case.op not in OWN_OPS]
    assert runner.peer.wheel != "xllamacpp" or not lacking


# ---------------------------------------------------------------- the sample
@pytest.mark.parametrize("wheel", oracle.WHEELS)
def test_sample(wheel):
    """Cases of every class and op give ggml's results: those of each ggml that is installed."""
    need(wheel, "it brings the real ggml")
    backend = gg.init_backend("CPU:n_threads=1")
    cases, kernels = balanced(SAMPLE, sample.SEED, backend, KERNELS)
    assert len(cases) == SAMPLE and len(kernels) < 1.2 * KERNELS
    assert {(c.family, c.op) for c in cases} == {(c.family, c.op) for c in all_cases()}
    report = Report(cases, sys.stdout)
    for outcome in spread(cases, backend, SEED, JOBS, wheels=(wheel,)):
        report.add(outcome)
    report.close()
    outcomes = report.outcomes
    wrong = [f"{o.case}: {o.error}" for o in outcomes if o.status != OK]
    assert not wrong, "\n".join(wrong)
    assert sum("ggml" in o.checked for o in outcomes) > 0.7 * SAMPLE


def test_every_case_of_ggmls_cpu_backend_is_supported(runner):
    """Built, not computed: a tenth of the list.  What we refuse ggml refuses, too."""
    for case in all_cases()[sample.SEED % 10::10]:
        row = command.supported(case, runner)
        assert row["ok"] or row["peer"], (str(case), row["error"])


def unlucky(pipe, backend, n_threads, seed, wheels):
    """A worker that dies of case 3 and hangs in case 5."""
    pipe.send(READY)
    while True:
        i = pipe.recv()
        if i == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60 if i == 5 else 0)
        pipe.send(Outcome(None, OK))


def test_a_case_that_kills_its_process_or_hangs_fails_alone(runner, monkeypatch):
    monkeypatch.setattr("ggjit.tools.suite.jobs.PATIENCE", 3.0)
    outcomes = {o.case.index: o for o in spread(all_cases()[:8], runner.backend, SEED, 1, unlucky)}
    assert sorted(outcomes) == list(range(8))
    assert outcomes[3].status == FAIL and "SIGSEGV" in outcomes[3].error
    assert outcomes[5].status == FAIL and "no answer within 3 s" in outcomes[5].error
    assert all(o.status == OK for i, o in outcomes.items() if i not in (3, 5))


def one_of_each_verdict():
    case = all_cases()[0]
    return [Outcome(case, OK, checked=("float64", "ggml")), Outcome(case, OK, checked=("float64",)), Outcome(case, OK),
            Outcome(case, REFUSED, peer="ADD"), Outcome(case, NOT_SUPPORTED), Outcome(case, FAIL, "wrong")]


def test_the_table_counts_each_case_once():
    out, outcomes = io.StringIO(), one_of_each_verdict()
    report = Report([o.case for o in outcomes], out)
    for o in outcomes:
        report.add(o)
    report.close()
    assert [verdict(o) for o in outcomes] == list(COLUMNS)
    _, lacking, wrong, row, total = out.getvalue().splitlines()
    assert lacking.startswith("lacking  ") and wrong.startswith("FAIL  ") and wrong.endswith(": wrong")
    assert row.split()[:8] == [outcomes[0].case.family, "6", *"111111"]
    assert total.split()[:9] == ["1", "classes", "6", *"111111"]
    summary = report.summary()
    assert summary["gap"] == summary["fail"] == 1
    assert summary["classes"] == {outcomes[0].case.family: dict.fromkeys(COLUMNS, 1)}


def test_a_class_is_printed_when_its_last_case_is_done_and_a_stopped_one_at_the_end():
    cases, out = [c for c in all_cases() if c.family in ("acc", "add_id")], io.StringIO()
    report = Report(cases, out)
    for c in cases[:-1]:
        assert cases[0].family in out.getvalue() or report.left[cases[0].family]
        report.add(Outcome(c, OK))
    first, last = cases[0].family, cases[-1].family
    assert first in out.getvalue() and last not in out.getvalue()
    report.close()
    assert f"{last} (stopped)" in out.getvalue()


def test_the_journal_keeps_what_passed(tmp_path):
    path, outcomes = tmp_path / "ops.jsonl", one_of_each_verdict()
    for o in outcomes:
        o.case = all_cases()[outcomes.index(o)]
    journal = Journal(path, "seed 0")
    for o in outcomes:
        journal.add(o)
    journal.close()
    again = Journal(path, "seed 0")
    got = [again.passed(o.case) for o in outcomes]
    again.close()
    assert got[:4] == outcomes[:4] and got[4:] == [None, None]
    assert Journal(path, "seed 1").passed(outcomes[0].case) is None


def test_a_journal_that_was_cut_off_goes_on(tmp_path):
    path, (first, second, *_) = tmp_path / "ops.jsonl", one_of_each_verdict()
    second.case = all_cases()[1]
    journal = Journal(path, "")
    journal.add(first)
    journal.add(second)
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    journal = Journal(path, "")
    assert journal.passed(first.case) == first and journal.passed(second.case) is None
    journal.add(second)
    journal.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("text", ["hello", "[1]\n", "{}\n", '{"op": 1', "ne0,ne1\n1,2\n"])
def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(gg.ParamError, match="name another file"):
        Journal(path, "")
    assert path.read_text() == text


# ---------------------------------------------------------------- the runner
def relu_case(build=None):
    return SuiteCase("unary", "RELU", "made here", build or (lambda m: m.relu(m.new(F32, (40, 6)))), index=0)


def broken(monkeypatch, op, **changes):
    """Replace parts of an op's spec."""
    specs = dict(all_specs())
    specs[op] = dataclasses.replace(specs[op], **changes)
    for where in ("ggjit.graphs.graph_plan", "ggjit.cpu.repacked", "ggjit.tools.suite.runner"):
        monkeypatch.setattr(f"{where}.all_specs", lambda: specs)


def other_op(name):
    """A stand-in for Spec.kernel: the kernel of another unary function."""
    def kernel(t, n_threads):
        twin = getattr(gg, name)(t.src[0])
        return all_specs()[twin.op].kernel(twin, n_threads)
    return kernel


def test_right_is_ok(runner):
    o = runner.run(relu_case())
    assert o.status == OK and o.checked == ("float64", "ggml") and o.err == 0 and o.json["ok"] is True


def test_a_result_that_is_a_view_is_compared_too(runner):
    case = relu_case(lambda m: m.reshape_1d(m.relu(m.new(F32, (40, 6))), 240))
    for whole in (False, True):
        assert runner.run(dataclasses.replace(case, whole=whole)).checked == ("float64", "ggml")
    assert runner.run(relu_case(lambda m: m.reshape_1d(m.new(F32, (40, 6)), 240))).status == OK


def test_a_wrong_reference_or_kernel_is_caught(runner, monkeypatch):
    broken(monkeypatch, OP.SQR, reference=lambda t, a: a * a * 1.001)
    o = runner.run(SuiteCase("sqr", "SQR", "", lambda m: m.sqr(m.new(F32, (64, 3))), index=1))
    assert o.status == FAIL and "against float64" in o.error and o.json["ok"] is False
    monkeypatch.undo()
    broken(monkeypatch, OP.SQR, kernel=other_op("sin"), reference=lambda t, a: np.sin(a))
    o = runner.run(SuiteCase("sqr", "SQR", "", lambda m: m.sqr(m.new(F32, (64, 3))), index=1))
    assert o.status == FAIL and "against ggml" in o.error


def test_sentinels_catch_an_overrun(runner, monkeypatch):
    """A result one row longer than its memory: the gap behind it changes."""
    from ggjit.tools.suite import runner as module

    class Short(module.Arena):
        def __init__(self, backend, tensors):
            super().__init__(backend, tensors)
            self.where = [(t, o) for t, o in self.where]

        def intact(self):
            t, offs = self.where[-1]
            self.buffer.arena[offs + t.nbytes] = 0          # what a kernel would have done
            return super().intact()
    monkeypatch.setattr(module, "Arena", Short)
    o = runner.run(relu_case())
    assert o.status == FAIL and "bytes outside the tensors were written" in o.error


def test_poisoned_outputs_show_what_is_not_written(runner, monkeypatch):
    broken(monkeypatch, OP.SQR, kernel=lambda t, n: None)
    o = runner.run(SuiteCase("sqr", "SQR", "", lambda m: m.sqr(m.new(F32, (64, 3))), index=1))
    assert o.status == NOT_SUPPORTED
    monkeypatch.undo()
    monkeypatch.setattr("ggjit.cpu.cpu_plan.CPUPlan.run_nodes", lambda self, first, last: None)
    o = runner.run(relu_case())
    assert o.status == FAIL and "NaN in our result" in o.error


def test_missing_ops_and_refusals_are_no_passes(runner):
    assert runner.run(relu_case(lambda m: m.no_such_op(m.new(F32, (4,))))).status == NOT_SUPPORTED
    o = runner.run(relu_case(lambda m: m.add(m.new(F32, (4,)), m.new(F32, (3,)))))
    assert o.status == REFUSED and "ShapeError" in o.error and o.json["ok"] is False


def test_the_same_seed_gives_the_same_bytes():
    for init in (uniform(-2, 3), shuffled(), shuffled(modulus=3), subsets(9), triangle(0.1, 1.0), kq_mask):
        a, b = (init(np.random.default_rng(4), (8, 8, 2, 1)) for _ in range(2))
        assert a.tobytes() == b.tobytes() and a.shape == (1, 2, 8, 8)
    h = hadamard(None, (8, 8, 1, 1))[0, 0]
    np.testing.assert_allclose(h @ h.T, np.eye(8), atol=1e-6)


def test_measures():
    a = np.arange(12.0).reshape(3, 4)
    assert compare.nmse(a, a) == 0 and compare.nmse(a * 1.01, a) > 5e-5
    assert compare.difference("nmse", np.array([np.nan]), np.array([1.0]))[0] == np.inf
    assert compare.difference("nmse", np.array([np.inf]), np.array([-np.inf]))[0] == np.inf
    ids, row = np.array([[0, 1]]), np.array([[5.0, 5.0, 1.0]])
    assert compare.same_set(ids[:, ::-1], ids) == 0 < compare.same_set(ids + 1, ids)
    assert compare.picked(ids[:, :1], ids[:, 1:], row) == 0 < compare.picked(ids[:, :1] + 2, ids[:, 1:], row)
    assert compare.picked(ids * 0, ids, row) > 0
    assert compare.in_order(a, a[::-1]) == 0 and compare.largest(np.array([1e-9]), np.array([-2e-9])) == 2e-9


# ---------------------------------------------------------------- the real ggml
def test_the_worker_comes_back():
    p = peer()
    ctx = gg.Context()
    t = gg.relu(ctx.new_tensor(gg.F32, (4,)))
    records, _ = oracle.records_of([t])
    assert p.supports(records) == ""
    p.worker.kill()
    p.worker.wait()
    assert p.run(records, {0: np.float32([-1, 2, -3, 4]).tobytes()}, [1])[1] == np.float32([0, 2, 0, 4]).tobytes()


LACKING = {                                 # case of NEEDS: (op, its sources, result type, params) that are it
    "a column matrix in F16 for an F32 kernel": (
        "IM2COL", [(gg.F32, (3, 3, 1, 1)), (gg.F32, (9, 9, 1, 1))], gg.F16, {}),
    "a transposed convolution of several images": (
        "CONV_TRANSPOSE_2D", [(gg.F16, (3, 3, 1, 1)), (gg.F32, (9, 9, 1, 2))], gg.F32, {}),
    "a depthwise convolution with an F16 kernel": ("CONV_2D_DW", [(gg.F16, (3, 3, 1, 4))], gg.F32, {}),
    "gated_delta_net whose state has one snapshot": ("GATED_DELTA_NET", [(gg.F32, (4, 1, 1, 1))], gg.F32, {}),
    "ssm_scan with snapshots": ("SSM_SCAN", [(gg.F32, (4, 1, 1, 1))], gg.F32, {0: 2}),
    "rows set from F16": ("SET_ROWS", [(gg.F16, (4, 1, 1, 1))], gg.F32, {}),
    "quantised rows joined": ("CONCAT", [(gg.Q4_0, (32, 1, 1, 1))] * 2, gg.Q4_0, {}),
    "a norm of rows with gaps": ("NORM", [(gg.F32, (4, 1, 1, 1), (8, 32, 32, 32))], gg.F32, {}),
    "rope with an offset": ("ROPE", [(gg.F32, (64, 1, 1, 1)), (gg.I32, (1, 1, 1, 1))], gg.F32, {15: 8}),
    "type 42": ("NONE", [], gg.Q2_0, {})}
CALLS = {"a convolution with an F32 kernel through F16": ("conv_2d", [(1, 1, 3, 3), (1, 1, 9, 9)], [1, 1, 0, 0, 1, 1])}


def test_what_a_ggml_lacks_is_refused_before_it_is_asked():
    """Of a library that has nothing; of one that has everything nothing is."""
    assert {*LACKING, *CALLS} == {*ggml.NEEDS, "type 42"}
    nothing, everything = (types.SimpleNamespace(has=lambda needed, all=n > 42: all, said=lambda *_: "0.9", n_types=n)
                           for n in (42, 43))
    for case, (op, sources, type, params) in LACKING.items():
        asked = ggml.Asked(op, type.id, tuple(params.get(i, 0) for i in range(16)),
                           tuple((t.id, *rest) for t, *rest in sources))
        assert ggml.GgmlLibrary.lacks(nothing, asked).startswith(case + " (this is ggml 0.9")
        assert ggml.GgmlLibrary.lacks(everything, asked) == ""
    for case, (name, shapes, params) in CALLS.items():
        asked = ggml.Asked(name, None, params, tuple((0, s[::-1]) for s in shapes))
        assert ggml.GgmlLibrary.lacks(nothing, asked).startswith(case) and not ggml.GgmlLibrary.lacks(everything, asked)


@pytest.mark.parametrize("wheel", oracle.WHEELS)
def test_a_ggml_says_what_it_has(wheel):
    """A type behind its table is refused, or computed: never looked up there; a case with it is checked by float64."""
    need(wheel, "it brings the real ggml")
    worker = oracle.of_wheel(wheel)
    case = SuiteCase("mul_mat", "MUL_MAT", "made here",
                     lambda m: m.mul_mat(m.new(gg.Q2_0, (256, 16)), m.new(F32, (256, 2))), index=0, max_err=5e-4)
    lost = worker.lost
    outcome = Runner(gg.init_backend("CPU:n_threads=1"), SEED, worker).run(case)
    assert outcome.status == OK and worker.lost == lost           # killed after PATIENCE, too
    assert "ggml" in outcome.checked or outcome.peer.startswith("type 42 (this is ggml ")


@pytest.mark.parametrize("hung", ["waits", "computes"])
def test_a_ggml_that_is_hung_is_ended(hung, monkeypatch):
    p, t = peer(), gg.relu(gg.Context().new_tensor(gg.F32, (4,)))
    records, _ = oracle.records_of([t])
    leaves = {0: bytes(16)}
    assert p.supports(records) == ""
    monkeypatch.setattr(oracle, "PATIENCE", 0.3)
    if hung == "waits":
        os.kill(p.worker.pid, signal.SIGSTOP)
    with pytest.raises(oracle.WorkerDied, match="exit status -9"):
        p.seconds(records, leaves, [1], at_least=300)
    monkeypatch.undo()
    assert p.run(records, leaves, [1])[1] == bytes(16)


def test_without_a_wheel_there_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(oracle, "libraries", lambda wheel: [])
    with pytest.raises(gg.MissingExtra, match="pip install"):
        oracle.connect()
    alone = Runner(gg.init_backend("CPU:n_threads=1"), SEED, None).run(relu_case())
    assert alone.status == OK and alone.checked == ("float64",)


# ---------------------------------------------------------------- the command
def test_command(capsys, tmp_path):
    from ggjit.tools.command.main import main
    assert main(["ops", "-o", "RELU", "-p", "type=f32", "--json", "test"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["ok"] == len(got["cases"]) == 4 and got["fail"] == 0
    assert {"op", "params", "ok", "error"} <= set(got["cases"][0]) and all(c["ok"] for c in got["cases"])
    assert main(["ops", "-o", "RELU", "--sample", "1", "--json", "perf"]) == 0
    speed = json.loads(capsys.readouterr().out)["cases"][0]
    assert speed["seconds"] > 0 and speed["rate"] > 0 and speed["unit"] == "GB/s"
    assert main(["ops", "-o", "RELU", "--json", "support"]) == 0
    assert all(c["ok"] for c in json.loads(capsys.readouterr().out)["cases"])
    resume = ["--resume", str(tmp_path / "ops.jsonl"), "-j", "1"]
    assert main(["ops", "-o", "RELU", "-p", "type=f16", *resume, "test"]) == 0
    first = capsys.readouterr().out
    assert main(["ops", "-o", "RELU", *resume, "test"]) == 0
    assert len((tmp_path / "ops.jsonl").read_text().splitlines()) == 8
    assert "1 classes" in first and "1 classes" in capsys.readouterr().out
    assert main(["ops", "-o", "nonsense", "test"]) == 2 and "no case has the op nonsense" in capsys.readouterr().err
    assert main(["ops", "-b", "NULL", "test"]) == 2


# ---------------------------------------------------------------- other devices
class Wrong(devices.FakeBackend):
    """Clears the first bytes of every result, or those behind it."""
    behind = False

    def graph_compute(self, graph):
        super().graph_compute(graph)
        for t in graph.nodes:
            t.buffer._arena[t.offs + (t.nbytes if self.behind else 0):][:4] = 0


def outcomes_on(device, op="ADD", n=3):
    reg = devices.Reg(device)
    gg.registry.register(reg)
    try:
        return command.run(types.SimpleNamespace(
            mode="test", op=op, params="f32.*perm1=0", sample=n, seed=SEED, backend=device.name, threads=1, jobs=None,
            resume=None, json=True))
    finally:
        gg.registry.unregister(reg)


def test_any_registered_device_runs_the_suite():
    """Private memory, an alignment of its own, no plans: only the slots every backend has."""
    device = devices.Fake("Toy", alignment=256)
    found = outcomes_on(device)
    assert [c["ok"] for c in found["cases"]] == [True] * 3 and not found["failed"]
    assert all("float64" in c["checked"] for c in found["cases"]) and device.used == 0
    late = outcomes_on(devices.Fake("Late", delay=1e-4), n=1)
    assert late["cases"][0]["ok"]
    refused = outcomes_on(devices.Fake("Few", ops={OP.MUL}), n=1)
    assert refused["cases"][0]["status"] == NOT_SUPPORTED


@pytest.mark.parametrize("behind,text", [(False, "against float64: error"), (True, "bytes outside the tensors")])
def test_wrong_devices_are_found_out(behind, text):
    device = devices.Fake("Toy")
    backend = Wrong(device)
    backend.behind = behind
    device.init_backend = lambda params="": backend
    found = outcomes_on(device, n=1)
    assert found["failed"] and text in found["cases"][0]["error"]


def test_a_device_without_data_is_refused():
    with pytest.raises(gg.ParamError, match="-b NULL: NULL holds no data and computes nothing"):
        command.backend_of("NULL", 1)
