"""Fusions: runs of nodes that one kernel computes.  A Fusion is declared beside its kernel and found as Specs are.

    nodes of the plan      add   ->   rms_norm   ->   mul
                            |                          |
    one kernel              x (stored only if          d
                            another node reads it)

Nodes that are little work beside what reads them may be computed again by every thread of every reader.  Then no thread
waits for another one's result:

    rms_norm -> mul -> q        one kernel for each product (again = 2); the norm's result is not stored
                    -> k
                    -> v

A Fusion names the ops and which node reads which, usually each the one before it.  `fused` looks at types and shapes
and returns the kernel, or None.  Whether results in between may be left out, and whether the memory the allocator chose
permits it, the planner decides (engine/cpu/fusion.py).  Fused kernels give the bytes that the kernels of the
single nodes give.
"""
import dataclasses
import functools
import itertools
from collections.abc import Callable

from ggjit.ops.core.discovery import NO_OPS, declared
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Kernel


@dataclasses.dataclass(frozen=True)
class FusedKernel:
    """What the planner needs to lay out the NODE row of a fused run.

    kernel   its sources are `reads`, then the results in between that are stored (`stored`, in the order of the nodes)
    reads    tensors
    params   32-bit numbers for the NODE's parameter slots: ints, or floats as their bits
    by_row   of `reads`, those whose row r is read before any row r of a result is written: a result may lie exactly
             where one of them lies
    ahead    of `reads`, those that are read as a whole before any result is written: results may lie anywhere
             The others must not overlap any result.
    """
    kernel: Kernel
    reads: tuple
    params: tuple = ()
    by_row: tuple = ()
    ahead: tuple = ()


@dataclasses.dataclass(frozen=True)
class Fusion:
    """A run of ops that may become one kernel.

    ops      of consecutive nodes
    fused    (nodes, those in between that are stored, the nodes' own kernels, n_threads) -> FusedKernel, or None
    edges    (i, j): node j reads the result of node i; empty: each reads the one before it
    again    so many first nodes are computed by each of the runs that follow them and read the last of them
    """
    ops: tuple[OP, ...]
    fused: Callable
    module: str = ""
    edges: tuple = ()
    again: int = 0

    def matches(self, nodes):
        """Are the ops and edges those of the pattern?"""
        edges = self.edges or itertools.pairwise(range(len(self.ops)))
        return tuple(t.op for t in nodes) == self.ops and all(_reads(nodes[j], nodes[i]) for i, j in edges)

    @property
    def name(self):
        return "+".join(op.name.lower() for op in self.ops)


def _reads(t, source):
    return any(s is not None and s.id == source.id for s in t.src)


@functools.cache
def all_fusions():
    """{first OP: its fusions, longest first} of every op file in ggjit.ops, for the CPU."""
    return by_first_op(declared("ggjit.ops", "FUSIONS", skip=NO_OPS))


def by_first_op(fusions):
    """{first OP: its fusions, longest first}.  fusions: (module name, Fusion) each."""
    found = {}
    for module, fusion in fusions:
        found.setdefault(fusion.ops[0], []).append(dataclasses.replace(fusion, module=module))
    return {op: sorted(fusions, key=lambda f: -len(f.ops)) for op, fusions in found.items()}
