"""A small sample of the suite with every class and every op, few kernels and small tensors.

Most of a case's time on a cold cache is the compilation of its kernels, and neighbours in the list use the same ones.
In an order drawn by the seed:

    turn 1    one case of every op of every class, with whatever kernels it needs
    turn 2..  one case of every class, if its kernels are there already or the number of kernels is below the limit
"""
import collections
import math

import numpy as np

from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.spec import all_specs
from ggjit.tools.suite.cases.case import all_cases
from ggjit.tools.suite.flops import flops
from ggjit.tools.suite.runner import Built

SMALL_FLOPS, SMALL_ELEMENTS = 3e7, 1e6                  # of a case that is drawn where a class has such


def kernels_of(case, backend):
    """({kernel name: (Kernel, module of its op)}, is it small?) of a case, or None where we refuse it."""
    built, found = None, {}
    try:
        built = Built(case, backend, 0, None)
        built.require_support()
        for t in built.nodes:
            spec = all_specs()[t.op]
            k = spec.kernel(t, backend.n_threads)
            found[k.name] = (k, spec.module)
        tensors = [t for n in built.nodes for t in (n, *n.src) if t is not None]
        small = (sum(flops(t) for t in built.nodes) <= SMALL_FLOPS
                 and sum(math.prod(t.ne) for t in tensors) <= SMALL_ELEMENTS)
        return found, small
    except GgjitError:
        return None
    finally:
        if built is not None:
            built.close()


def balanced(n, seed, backend, n_kernels):
    """([cases], {kernel name: (Kernel, module)}): n cases that need about n_kernels kernels, in the list's order.

    Fewer than n where the limits leave no more.
    """
    rng, cases, drawn, kernels = np.random.default_rng(seed), all_cases(), [], {}
    ops, classes = collections.defaultdict(list), collections.defaultdict(list)
    for i in rng.permutation(len(cases)):
        ops[cases[i].family, cases[i].op].append(cases[i])
    for group in ops.values():
        drawn += _next(group, backend, kernels, math.inf)
    for (family, _), group in ops.items():
        classes[family] += group
    waiting = list(classes.values())
    while waiting and len(drawn) < n:
        for group in waiting:
            drawn += _next(group, backend, kernels, n_kernels)
        waiting = [g for g in waiting if g]
    return sorted(drawn[:n], key=lambda c: c.index), kernels


def _next(group, backend, kernels, n_kernels):
    """[the next case of `group` that fits] or []; it and those before it leave the group, its kernels join `kernels`.

    Without a limit on kernels a large case serves where there is no small one.
    """
    large = None
    while group:
        case = group.pop()
        needs = kernels_of(case, backend)
        if needs is None:
            continue
        needs, small = needs
        if small and (needs.keys() <= kernels.keys() or len(kernels) + len(needs.keys() - kernels.keys()) <= n_kernels):
            kernels |= needs
            return [case]
        large = large or (case, needs)
    if large and n_kernels == math.inf:
        kernels |= large[1]
        return [large[0]]
    return []
