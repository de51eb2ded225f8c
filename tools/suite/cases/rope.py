"""Rotary position embedding, forward and backward."""
from ggjit.tools.suite.cases.case import F16, F32, I32, SuiteCase, grid, vars_of
from ggjit.tools.suite.cases.inputs import integers, uniform

NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40
N_CTX, BASE = 512, 10000.0
FACTORS = uniform(0.9, 1.1)


def source(m, type, ne, v):
    """v: 1 the corner of a larger tensor, 2 the second half of each row."""
    if v & 1:
        return m.corner(type, ne, (2, 4, 3, 1))
    if v == 2:
        return m.window(m.new(type, (2 * ne[0], *ne[1:])), ne, ne[0] * type.nbytes)
    return m.new(type, ne)


def rotated(m, a, pos, freq, n_dims, mode, floats, suffix=""):
    """The node ggml's tests build for a mode; suffix: "", "_inplace" or "_back"."""
    if mode & MROPE:
        n = n_dims // 2 if mode == VISION else n_dims
        sections = (n_dims // 4,) * 2 + (0, 0) if mode == VISION else (n_dims // 3,) * 3 + (0,)
        return getattr(m, f"rope_multi{suffix}")(a, pos, freq, n, sections, mode, 0, BASE, *floats)
    return getattr(m, f"rope_ext{suffix}")(a, pos, freq, n_dims, mode, 0, BASE, *floats)


def positions(m, ne, mode):
    return m.new(I32, (ne[2] * (4 if mode & MROPE else 1),), integers(N_CTX))


def rope(type, ne_a, n_dims, mode, fs, ef, af, ff, v, forward=True, inplace=False, n_offs=0):
    def build(m):
        a = source(m, type, ne_a, v)
        freq = m.new(F32, (n_dims // 2,), FACTORS) if ff else None
        suffix = "_back" if not forward else "_inplace" if inplace else ""
        out = rotated(m, a, positions(m, ne_a, mode), freq, n_dims, mode, (fs, ef, af, 1.0, 1.0), suffix)
        return m.rope_set_offset(out, n_offs) if n_offs else out
    params = vars_of(type=type, ne_a=ne_a, n_dims=n_dims, mode=mode, n_ctx=N_CTX, fs=fs, ef=ef, af=af, ff=ff, v=v,
                     inplace=inplace, n_offs=n_offs)
    return SuiteCase("rope", "ROPE" if forward else "ROPE_BACK", params, build)


# (ne, n_dims, mode) of the models that use them
MODELS = (((128, 40, 2, 1), 128, NORMAL), ((128, 52, 2, 1), 128, NORMAL), ((128, 64, 2, 1), 128, NORMAL),
          ((16, 16, 8192, 1), 16, NORMAL), ((64, 1, 2, 1), 64, NEOX), ((64, 71, 2, 1), 64, NEOX),
          ((64, 8, 2, 1), 64, NEOX), ((80, 32, 2, 1), 20, NORMAL), ((80, 32, 2, 1), 32, NORMAL),
          ((80, 32, 4, 1), 32, NORMAL), ((80, 32, 2, 1), 20, NEOX), ((80, 32, 2, 1), 32, NEOX),
          ((80, 32, 4, 1), 32, NEOX), ((16, 16, 8192, 1), 16, NEOX),
          *(((128, h, 2, 1), d, mode) for mode in (MROPE, IMROPE)
            for h, d in ((12, 128), (28, 128), (12, 20), (28, 32))),
          ((80, 16, 2, 1), 80, VISION), ((128, 16, 2, 1), 128, IMROPE), ((16, 16, 8192, 1), 16, IMROPE))
YARN = (1.4245, 0.7465, 1.4245)


def rope_cases():
    for forward in (True, False):
        every = True                                    # all shapes for the first (fs, ef, af) and type only
        for p in grid(fs=(1.0, 1.4245), ef=(0.0, 0.7465), af=(1.0, 1.4245), type=(F32, F16)):
            for ff in (False, True):
                rest = dict(**p, ff=ff, forward=forward)
                for v in (0, 1):
                    yield rope(ne_a=(128, 32, 2, 1), n_dims=128, mode=NORMAL, v=v, **rest)
                    for ne, n_dims, mode in MODELS if every else ():
                        yield rope(ne_a=ne, n_dims=n_dims, mode=mode, v=v, **rest)
                    yield rope(ne_a=(64, 128, 2, 1), n_dims=64, mode=NEOX, v=v, **rest)
                for mode in (NORMAL, NEOX, MROPE, IMROPE, VISION):
                    yield rope(ne_a=(36, 16, 2457, 1), n_dims=36, mode=mode, v=2, **rest)
            every = False
    for p in grid(type=(F32, F16), mode=(NORMAL, NEOX, MROPE, IMROPE, VISION), ff=(False, True)):
        for ne3, v in ((1, 0), (1, 1), (3, 1)):
            yield rope(p["type"], (128, 32, 2, ne3), 128, p["mode"], *YARN, p["ff"], v, True, True)
    for type in (F32, F16):
        for forward, ff in ((a, b) for a in (True, False) for b in (False, True)):
            for heads, n_dims, mode in ((32, 32, NORMAL), (32, 32, NEOX), (12, 24, MROPE), (12, 24, IMROPE)):
                yield rope(type, (128, heads, 2, 1), n_dims, mode, *YARN, ff, 0, forward, False, 32)
        yield rope(type, (128, 32, 2, 1), 32, NEOX, *YARN, False, 0, True, True, 32)


FAMILIES = (rope_cases,)
