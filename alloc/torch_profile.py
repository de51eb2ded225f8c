"""Traces of torch.profiler as offset problems: the memory that tensors took, and what a static plan would take.

    with torch.profiler.profile(profile_memory=True) as p: ...;  p.export_chrome_trace("step.json")

    {"traceEvents": [{"name": "[memory]", "ts": microseconds, "args": {"Bytes", "Addr", "Device Type", "Device Id",
                      "Total Allocated", "Total Reserved"}}, ...]}

Bytes are positive where memory is taken and negative where it is given back.  Of several devices, the one that the most
bytes were taken on is read.  A buffer lives from the event that takes it to the one that gives it back, counted in
events; one that was there before the trace begins with it, one that is never given back lives to its end.
"""
import math

from ggjit.alloc.traces import AllocationTrace, Held, number_of
from ggjit.ops.core.errors import BadFile

NAME = "[memory]"
DEVICE_TYPES = {0: "PyTorch on the CPU", 1: "PyTorch on CUDA"}


def is_profile(content):
    """Is this content of a JSON file a profiler's trace?"""
    return isinstance(content, dict) and isinstance(content.get("traceEvents"), list)


def trace_of_profile(content):
    """The AllocationTrace of the device that the most bytes were taken on.  Errors: BadFile (with the event)."""
    devices = {}
    for i, event in enumerate(content["traceEvents"]):
        if isinstance(event, dict) and event.get("name") == NAME:
            args = event.get("args")
            if not isinstance(args, dict) or isinstance(event.get("ts"), bool) or \
                    not isinstance(event.get("ts"), int | float) or not math.isfinite(event["ts"]):
                raise BadFile(f"event {i}: a memory event has a time, ts, and args")
            device = tuple(x if isinstance(x, int) else str(x) for x in map(args.get, ("Device Type", "Device Id")))
            devices.setdefault(device, []).append((event["ts"], i, args))
    if not devices:
        raise BadFile("the trace has no memory events; torch.profiler.profile(profile_memory=True) writes them")
    device = max(devices, key=lambda d: sum(max(_change(args, i), 0) for _, i, args in devices[d]))
    return _trace(sorted(devices[device], key=lambda e: e[:2]), DEVICE_TYPES.get(device[0], "PyTorch"))


def _trace(events, what):
    n = len(events)
    found = AllocationTrace([], [], [], [], None, what)
    held = Held(found)
    for step, (_, i, args) in enumerate(events):
        at, change = number_of(args, "Addr", f"event {i}"), _change(args, i)
        if change > 0:
            held.take(at, found.add(step, n, change), f"event {i}")
        elif change < 0:
            held.free(at, -change, step, f"event {i}")
    reserved = max(number_of(args, "Total Reserved", f"event {i}") for _, i, args in events)
    found.taken = reserved or _most_live(found, n)
    return found


def _change(args, i):
    value = args.get("Bytes")
    if isinstance(value, int) and value < 0:
        return -number_of({"Bytes": -value}, "Bytes", f"event {i}")
    return number_of(args, "Bytes", f"event {i}")


def _most_live(trace, n):
    """Most bytes alive at once, which is what an allocator without a cache takes."""
    changes, now, most = [0] * (n + 1), 0, 0
    for lower, upper, size in zip(trace.lower, trace.upper, trace.size, strict=True):
        changes[lower] += size
        changes[upper] -= size
    for change in changes:
        now += change
        most = max(most, now)
    return most
