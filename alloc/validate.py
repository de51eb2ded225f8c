"""Independent judge of memory plans: shares no code with the planners.

Two ways of looking, both by sweeping over time with the live buffers in a list sorted by address.
"""
import bisect

from ggjit.ops.errors import GgjitError


class InvalidPlan(GgjitError, AssertionError):
    """A plan that would corrupt memory; the message names both parties."""


def check_layout(lower, upper, size, offsets, alignment=1, capacity=None):
    """Raise InvalidPlan unless no two buffers that meet in time overlap and every offset is aligned and in bounds.

    lower, upper: half-open steps; size, offsets: bytes.  Empty buffers may lie anywhere.
    """
    n = len(offsets)
    if not len(lower) == len(upper) == len(size) == n:
        raise InvalidPlan(f"{n} offsets for {len(lower)}, {len(upper)}, {len(size)} lowers, uppers and sizes")
    events = []
    for i in range(n):
        o, z = int(offsets[i]), int(size[i])
        if o < 0 or (capacity is not None and o + z > capacity):
            raise InvalidPlan(f"buffer {i}: [{o}, {o + z}) is outside [0, {capacity})")
        if o % alignment:
            raise InvalidPlan(f"buffer {i}: offset {o} is no multiple of {alignment}")
        if z > 0:
            events += [(int(lower[i]), 1, i), (int(upper[i]), 0, i)]
    live = []                                   # (offset, end, buffer), disjoint, by offset
    for _, birth, i in sorted(events):
        o = int(offsets[i])
        at = bisect.bisect_left(live, (o, -1, -1))
        if not birth:
            assert live[at][2] == i
            del live[at]
            continue
        end = o + int(size[i])
        for k in (at - 1, at):
            if 0 <= k < len(live) and live[k][0] < end and o < live[k][1]:
                raise InvalidPlan(f"buffers {live[k][2]} and {i} are live together and overlap: "
                                  f"[{live[k][0]}, {live[k][1]}) and [{o}, {end})")
        live.insert(at, (o, end, i))
    return max((int(o) + int(z) for o, z in zip(offsets, size, strict=True)), default=0)
