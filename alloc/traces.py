"""Traces of allocations that other programs made, as offset problems: what they took, and what a static plan takes.

    file                    read by             a buffer lives
    .csv                    csvio.py            as its line says; with a column `offset`, that is where it lay
    .json .pickle .pkl      torch_trace.py      from PyTorch's `alloc` to its `free_completed`; .gz may follow
    .json                   torch_profile.py    from the memory event that takes it to the one that gives it back
    .log .txt               ggml_log.py         from ggml's "allocating" to its "freeing"
    .onnx                   onnx_graph.py       from the node that makes it to the last node that reads it
"""
import bisect
import dataclasses

from ggjit.ops.core.errors import BadFile

MAX_NBYTES = 1 << 62


@dataclasses.dataclass
class AllocationTrace:
    """ids, lower, upper, size: lists, as of plan_offsets; taken: the most bytes that were held for them at once, None
    where the trace does not say; what: whose memory that was."""
    ids: list
    lower: list
    upper: list
    size: list
    taken: int | None = None
    what: str = ""

    def add(self, lower, upper, size, name=None):
        """The number of one more buffer."""
        self.ids.append(f"b{len(self.ids)}" if name is None else name)
        self.lower.append(lower)
        self.upper.append(upper)
        self.size.append(size)
        return len(self.ids) - 1


def number_of(event, name, where):
    """The bytes, or the address, that an event says under `name`.  where: its number, for errors.  Errors: BadFile."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64 or (
            name.lower() != "addr" and value >= MAX_NBYTES):
        raise BadFile(f"{where}: {name} is {value!r}, expected a number of bytes")
    return value


class Overlap(BadFile):
    """Two buffers share bytes.  other: the number of the one that was there before."""

    def __init__(self, message, other=-1):
        super().__init__(message)
        self.other = other

    def __reduce__(self):
        return type(self), (*self.args, self.other)


class Held:
    """What lies where while a trace is read: {(room, address): number of a buffer}.  No two may share a byte."""

    def __init__(self, trace):
        self._trace, self._buffers, self._addresses, self._freed = trace, {}, {}, {}

    def take(self, at, buffer, moment, room=0):
        """The buffer of that number lies at address `at`.  moment: where the trace says so, for errors.  Errors:
        Overlap, where it lies on another one."""
        size, addresses = self._trace.size[buffer], self._addresses.setdefault(room, [])
        place = bisect.bisect_right(addresses, at)
        for other in addresses[max(place - 1, 0):place + 1]:
            k, since = self._buffers[room, other]
            if other < at + size and at < other + self._trace.size[k]:
                raise Overlap(f"{moment}: {size} bytes at {at} overlap the {self._trace.size[k]} bytes at {other} of "
                              f"{since}, which were not freed", k)
        self._buffers[room, at] = buffer, moment
        addresses.insert(place, at)

    def release(self, at, room=0):
        """The number of the buffer at that address, which is gone now; None where there is none."""
        found = self._buffers.pop((room, at), None)
        if found is None:
            return None
        addresses = self._addresses[room]
        del addresses[bisect.bisect_left(addresses, at)]
        return found[0]

    def free(self, at, nbytes, step, moment):
        """The buffer at address `at` is gone at `step`; one that the trace has not seen was there before it began.
        Errors: BadFile, where it was gone before."""
        k = self.release(at)
        if k is not None:
            self._trace.upper[k] = step
        elif nbytes:
            if at in self._freed:
                raise BadFile(f"{moment}: the {nbytes} bytes at {at} were freed already, by {self._freed[at]}")
            self._trace.add(0, max(step, 1), nbytes)
        self._freed[at] = moment


def check_places(lines, lower, upper, size, offsets):
    """BadFile, with both lines, where two buffers are live together and share bytes."""
    events = sorted((t, born, k) for k, z in enumerate(size) if z
                    for t, born in ((lower[k], True), (upper[k], False)))
    held = Held(AllocationTrace([], [], [], list(size)))
    for _, born, k in events:
        if born:
            held.take(offsets[k], k, f"line {lines[k]}")
        else:
            held.release(offsets[k])
