"""Which cases of a long sweep a run takes: a sample drawn by the seed of the run.  The others are marked slow.

    GGJIT_TEST_SEED=20260131 python -m pytest       the run of that day again; without it the date is the seed
    python -m pytest -m slow                        what the sample leaves out

Most of a sweep's time is the compilation of its kernels, so kernels are drawn, and every case runs that needs no other
ones.  They are taken in an order that the seed gives, each that has a feature none before it had:

    kernel              B           E         A         D             C
    its features        f16 tile    f16 dot   f16 tile  q4_0 tile     f16 dot
    taken               yes         yes                 yes

All tests share the order, so those with the same kernels to choose from choose the same.  All processes of a run share
the seed: it stands in their environment.
"""
import hashlib
import itertools
import os
import time

import pytest

SEED = int(os.environ.setdefault("GGJIT_TEST_SEED", time.strftime("%Y%m%d")))


def rank(name):
    """Where `name` stands in the order of the seed: bytes to sort by."""
    return hashlib.sha256(f"{SEED} {name}".encode()).digest()


def _runs(cases, features, kernels):
    """For each case whether it runs."""
    needs = [frozenset(kernels(case)) for case in cases]
    seen, taken = set(), set()
    for i in sorted(range(len(cases)), key=lambda i: sorted(map(rank, needs[i]))):
        if not seen.issuperset(features(cases[i])):
            seen.update(features(cases[i]))
            taken |= needs[i]
    return [names <= taken for names in needs]


def drawn(cases, features, kernels=lambda case: [repr(case)]):
    """Those of `cases` that run, in their order: together they have every feature of all.

    features(case): hashable things; kernels(case): names of what has to be compiled for it.
    """
    cases = list(cases)
    return list(itertools.compress(cases, _runs(cases, features, kernels)))


def _said(case):
    return "-".join(value if isinstance(value, str) else repr(value) for value in case)


def sampled(cases, features, kernels=lambda case: [repr(case)], name=_said):
    """All of `cases`, tuples, as parameters of a test; those that are not drawn are marked slow."""
    cases = list(cases)
    return [pytest.param(*case, marks=() if runs else pytest.mark.slow, id=name(case))
            for case, runs in zip(cases, _runs(cases, features, kernels), strict=True)]
