"""PyTorch's allocator snapshots as offset problems: what the allocator took, and what a static plan would take.

    torch.cuda.memory._record_memory_history();  run;  torch.cuda.memory._snapshot()  as JSON or a pickle

    {"segments":      [{"address", "total_size", "blocks": [...]}],         what was held at the end
     "device_traces": [[{"action", "addr", "size"}, ...], ...]}             events of each device, the oldest first

A buffer lives from its `alloc` to its `free_completed` (or `free_requested`, where that is all there is), counted in
events; one that was there before the trace begins with it, one that is never freed lives to its end.  A pickle is read
by a reader that builds numbers, strings, lists and dicts and calls nothing.
"""
import json
import pickle

from ggjit.alloc.torch_profile import is_profile, trace_of_profile
from ggjit.alloc.traces import AllocationTrace, Held, number_of
from ggjit.ops.core.errors import BadFile, ParamError

FREED = "free_completed"


class _Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise BadFile(f"the pickle names {module}.{name}; a snapshot holds numbers and strings only, write it as JSON")

    def persistent_load(self, pid):
        raise BadFile("the pickle refers to something outside; write the snapshot as JSON")


def read_torch_trace(path, device=0):
    """The AllocationTrace of a snapshot's device, or of a profiler's trace (torch_profile.py).  Errors: BadFile (with
    the event), ParamError (no such device)."""
    snapshot = _read(path)
    try:
        return trace_of_profile(snapshot) if is_profile(snapshot) else _of_device(snapshot, device)
    except (BadFile, ParamError) as e:
        raise type(e)(f"{path}: {e}") from None


def _of_device(snapshot, device):
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(traces, list) or not all(isinstance(t, list) for t in traces):
        raise BadFile("no snapshot of PyTorch's allocator, device_traces is missing, and no trace of its profiler, "
                      "traceEvents is missing")
    if not 0 <= device < len(traces):
        raise ParamError(f"no device {device}, it has traces of {len(traces)}")
    return _buffers(traces[device], snapshot.get("segments") or [], device)


def _read(path):
    try:
        with open(path, "rb") as f:
            if f.read(1) == b"\x80":                            # a pickle of protocol 2 or later
                f.seek(0)
                return _Plain(f).load()
            f.seek(0)
            return json.loads(f.read())
    except BadFile as e:
        raise BadFile(f"{path}: {e}") from None
    except (ValueError, RecursionError, MemoryError, EOFError, IndexError, KeyError, TypeError, AttributeError,
            pickle.UnpicklingError) as e:
        raise BadFile(f"{path}: neither JSON nor a pickle of plain values: {e}") from None


def _buffers(events, segments, device):
    n = len(events)
    found = AllocationTrace([], [], [], [], None, "PyTorch")
    held, changes = Held(found), []             # changes: bytes of segments
    freed_by = FREED if any(_word(e, i) == FREED for i, e in enumerate(events)) else "free_requested"
    for i, event in enumerate(events):
        action = _word(event, i)
        if action in ("segment_alloc", "segment_map", "segment_free", "segment_unmap"):
            size = number_of(event, "size", i)
            changes.append(size if action in ("segment_alloc", "segment_map") else -size)
        elif action == "alloc":
            at, size = number_of(event, "addr", i), number_of(event, "size", i)
            if size:
                held.take(at, found.add(i, n, size), f"event {i}")
        elif action == freed_by:
            at, size = number_of(event, "addr", i), number_of(event, "size", i)
            k = held.release(at)
            if k is not None:
                found.upper[k] = max(i, found.lower[k] + 1)
            elif size:                          # memory from before the trace began
                found.add(0, max(i, 1), size)
    mine = [s for s in segments if isinstance(s, dict) and s.get("device", device) == device]
    if changes or mine:
        now = sum(number_of(s, "total_size", "a segment") for s in mine)
        found.taken = most = now
        for change in reversed(changes):
            now -= change
            most = max(most, now)
        found.taken = most
    return found


def _word(event, i):
    if not isinstance(event, dict) or not isinstance(event.get("action"), str):
        raise BadFile(f"event {i} has no action")
    return event["action"]
