"""The axes along which the rows of a result run: parts of the `rows` rules of the specs (ops/core/spec.py).

    mul_mat(w [k, n], x [k, r]) -> [n, r]       row j needs row j of x and all of w:        (1, [None, 1])
    out_prod(a [m, r], b [p, r]) -> [m, p]      a sum over rows of a and b, one by one:     (SUM_IN_ORDER, [1, 1])
"""

SUM = -1                        # in place of an axis: the result is a sum over the rows, in whatever order
SUM_IN_ORDER = -2               # one that adds row after row, so it can go on from the sum of the rows before


def last_axis(t):
    """The last axis that is longer than 1."""
    return max((i for i in range(4) if t.ne[i] != 1), default=0)


def along(least):
    """Rule of ops whose rows are independent of each other from axis `least` on; sources of one row are read whole."""
    def rule(t):
        a = last_axis(t)
        needs = [None if s is None or s.ne[a] == 1 else a for s in t.src]
        if a >= least and all(n is None or s.ne[a] == t.ne[a] for s, n in zip(t.src, needs, strict=True)):
            yield a, needs
    return rule


def as_many_elements(t):
    """Rule of ops that keep the order of the elements and may change the shape."""
    yield last_axis(t), [last_axis(t.src[0])]


def pictures(t):
    """Rule of ops on a kernel and pictures along axis 3."""
    if last_axis(t) == 3:
        yield 3, [None, 3]
