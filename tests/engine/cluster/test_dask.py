"""Workers under Dask: found, started again after a kill, deaf to Ctrl-C, on loopback alone, gone at the end."""
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers.clusters import step_of
from helpers.device_contract import floats
from helpers.timing import HANGS

import ggjit as gg
from ggjit.cluster.certificates import certificates
from ggjit.cluster.dask_worker import distributed


def listening(pid):
    """Addresses at which a process accepts TCP connections."""
    sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")
               if os.path.islink(f"/proc/{pid}/fd/{fd}")}
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as f:
            for line in list(f)[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                    found.add(words[1].split(":")[0])
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads the tables of Linux")
def test_a_worker_process_that_is_killed_comes_back():
    before = listening(os.getpid())
    with gg.cluster.local(n_workers=1) as cl:
        device, values = cl.devices[0], floats(2, 16)
        step = step_of(device.init_backend())
        want = step(values)
        (pid,) = cl.client.run(os.getpid).values()
        os.kill(pid, signal.SIGINT)                     # as a terminal sends it to all processes
        np.testing.assert_array_equal(step(values), want)
        assert listening(pid) | listening(os.getpid()) - before <= {"0100007F"}        # 127.0.0.1
        os.kill(pid, signal.SIGKILL)
        t0 = time.monotonic()
        with pytest.raises(gg.DeviceLost, match="is lost"):
            while True:
                step(values)
        while device.epoch == 0 and time.monotonic() < t0 + HANGS:
            try:
                device.reopen()
            except gg.DeviceLost:
                time.sleep(0.05)
        np.testing.assert_array_equal(step_of(device.init_backend())(values), want)
        with gg.cluster.connect(cl.client.scheduler.address) as again:         # by the scheduler's address
            np.testing.assert_array_equal(step_of(again.devices[0].init_backend())(values), want)
        (pid,) = cl.client.run(os.getpid).values()
    deadline = time.monotonic() + HANGS
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
def test_a_worker_command_works_for_a_scheduler(tls, tmp_path):
    """Of another program; it lends what it was told to, and with certificates refuses who has none."""
    certs, addresses, options = tmp_path / "certs", [], []
    if tls:
        gg.cluster.make_certificates(certs)
        options = ["--tls", str(certs)]
    security = certificates(certs).security if tls else None

    async def schedule():
        async with distributed.Scheduler(host="127.0.0.1", port=0, dashboard=False, security=security,
                                         protocol="tls://" if tls else "tcp://", dashboard_address="127.0.0.1:0") as s:
            addresses.append(s.address)
            await s.finished()
    threading.Thread(target=lambda: asyncio.run(schedule()), daemon=True).start()
    while not addresses:
        time.sleep(0.01)
    command = [sys.executable, "-m", "ggjit.tools.command.main", "worker", "--scheduler", addresses[0], "--memory",
               "0.25", "-t", "1", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout.readline() == f"working for {addresses[0]}\n"
        if tls:
            with pytest.raises(gg.ParamError, match="--make-certs"):
                gg.cluster.connect(addresses[0])
        deadline = time.monotonic() + HANGS
        while True:
            try:
                cl = gg.cluster.connect(addresses[0], tls=certs if tls else None)
                break
            except gg.DeviceLost as e:
                assert "has no workers" in str(e) and time.monotonic() < deadline
        with cl:
            assert cl.devices[0].memory() == (250_000_000,) * 2
            assert cl.devices[0].address.startswith("tls" if tls else "tcp")
            assert step_of(cl.devices[0].init_backend())(floats(2, 16)).shape == (2, 16)
            own = {pid: listening(pid) for pid in (*cl.client.run(os.getpid).values(), process.pid)}
            if not tls:
                assert set().union(*own.values()) == {"0100007F"}
            assert "00000000" not in set().union(*own.values()), "a listener on all addresses"
    finally:
        process.terminate()
        assert process.wait(HANGS) == 0
        process.stdout.close()


CELL = """
import os, time
import numpy as np
import ggjit as gg
cl = gg.cluster.local(n_workers=1)
t = gg.Context().new_tensor(gg.F32, (4,))
gg.alloc_ctx_tensors(t.ctx, cl.devices[0].init_backend())
t.set(np.arange(4))
print("pids", os.getpid(), *cl.client.run(os.getpid).values())
"""


def shown(client, code, interrupt=None):
    """What a cell of a notebook prints; interrupt: called when it does."""
    found = []

    def seen(message):
        if message["msg_type"] == "stream":
            found.append(message["content"]["text"])
            if interrupt is not None:
                interrupt()
    reply = client.execute_interactive(code, timeout=HANGS, output_hook=seen)
    return reply["content"]["status"], "".join(found)


@pytest.mark.slow
def test_a_notebook_that_is_interrupted_and_killed_leaves_no_process(need):
    need("jupyter_client", "starts a kernel")
    need("ipykernel", "starts a kernel")
    from jupyter_client.manager import start_new_kernel
    manager, client = start_new_kernel()
    try:
        status, text = shown(client, CELL)
        pids = [int(word) for word in text.split("pids")[1].split()]
        assert status == "ok" and len(pids) == 2
        status, _ = shown(client, "print('begins', flush=True)\nwhile True: t.numpy()", manager.interrupt_kernel)
        assert status == "error"
        assert shown(client, "print(t.numpy().sum())") == ("ok", "6.0\n")       # the worker did not hear it
        os.kill(pids[0], signal.SIGKILL)
        deadline = time.monotonic() + HANGS
        while any(os.path.exists(f"/proc/{pid}/exe") for pid in pids[1:]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids[1:])
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
