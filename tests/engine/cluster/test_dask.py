"""Workers under Dask: found, started again after a kill, deaf to Ctrl-C, on loopback alone, gone at the end."""
import os
import signal
import time

import numpy as np
import pytest
from helpers.clusters import step_of
from helpers.device_contract import floats

import ggjit as gg


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
        while device.epoch == 0 and time.monotonic() < t0 + 60:
            try:
                device.reopen()
            except gg.DeviceLost:
                time.sleep(0.05)
        np.testing.assert_array_equal(step_of(device.init_backend())(values), want)
        with gg.cluster.connect(cl.client.scheduler.address) as again:         # by the scheduler's address
            np.testing.assert_array_equal(step_of(again.devices[0].init_backend())(values), want)
        (pid,) = cl.client.run(os.getpid).values()
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
