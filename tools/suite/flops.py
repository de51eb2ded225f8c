"""The arithmetic and the bytes of a node: for speeds, and to skip references that take too long."""
import math

from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.spec import flops as flops_of_products


def flops(t):
    """Floating point operations of a node; one per element where its spec gives no formula."""
    return flops_of_products(t) if counted(t) else math.prod(t.ne)


def counted(t):
    """Is the node's speed given in FLOPS (else in bytes per second)?"""
    return all_specs()[t.op].flops is not None


def touched(t):
    """Bytes of the result and its sources."""
    return t.nbytes + sum(s.nbytes for s in t.src if s is not None)
