"""planner="best" for graphs: the lowest plan over both aliasing rules, never above ggml's own.

More reuse usually helps, but an online free list can get worse with it and even the lower bound may differ, so both
rules are planned and the better result is returned together with its own bound.
"""
import numpy as np

from ggjit.alloc import work
from ggjit.alloc.alias import MODERN, THROUGH_VIEWS
from ggjit.alloc.graph_alloc import ggml_plan
from ggjit.alloc.planners import Clock, plan_offsets


def _signed_events(plan, keep):
    """plan.events of the allocations in `keep` as signed numbers into keep, trims left out."""
    number = np.zeros(len(plan.a_id) + 1, np.int64)
    number[keep] = np.arange(1, len(keep) + 1)
    kind, a = plan.events[:, 0], plan.events[:, 1]
    signed = np.where(kind == work.EV_ALLOC, number[a], -number[a])
    return signed[(number[a] > 0) & (kind != work.EV_TRIM)]


def _improve(p, plan, limits, clock):
    """Plan every buffer of `plan` offline; returns a plan that is nowhere above it."""
    sizes, how = [list(c) for c in plan.chunk_sizes], set()
    chunk, offs = p.col(work.A_CHUNK), p.col(work.A_OFFS)
    for b in range(p.n_buffers):
        keep = np.flatnonzero(plan.a_buffer == b)
        if not len(keep) or sum(sizes[b]) <= plan.lower_bounds[b]:
            how.add("ggml")
            continue
        lay = plan_offsets(plan.a_lo[keep], plan.a_hi[keep], plan.a_size[keep], int(p.alignments[b]),
                           time_limit=max(clock.left, 0.0), events=_signed_events(plan, keep))
        fits_chunk = limits[b] is None or lay.peak <= limits[b]
        if lay.peak < sum(sizes[b]) and fits_chunk:
            chunk[keep], offs[keep], sizes[b] = 0, lay.offsets, [lay.peak]
            how.add(lay.planner)
        else:
            how.add("ggml")
    out = p.plan("best", plan.rule, sizes)
    out.how = " + ".join(sorted(how))
    return out


def best_plan(make, limits, time_limit):
    """GraphPlan of the lowest peak.  make() gives a fresh Problem; limits are the chunk limits per buffer."""
    clock = Clock(time_limit)
    best, ggml_peak = None, None
    for rule in (MODERN, THROUGH_VIEWS):
        p = make()
        online = ggml_plan(p, "best", limits, rule=rule)
        ggml_peak = online.peak if ggml_peak is None else ggml_peak
        if best is not None and online.lower_bound >= best.peak:
            break
        plan = _improve(p, online, limits, clock)
        if best is None or plan.peak < best.peak:
            best = plan
    best.ggml_peak, best.seconds = ggml_peak, clock.used
    return best
