"""Padding, rolling, triangles, generated tensors and resampling."""
from ggjit.tools.suite.cases.case import F32, SuiteCase, grid, vars_of

NEAREST, BILINEAR, BICUBIC, ALIGN_CORNERS, ANTIALIAS = 0, 1, 2, 1 << 8, 1 << 9
BIG = (512, 512, 1, 1)


def pad(ne_a, pad_0, pad_1, circular=False):
    return SuiteCase("pad", "PAD", vars_of(type=F32, ne_a=ne_a, pad_0=pad_0, pad_1=pad_1, circular=circular), lambda m:
                     (m.pad_circular if circular else m.pad)(m.new(F32, ne_a), pad_0, pad_1, 0, 0))


def pad_cases():
    yield pad(BIG, 1, 1)
    yield pad((33, 17, 2, 1), 4, 3, True)
    for n0, n1, p0, p1 in ((1024, 1, 1, 0), (1024, 2, 1, 0), (1024, 16, 0, 1), (1023, 1, 1, 0), (1023, 8, 1, 0),
                           (1025, 1, 1, 0), (1025, 8, 1, 0), (2048, 1, 1, 0), (2048, 4, 1, 0), (2049, 1, 1, 0),
                           (100, 1, 100, 0), (100, 1, 0, 100), (100, 100, 50, 50)):
        yield pad((n0, n1, 1, 1), p0, p1)


def pad_ext(ne_a, pads, tfrm, circular):
    """tfrm: 1 the corner half of a, 2 permuted."""
    def build(m):
        a = m.new(F32, ne_a)
        if tfrm == 1:
            a = m.window(a, tuple((n + 1) // 2 for n in ne_a))
        elif tfrm == 2:
            a = m.permute(a, 2, 1, 0, 3)
        return (m.pad_ext_circular if circular else m.pad_ext)(a, *pads)
    names = ("lp0", "rp0", "lp1", "rp1", "lp2", "rp2", "lp3", "rp3")
    return SuiteCase("pad_ext", "PAD", vars_of(type=F32, ne_a=ne_a, **dict(zip(names, pads, strict=True)), tfrm=tfrm,
                                               circular=circular), build)


def pad_ext_cases():
    yield pad_ext((512, 512, 3, 1), (1,) * 8, 0, False)
    for p in grid(tfrm=(0, 1, 2), circular=(False, True)):
        yield pad_ext(BIG, (0, 1, 0, 1, 0, 0, 0, 0), **p)
        yield pad_ext((11, 22, 33, 44), (1, 2, 3, 4, 5, 6, 7, 8), **p)


def pad_reflect_cases():
    for ne in ((512, 34, 2, 1), (3000, 384, 4, 1)):     # ggml's test makes a matrix of the first two dimensions
        yield SuiteCase("pad_reflect_1d", "PAD_REFLECT_1D", vars_of(type=F32, ne_a=ne, pad_0=10, pad_1=9),
                        lambda m, ne=ne: m.pad_reflect_1d(m.new(F32, ne[:2]), 10, 9))


def roll_cases():
    shifts = (3, -2, 1, -1)
    for permute in (False, True):
        def build(m, permute=permute):
            a = m.new(F32, (10, 5, 4, 3))
            return m.roll(m.permute(a, 0, 2, 1, 3) if permute else a, *shifts)
        yield SuiteCase("roll", "ROLL", vars_of(shift0=3, shift1=-2, shift3=1, shift4=-1, permute=permute), build)


def generated_cases():
    for stop in (10.0, 1048576.0):
        yield SuiteCase("arange", "ARANGE", vars_of(type=F32, start=0.0, stop=stop, step=1.0),
                        lambda m, stop=stop: m.arange(m.ctx, 0.0, stop, 1.0))
    yield SuiteCase("timestep_embedding", "TIMESTEP_EMBEDDING", vars_of(type=F32, ne_a=(2, 1, 1, 1), dim=320,
                                                                        max_period=10000),
                    lambda m: m.timestep_embedding(m.new(F32, (2,)), 320, 10000))


def triangle_cases():
    ne = (10, 10, 4, 3)
    for kind in (3, 2, 1, 0):                           # LOWER, LOWER_DIAG, UPPER, UPPER_DIAG
        yield SuiteCase("tri", "TRI", vars_of(type=F32, ne=ne, tri_type=kind),
                        lambda m, kind=kind: m.tri(m.new(F32, ne), kind))
    for ne_d in ((10, 1, 4, 3), (79, 1, 19, 13), (256, 1, 8, 16)):
        yield SuiteCase("diag", "DIAG", vars_of(type=F32, ne=ne_d), lambda m, ne=ne_d: m.diag(m.new(F32, ne)))
    for ne_m in ((10, 10, 1, 1), (10, 10, 3, 1), (10, 10, 3, 2)):
        yield SuiteCase("diag_mask_inf", "DIAG_MASK_INF", vars_of(type=F32, ne=ne_m, n_past=5),
                        lambda m, ne=ne_m: m.diag_mask_inf(m.new(F32, ne), 5))


def mode_text(mode):
    return (("nearest", "bilinear", "bicubic")[mode & 0xFF] + ("|align_corners" if mode & ALIGN_CORNERS else "")
            + ("|antialias" if mode & ANTIALIAS else ""))


def interpolate(ne, ne_tgt, mode):
    return SuiteCase("interpolate", "UPSCALE", vars_of(type=F32, ne=ne, ne_tgt=ne_tgt, mode=mode_text(mode)),
                     lambda m: m.interpolate(m.new(F32, ne), *ne_tgt, mode))


def upscale_cases():
    for mode in (NEAREST, BILINEAR, BICUBIC, BILINEAR | ANTIALIAS):
        for transpose in (False, True):
            def build(m, mode=mode, transpose=transpose):
                a = m.new(F32, (512, 512, 3, 2))
                return m.upscale(m.transpose(a) if transpose else a, 2, mode)
            yield SuiteCase("upscale", "UPSCALE", vars_of(type=F32, ne=(512, 512, 3, 2), scale_factor=2,
                                                          mode=mode_text(mode), transpose=transpose), build)
        yield interpolate((2, 5, 7, 11), (5, 7, 11, 13), mode)
        yield interpolate((5, 7, 11, 13), (2, 5, 7, 11), mode)
    for mode in (BILINEAR | ALIGN_CORNERS, BICUBIC | ALIGN_CORNERS):
        yield interpolate((2, 5, 7, 11), (5, 7, 11, 13), mode)
        yield interpolate((1, 4, 3, 2), (2, 8, 3, 2), mode)
        yield interpolate((4, 1, 3, 2), (1, 1, 3, 2), mode)


FAMILIES = (pad_cases, pad_ext_cases, pad_reflect_cases, roll_cases, generated_cases, triangle_cases, upscale_cases)
