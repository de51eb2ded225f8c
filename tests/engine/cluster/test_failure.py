"""Workers that are frozen, killed or gone: a typed error in time, and the same bits on what takes their place."""
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers.clusters import step_of, worker_processes, workers
from helpers.device_contract import floats, on
from helpers.timing import HANGS

import ggjit as gg
from ggjit.cluster import session, stream


@pytest.fixture
def cluster():
    with workers(n=1, timeout=0.5) as made:
        yield made


def freeze(server, frozen=True):
    """The worker reads and says nothing."""
    (server.gate.clear if frozen else server.gate.set)()


def lost(work, match):
    """The DeviceLost that `work`, repeated, ends with."""
    t0 = time.monotonic()
    with pytest.raises(gg.DeviceLost, match=match) as e:
        while time.monotonic() - t0 < HANGS:
            work()
    return e.value


def test_a_frozen_worker_is_lost_and_what_takes_its_place_gives_the_same_bits(cluster):
    device, server = cluster.devices[0], cluster.servers[0]
    values, t = floats(2, 16), on(device.init_backend(), gg.F32, (4,), floats(4))
    want = (step := step_of(device.init_backend()))(values)
    freeze(server)
    e = lost(lambda: step(values), r"it sent nothing for 0.5 s.*reopen\(\)")
    assert (e.device, e.epoch) == ("worker0", 0) and 0 < e.last_seq < device.stream.seq + 1
    for call in (t.numpy, lambda: t.set(floats(4)), lambda: step(values), device.memory,
                 lambda: device.init_backend().alloc_buffer(64)):
        with pytest.raises(gg.DeviceLost, match="is lost"):
            call()
    device.init_backend().synchronize()             # nothing is under way any more
    freeze(server, False)
    assert device.reopen() is device and device.epoch == 1
    np.testing.assert_array_equal(step_of(device.init_backend())(values), want)
    for call in (t.numpy, lambda: t.set(floats(4)), lambda: step(values)):      # handles of before stay dead
        with pytest.raises(gg.DeviceLost, match="is lost"):
            call()
    assert device.memory()[1] == 1 << 28


def test_a_worker_that_computes_for_long_is_waited_for(cluster, monkeypatch):
    device = cluster.devices[0]
    monkeypatch.setattr(session.Session, "_memory", lambda self, payload, failed: time.sleep(1.2) or [1, 2])
    assert device.memory() == (1, 2)


def test_a_graph_that_takes_much_longer_than_before_is_given_up(cluster, monkeypatch):
    step, run = step_of(cluster.devices[0].init_backend()), session.Session._run
    step(floats(2, 16))
    monkeypatch.setattr(session.Session, "_run", lambda *args: time.sleep(1.5) or run(*args))
    lost(lambda: step(floats(2, 16)), "a graph that took .* s before has run for")


@pytest.mark.parametrize("seed", range(3))
def test_a_connection_that_ends_in_a_transfer(seed):
    with workers("tcp", n=1) as cluster:
        t = on(cluster.devices[0].init_backend(), gg.F32, (3 << 20,))
        values = floats(3 << 20)
        threading.Timer(0.01 * np.random.default_rng(seed).random(), cluster.servers[0].drop).start()
        lost(lambda: (t.set(values), t.numpy()), "the connection ended")


def test_after_ctrl_c_late_answers_are_dropped(cluster):
    device, server = cluster.devices[0], cluster.servers[0]
    device.stream.timeout = 5
    t, x = on(device.init_backend(), gg.F32, (8,)), floats(8)
    t.set(x)
    freeze(server)
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        t.numpy()
    t.set(2 * x)
    freeze(server, False)
    np.testing.assert_array_equal(t.numpy(), 2 * x)


def test_a_worker_that_waits_for_one_that_is_gone_says_so_and_goes_on():
    with workers(n=2, timeout=0.5) as cluster:
        (a, b), x = (d.init_backend() for d in cluster.devices), floats(8)
        s, d = on(a, gg.F32, (8,), x), on(b, gg.F32, (8,), x)
        gg.tensor_copy(s, d)
        d.numpy()
        freeze(cluster.servers[0])
        gg.tensor_copy(s, d)
        with pytest.raises(gg.GgjitError, match="no copy comes from .*: it sent nothing for 0.5 s.*on worker1"):
            d.numpy()
        with pytest.raises(gg.DeviceLost, match="worker0 at .* is lost"):
            s.numpy()
        np.testing.assert_array_equal(d.numpy(), x)
        freeze(cluster.servers[0], False)
        cluster.devices[0].reopen()
        gg.tensor_copy(on(a, gg.F32, (8,), 2 * x), d)
        np.testing.assert_array_equal(d.numpy(), 2 * x)


def test_a_driver_that_was_stopped_itself_loses_no_worker(cluster):
    """After Ctrl-Z and fg, a lot of silence has passed in which it could not listen."""
    s, clock = cluster.devices[0].stream, [0.0]

    def stands_still(patience, writing=False):
        clock[0] += 100
        answer.done = clock[0] > 250
    answer = stream.PendingReply(1, None, 0, None)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(stream.time, "monotonic", lambda: clock[0])
        m.setattr(s._conn, "wait", stands_still)
        assert s.wait(answer) is answer
    assert cluster.devices[0].memory()


def test_ctrl_c_cuts_no_message_in_two(cluster):
    """Wherever it comes in while messages are put together, they are whole, and what was written is written."""
    device = cluster.devices[0]
    t, u, x = *(on(device.init_backend(), gg.F32, (8,)) for _ in range(2)), floats(8)
    n = stop_at = n_stopped = 0

    def interrupt(frame, event, arg):
        nonlocal n
        if event == "line" and frame.f_code.co_filename.endswith("cluster/device.py"):
            n += 1
            if n == stop_at:
                signal.raise_signal(signal.SIGINT)
        return interrupt
    for stop_at in range(1, 50):
        n, before = 0, device.stream.n_messages
        sys.settrace(interrupt)
        try:
            u.set(stop_at * x)
            t.set(x)
            device.flush()
        except KeyboardInterrupt:
            n_stopped += 1
        finally:
            sys.settrace(None)
        t.set(2 * x)
        np.testing.assert_array_equal(t.numpy(), 2 * x)
        assert device.stream.n_messages - before <= 3
    assert n_stopped > 20


def test_ctrl_c_loses_no_answer_that_has_come(cluster):
    """Wherever it comes in while they are looked at: the next wait copies the bytes, and raises the error."""
    device, n_stopped = cluster.devices[0], 0
    t = on(device.init_backend(), gg.F32, (8,), x := floats(8))

    def interrupt(frame, event, arg):
        nonlocal n
        if frame.f_code.co_name in ("finish", "fill") and event == "line":
            n += 1
            if n == stop_at:
                signal.raise_signal(signal.SIGINT)
        return interrupt
    for stop_at in range(1, 40):
        n, read = 0, []
        device.flush([5, 99, 0, 4], nbytes=4)           # GET of an arena that there is not
        for _ in range(2):
            read.append(device.read_async(*t.buffer.at(t, 0), 32))
        device.stream.wait(device._sent[-1])
        sys.settrace(interrupt)
        try:
            device.finish()
        except KeyboardInterrupt:
            n_stopped += 1
            sys.settrace(None)
            with pytest.raises(gg.IndexRangeError, match="arena 99 does not exist"):
                device.finish()
        except gg.IndexRangeError:
            assert n < stop_at
        finally:
            sys.settrace(None)
        device.finish()
        assert all(bytes(raw) == x.tobytes() for raw in read), stop_at
    assert n_stopped > 15


def test_a_forked_child_has_no_device(cluster):
    t = on(cluster.devices[0].init_backend(), gg.F32, (4,), floats(4))
    pid = os.fork()
    if not pid:
        try:
            t.numpy()
        except gg.DeviceLost as e:
            os._exit(0 if "forked" in str(e) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0 and t.numpy().shape == (4,)


def test_a_forked_child_takes_no_answers_and_waits_for_no_thread(cluster):
    """An answer is under way, and another thread waits for one and holds the device's lock."""
    device, server = cluster.devices[0], cluster.servers[0]
    device.stream.timeout = 10
    t = on(device.init_backend(), gg.F32, (4,), x := floats(4))
    freeze(server)
    waits = threading.Thread(target=t.numpy)
    waits.start()
    while not device.stream._n_waits:
        time.sleep(0.01)
    pid = os.fork()
    if not pid:
        n_raised = 0
        threading.Timer(5, os._exit, [3]).start()
        for call in (device.init_backend().synchronize, t.numpy, device.memory, lambda: device.stream.wait(
                stream.PendingReply(1, None, 0, None))):
            try:
                call()
            except gg.DeviceLost as e:
                n_raised += "forked" in str(e)
        cluster.close()
        os._exit(0 if n_raised == 4 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    freeze(server, False)
    waits.join(HANGS)
    assert not waits.is_alive() and bytes(t.bytes()) == x.tobytes()


def test_a_scheduler_raises_and_the_cpu_goes_on(cluster):
    a = cluster.devices[0].init_backend()
    w, x = on(a, gg.F32, (8, 8), floats(8, 8)), gg.from_numpy(gg.Context(), floats(2, 8))
    y = gg.relu(gg.mul_mat(w, x))
    sched, graph = gg.Scheduler([a, gg.init_backend("CPU:n_threads=1")]), gg.Graph(y)
    sched.graph_compute(graph)
    cluster.servers[0].drop()
    lost(lambda: sched.graph_compute(graph), "is lost")
    with pytest.raises(gg.GgjitError, match="did not finish|is lost"):
        sched.numpy(y)
    assert gg.compute(gg.neg(x)).shape == (2, 8)


@pytest.mark.parametrize("n", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_processes_that_are_killed_or_stopped_at_any_point(n, monkeypatch):
    """SIGSTOP, and SIGKILL at seeded moments, in transfers too; another worker takes over."""
    monkeypatch.setattr(stream, "CONNECT_SECONDS", 2.0)
    rng, (*victims, (spare, address)) = np.random.default_rng(17 + n), worker_processes(n + 1)
    values, big = floats(2, 16), floats(1 << 20)
    try:
        with gg.cluster.connect(address) as cl:
            want = step_of(cl.devices[0].init_backend())(values)
        for k, (process, at) in enumerate(victims):
            with gg.cluster.connect(at, timeout=1.0) as cl:
                device = cl.devices[0]
                t, step = on(device.init_backend(), gg.F32, (1 << 20,)), step_of(device.init_backend())

                def work(t=t, step=step, want=want):
                    np.testing.assert_array_equal(step(values), want)
                    t.set(big)
                    np.testing.assert_array_equal(t.numpy(), big)
                kill = signal.SIGSTOP if k == 0 else signal.SIGKILL
                threading.Timer(0.3 * rng.random(), process.send_signal, [kill]).start()
                lost(work, "it sent nothing" if k == 0 else "the connection ended")
                with pytest.raises(gg.DeviceLost, match="is `ggjit worker --listen .* running"):
                    device.reopen()
                device._find = lambda: address
                np.testing.assert_array_equal(step_of(device.reopen().init_backend())(values), want)
        spare.send_signal(signal.SIGTERM)
        assert spare.wait(HANGS) == 0
    finally:
        for process, _ in (*victims, (spare, address)):
            process.kill()
            process.wait()
            process.stdout.close()


# ---------------------------------------------------------------- another machine, as far as the network can tell
@pytest.fixture
def other_host(tmp_path):
    """(function that starts a worker in a network namespace, function that puts the link up or down)"""
    name, mine, theirs = f"ggjit{os.getpid()}", f"gga{os.getpid()}"[:15], f"ggb{os.getpid()}"[:15]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True).returncode == 0
    certs, started = str(tmp_path / "certs"), []
    if shutil.which("ip") is None or not ip("netns", "add", name):
        pytest.skip("network namespaces need a right that this process does not have")

    def start():
        command = [sys.executable, "-m", "ggjit.tools.command.main", "worker", "--listen", "tls://10.213.77.2:0",
                   "--tls", certs, "--memory", "0.25", "-t", "1"]
        started.append(subprocess.Popen(["ip", "netns", "exec", name, *command], stdout=subprocess.PIPE, text=True))
        return started[-1].stdout.readline().split()[-1], certs
    try:
        if not (ip("link", "add", mine, "type", "veth", "peer", "name", theirs, "netns", name)
                and ip("addr", "add", "10.213.77.1/30", "dev", mine) and ip("link", "set", mine, "up")
                and ip("-n", name, "addr", "add", "10.213.77.2/30", "dev", theirs)
                and ip("-n", name, "link", "set", theirs, "up")):
            pytest.skip("this process may not make network links")
        gg.cluster.make_certificates(certs)
        yield start, lambda up: ip("link", "set", mine, "up" if up else "down")
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()
        ip("link", "del", mine)
        ip("netns", "del", name)


@pytest.mark.slow
def test_a_link_that_is_cut(other_host):
    """The connection ends without a sign; afterwards the same worker gives the same bits."""
    start, link = other_host
    address, certs = start()
    with gg.cluster.connect(address, tls=certs, timeout=2.0) as cl:
        device, values = cl.devices[0], floats(2, 16)
        want = (step := step_of(device.init_backend()))(values)
        link(False)
        lost(lambda: step(values), "it sent nothing for 2 s")
        link(True)
        np.testing.assert_array_equal(step_of(device.reopen().init_backend())(values), want)
        deadline = time.monotonic() + HANGS                # the memory of the connection that was cut comes back
        while time.monotonic() < deadline and device.memory()[0] < device.memory()[1] - (1 << 16):
            time.sleep(0.2)
        assert device.memory()[0] >= device.memory()[1] - (1 << 16)
