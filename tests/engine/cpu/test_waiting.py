"""Workers that wait: in the system, in Python where the system has no way, and code for systems that are not here."""
import subprocess
import sys
import threading

import numpy as np
import pytest
from llvmlite import binding as llvm
from llvmlite import ir

import ggjit as gg
from ggjit.cpu import walk
from ggjit.cpu.thread_pool import the_pool
from ggjit.ops.core.record import WORD
from ggjit.ops.native import waiting
from ggjit.ops.native.jit import native
from ggjit.ops.native.node import S_COUNT, S_GENERATION, barrier


@pytest.fixture
def in_python():
    """The pool, whose workers do not sleep in the system."""
    pool = the_pool()
    can_sleep = pool.words[walk.S_CAN_SLEEP // WORD]
    pool.words[walk.S_CAN_SLEEP // WORD] = 0
    _product(2, 8).compute()                # wakes the workers: they come back to Python
    try:
        yield pool
    finally:
        pool.poll = 50
        pool.words[walk.S_CAN_SLEEP // WORD] = can_sleep
        pool._post()                        # workers that wait in Python go back and sleep in the system


def _product(n_threads, n):
    """A plan of three products that n_threads share, and what it has to give."""
    rng = np.random.default_rng()
    ctx = gg.Context()
    a = gg.from_numpy(ctx, rng.random((n, n), np.float32))
    y = gg.mul_mat(a, gg.mul_mat(a, gg.mul_mat(a, a)))
    graph = gg.Graph(y)
    cpu = gg.init_backend(f"CPU:n_threads={n_threads},fuse=0")
    allocator = gg.GraphAllocator(cpu)
    allocator.alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    plan.kept = allocator, y
    return plan


def test_an_idle_worker_does_not_walk_a_finished_job_again(in_python):
    """A worker that comes back from Python without a new job stands in no barrier."""
    pool = in_python
    plan = _product(2, 64)
    plan.compute()
    done, count = pool.words[walk.S_DONE // WORD], pool.words[S_COUNT // WORD]
    job = pool.words[walk.S_JOB // WORD]
    for _ in range(100):
        assert walk.worker(pool.sync, 1, job) == job
    assert (pool.words[walk.S_DONE // WORD], pool.words[S_COUNT // WORD]) == (done, count)
    assert not count


@pytest.mark.parametrize("poll", [0, 50])
def test_ten_thousand_jobs_beside_a_busy_process_without_sleep_in_the_system(in_python, poll):
    in_python.poll = poll
    plans = [_product(n_threads, 48) for n_threads in (2, 3, 2)]
    for plan in plans:
        plan.compute()
    expected = [plan.kept[1].numpy() for plan in plans]
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for i in range(5000):
            plans[i % 3].compute()
            if i % 100 < 3:
                assert np.array_equal(plans[i % 3].kept[1].numpy(), expected[i % 3])
    finally:
        busy.kill()
        busy.wait()


def test_workers_that_take_no_part_do_not_keep_the_interpreter_busy(in_python, monkeypatch):
    """During a job of two threads the third one waits: it does not ask again and again."""
    _product(3, 48).compute()
    in_python.poll = 0
    worker, entered = walk.worker, []

    def counted(sync, ith, seen):
        entered.append(ith)
        return worker(sync, ith, seen)
    monkeypatch.setattr(walk, "worker", counted)
    _product(2, 1500).compute()
    assert entered.count(2) <= 3


@native("i64(i64, i64, i64)")
def meet(sync, nth, times):
    for _ in range(times):
        barrier(sync, nth)
    return 0


def test_more_threads_than_cores_meet_at_barriers():
    memory = np.zeros(walk.PAGE_NBYTES + 64, np.uint8)
    sync = memory[-memory.ctypes.data % 64:][:walk.PAGE_NBYTES].view(np.int64)
    nth, times = 5, 2000
    threads = [threading.Thread(target=meet, args=(sync.ctypes.data, nth, times), daemon=True) for _ in range(nth)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not any(t.is_alive() for t in threads)
    assert sync[S_GENERATION // WORD] == times and not sync[S_COUNT // WORD]


# ---------------------------------------------------------------- other systems
@pytest.mark.parametrize("platform, machine, names, way", [
    ("linux", "x86_64", (), "futex"), ("linux", "aarch64", (), "futex"), ("linux", "mips", (), ""),
    ("darwin", "arm64", ("os_sync_wait_on_address", "__ulock_wait"), "os_sync_wait_on_address"),
    ("darwin", "arm64", ("__ulock_wait",), "__ulock_wait"), ("darwin", "x86_64", (), ""),
    ("win32", "", ("WaitOnAddress",), "WaitOnAddress"), ("win32", "", (), ""), ("freebsd14", "amd64", (), "")])
def test_the_way_of_each_system(platform, machine, names, way):
    assert waiting._way(platform, machine, names.__contains__) == way


@pytest.mark.parametrize("way, triple, called", [
    ("futex", "aarch64-unknown-linux-gnu", {"syscall"}),
    ("os_sync_wait_on_address", "arm64-apple-macosx14.4", {"os_sync_wait_on_address", "os_sync_wake_by_address_all"}),
    ("__ulock_wait", "arm64-apple-macosx11.0", {"__ulock_wait", "__ulock_wake"}),
    ("WaitOnAddress", "x86_64-pc-windows-msvc", {"WaitOnAddress", "WakeByAddressAll"}), ("", "riscv64-linux", set())])
def test_code_of_other_systems_calls_what_they_have(way, triple, called, monkeypatch):
    monkeypatch.setattr(waiting, "_MACHINE", "aarch64")
    module = ir.Module()
    i64 = ir.IntType(64)
    f = ir.Function(module, ir.FunctionType(ir.VoidType(), [i64, i64]), "wait")
    b = ir.IRBuilder(f.append_basic_block())
    waiting.emit_sleep(b, way, *f.args)
    waiting.emit_wake(b, way, f.args[0])
    b.ret_void()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    assert {g.name for g in parsed.functions if g.is_declaration} == called
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    parsed.triple = triple
    machine = llvm.Target.from_triple(triple).create_target_machine()
    code = machine.emit_assembly(parsed)
    assert all(name in code for name in called)
