"""PyTorch's allocator snapshots as offset problems: what the allocator took, and what a static plan would take.

    torch.cuda.memory._record_memory_history();  run;  torch.cuda.memory._snapshot()  as JSON or a pickle, also gzipped

    {"segments":      [{"address", "total_size", "blocks": [...]}],         what was held at the end
     "device_traces": [[{"action", "addr", "size"}, ...], ...]}             events of each device, the oldest first

A buffer lives from its `alloc` to its `free_completed` (or `free_requested`, where that is all there is), counted in
events; one that was there before the trace begins with it, one that is never freed lives to its end.  Of several
devices, the one that the most bytes were taken on is read.  A pickle is read by a reader that builds numbers, strings,
lists and dicts and calls nothing.
"""
import gzip
import io
import json
import pickle
import zlib

from ggjit.alloc.torch_profile import is_profile, trace_of_profile
from ggjit.alloc.traces import AllocationTrace, Held, number_of
from ggjit.ops.core.errors import BadFile

FREED = "free_completed"
# bytes; no device has such a segment: PyTorch's writer of snapshots out of a profile lays one around all addresses
ALL_ADDRESSES = 1 << 40
GZIP, PICKLE = b"\x1f\x8b", b"\x80"          # how such files begin; pickles of protocol 2 and later


class _Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise BadFile(f"the pickle names {module}.{name}; a snapshot holds numbers and strings only, write it as JSON")

    def persistent_load(self, pid):
        raise BadFile("the pickle refers to something outside; write the snapshot as JSON")


def read_torch_trace(path):
    """The AllocationTrace of a snapshot, or of a profiler's trace (torch_profile.py).  Errors: BadFile, with the
    event."""
    content = _read(path)
    try:
        return trace_of_profile(content) if is_profile(content) else _of_snapshot(content)
    except BadFile as e:
        raise BadFile(f"{path}: {e}") from None


def _of_snapshot(snapshot):
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(traces, list) or not all(isinstance(t, list) for t in traces):
        raise BadFile("no snapshot of PyTorch's allocator, device_traces is missing, and no trace of its profiler, "
                      "traceEvents is missing")
    taken = [sum(number_of(e, "size", f"event {i}") for i, e in enumerate(events) if _word(e, i) == "alloc")
             for events in traces]
    if not any(traces):
        raise BadFile("the snapshot has no events; call torch.cuda.memory._record_memory_history() before the run")
    device = max(range(len(traces)), key=taken.__getitem__)
    segments = snapshot.get("segments")
    return _buffers(traces[device], segments if isinstance(segments, list) else [], device)


def _read(path):
    with open(path, "rb") as f:
        content = f.read()
    try:
        content = gzip.decompress(content) if content[:2] == GZIP else content
        return _Plain(io.BytesIO(content)).load() if content[:1] == PICKLE else json.loads(content)
    except BadFile as e:
        raise BadFile(f"{path}: {e}") from None
    except (ValueError, RecursionError, MemoryError, EOFError, IndexError, KeyError, TypeError, AttributeError,
            OverflowError, pickle.UnpicklingError, gzip.BadGzipFile, zlib.error) as e:
        raise BadFile(f"{path}: neither JSON nor a pickle of plain values: {str(e) or type(e).__name__}") from None


def _buffers(events, segments, device):
    n = len(events)
    found = AllocationTrace([], [], [], [], None, f"PyTorch on device {device}" if device else "PyTorch")
    held, changes = Held(found), []             # changes: bytes of segments
    freed_by = FREED if any(_word(e, i) == FREED for i, e in enumerate(events)) else "free_requested"
    for i, event in enumerate(events):
        action, where = _word(event, i), f"event {i}"
        if action in ("segment_alloc", "segment_map", "segment_free", "segment_unmap"):
            size = number_of(event, "size", where)
            changes.append(size if action in ("segment_alloc", "segment_map") else -size)
        elif action == "alloc":
            at, size = number_of(event, "addr", where), number_of(event, "size", where)
            if size:
                held.take(at, found.add(i, n, size), where)
        elif action == freed_by:
            held.free(number_of(event, "addr", where), number_of(event, "size", where), i, where)
    mine = [number_of(s, "total_size", f"segment {k}") for k, s in enumerate(segments)
            if isinstance(s, dict) and s.get("device", device) == device]
    mine = [nbytes for nbytes in mine if nbytes < ALL_ADDRESSES]
    if changes or mine:
        found.taken = now = sum(mine)
        for change in reversed(changes):
            now -= change
            found.taken = max(found.taken, now)
    return found


def _word(event, i):
    if not isinstance(event, dict) or not isinstance(event.get("action"), str):
        raise BadFile(f"event {i} has no action")
    return event["action"]
