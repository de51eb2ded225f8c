"""Convolutions, their unfolded forms, and pooling."""
import itertools

from ggjit.tools.suite.cases.case import BF16, F16, F32, SuiteCase, grid, vars_of

MAX, AVG = 0, 1                                         # GGML_OP_POOL_*


def out_size(n, k, s, p, d):
    """C's division: a kernel that hangs over the padded input by less than a stride still gives one output."""
    return int((n + 2 * p - d * (k - 1) - 1) / s) + 1


def pool2d_cases():
    ne = (10, 10, 3, 1)
    for p in grid(pool=(AVG, MAX), k0=(1, 3), k1=(1, 3), s0=(1, 2), s1=(1, 2), p0=(0, 1), p1=(0, 1)):
        args = tuple(p.values())
        pool = "max" if p.pop("pool") == MAX else "avg"
        yield SuiteCase("pool2d", "POOL_2D", vars_of(pool_type=pool, type_input=F32, ne_input=ne, **p),
                        lambda m, args=args: m.pool_2d(m.new(F32, ne), *args))


def pool1d_cases():
    for p in grid(pool=(AVG, MAX), k0=(1, 2, 3), s0=(1, 2, 3), p0=(0, 1, 2, 3)):
        args = tuple(p.values())
        pool = "max" if p.pop("pool") == MAX else "avg"
        for ne in ((10, 3, 2, 1), (11, 1, 3, 2), (128, 2, 1, 3)):
            yield SuiteCase("pool1d", "POOL_1D", vars_of(pool_type=pool, type_input=F32, ne_input=ne, **p),
                            lambda m, ne=ne, args=args: m.pool_1d(m.new(F32, ne), *args))


def im2col(kernel_type, dst_type, ne_input, ne_kernel, s0=1, s1=1, p0=1, p1=1, d0=1, d1=1, is_2D=True):
    steps = dict(s0=s0, s1=s1, p0=p0, p1=p1, d0=d0, d1=d1, is_2D=is_2D)

    def build(m):
        x, kernel = m.new(F32, ne_input), m.new(kernel_type, ne_kernel)
        return m.im2col(kernel, x, *steps.values(), dst_type)
    return SuiteCase("im2col", "IM2COL", vars_of(type_input=F32, type_kernel=kernel_type, dst_type=dst_type,
                                                 ne_input=ne_input, ne_kernel=ne_kernel, **steps), build)


def im2col_cases():
    line = (1, 0, 1, 0, 1, 0, False)
    for kernel, dst, n in ((F32, F32, (128, 1280)), (F16, F32, (128, 1280)), (F16, F16, (128, 1280)),
                           (F16, F16, (384, 384))):
        yield im2col(kernel, dst, (3000, n[0], 1, 1), (3, *n, 1), *line)
    for s0, p0, d0 in itertools.product((1, 3), (0, 3), (1, 3)):
        yield im2col(F32, F32, (20, 2, 2, 1), (3, 2, 2, 1), s0, 0, p0, 0, d0, 0, False)
    for kernel, dst in itertools.product((F32, F16), (F32, F16)):
        yield im2col(kernel, dst, (10, 10, 3, 1), (3, 3, 3, 1))
    for p in grid(s0=(1, 3), s1=(1, 3), p0=(0, 3), p1=(0, 3), d0=(1, 3), d1=(1, 3)):
        yield im2col(F32, F32, (20, 20, 2, 2), (3, 3, 2, 2), *p.values())
    for n, c in itertools.product((32, 1024, 2048, 2560), (1, 2)):
        yield im2col(F16, F16, (12, 12, c, n), (3, 3, c, n))
    yield im2col(F16, F16, (5, 5, 1, 32), (3, 4, 1, 32), 1, 1, 0, 0)
    yield im2col(F32, F32, (2, 2, 1536, 729), (2, 2, 1536, 4096), 1, 1, 0, 0)
    yield im2col(F16, F16, (128, 128, 1, 2), (32, 33, 1, 2))
    yield im2col(F16, F16, (128, 128, 2, 1), (33, 34, 2, 1))


def im2col_3d(kernel_type, dst_type, ne_input, ne_kernel, IC, steps, v):
    def build(m):
        x, kernel = m.new(F32, ne_input), m.new(kernel_type, ne_kernel)
        x = m.window(x, tuple(n - 2 for n in ne_input)) if v else x
        return m.im2col_3d(kernel, x, IC, *steps.values(), dst_type)
    return SuiteCase("im2col_3d", "IM2COL_3D", vars_of(type_input=F32, type_kernel=kernel_type, dst_type=dst_type,
                                                       ne_input=ne_input, ne_kernel=ne_kernel, IC=IC, **steps,
                                                       v=v), build)


def im2col_3d_cases():
    names = ("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2")
    ones = dict.fromkeys(names, 1)
    for kernel, dst in ((F32, F32), (F16, F32), (F16, F16)):
        yield im2col_3d(kernel, dst, (10, 10, 10, 9), (3, 3, 3, 1), 3, ones, False)
    for p in grid(**{n: (0, 3) if n[0] == "p" else (1, 3) for n in names}):
        for IC, v in itertools.product((1, 3), (False, True)):
            yield im2col_3d(F32, F32, (20, 20, 10, 3), (3, 3, 3, 3), IC, p, v)


def _sources(m, ne_input, ne_kernel, type_kernel, cwhn):
    """Input and kernel; cwhn: the channel is the fastest dimension in memory, under the same ne."""
    x, kernel = m.new(F32, ne_input), m.new(type_kernel, ne_kernel)
    if cwhn:
        x = m.permute(m.cont(m.permute(x, 1, 2, 0, 3)), 2, 0, 1, 3)
        kernel = m.permute(m.cont(m.permute(kernel, 2, 3, 1, 0)), 3, 2, 0, 1)
    return kernel, x


def conv_2d(ne_input, ne_kernel, type_kernel, steps, cwhn):
    names = ("stride0", "stride1", "padding0", "padding1", "dilation0", "dilation1")
    return SuiteCase("conv_2d", "CONV_2D", vars_of(ne_input=ne_input, ne_kernel=ne_kernel, type_kernel=type_kernel,
                                                   **dict(zip(names, steps, strict=True)), cwhn=cwhn),
                     lambda m: m.conv_2d_direct(*_sources(m, ne_input, ne_kernel, type_kernel, cwhn), *steps), 5e-4)


def conv_2d_cases():
    s1, p0, d0, d1 = 5, 5, 2, 4
    for p in grid(s0=(1, 3), p1=(2, 5), Cin=(1, 25), Cout=(1, 12), KH=(1, 2, 3, 11), KW=(1, 2, 3, 11), H=(1, 133),
                  W=(1, 141)):
        s0, p1, c_in, c_out, kh, kw, h, w = p.values()
        if out_size(w, kw, s0, p0, d0) > 0 and out_size(h, kh, s1, p1, d1) > 0:
            for type, cwhn in itertools.product((F32, F16), (False, True)):
                yield conv_2d((w, h, c_in, 2), (kw, kh, c_in, c_out), type, (s0, s1, p0, p1, d0, d1), cwhn)
    for type, cwhn in itertools.product((F32, F16), (False, True)):
        yield conv_2d((256, 256, 192, 1), (3, 3, 192, 96), type, (1,) * 6, cwhn)


def conv_2d_dw_cases():
    for type, (ne_x, ne_k, s, p), cwhn in itertools.product((F32, F16), (
            ((17, 34, 9, 1), (3, 3, 1, 9), 1, 0), ((32, 8, 64, 1), (3, 3, 1, 64), 2, 1)), (False, True)):
        def build(m, type=type, ne_x=ne_x, ne_k=ne_k, s=s, p=p, cwhn=cwhn):
            return m.conv_2d_dw_direct(*_sources(m, ne_x, ne_k, type, cwhn), s, s, p, p, 1, 1)
        yield SuiteCase("conv_2d_dw", "CONV_2D_DW", vars_of(ne_input=ne_x, ne_kernel=ne_k, type_kernel=type, stride=s,
                                                            padding=p, dilation=1, cwhn=cwhn), build)


def conv_3d(N, IC, size, OC, kernel, steps, type_kernel):
    """size (ID, IH, IW), kernel (KD, KH, KW), steps (s0..s2, p0..p2, d0..d2)."""
    def build(m):
        x = m.new(F32, (*reversed(size), IC * N))
        w = m.new(type_kernel, (*reversed(kernel), IC * OC))
        return m.conv_3d_direct(w, x, *steps, IC, N, OC)
    names = ("N", "IC", "ID", "IH", "IW", "OC", "KD", "KH", "KW", "s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2")
    values = (N, IC, *size, OC, *kernel, *steps)
    return SuiteCase("conv_3d", "CONV_3D", vars_of(**dict(zip(names, values, strict=True)), type_kernel=type_kernel),
                     build, 5e-4)


def conv_3d_cases():
    size = (18, 22, 20)
    for type in (F32, F16):
        for p in grid(N=(1, 2), IC=(1, 3), OC=(1, 4), s=(1, 2), p=(0, 1), d=(1, 2)):
            rest = (type,)
            steps = (*(p["s"],) * 3, *(p["p"],) * 3, *(p["d"],) * 3)
            yield conv_3d(p["N"], p["IC"], size, p["OC"], (3, 3, 3), steps, *rest)
            yield conv_3d(p["N"], p["IC"], size, p["OC"], (3, 1, 5), (2, 1, 1, 2, 0, 1, 1, 1, 2), *rest)
        yield conv_3d(1, 4, (8, 8, 8), 8, (1, 1, 1), (1, 1, 1, 0, 0, 0, 1, 1, 1), type)


def conv_transpose_1d(ne_input, ne_kernel, s0):
    def build(m):
        x, kernel = m.new(F32, ne_input), m.new(F32, ne_kernel)
        return m.conv_transpose_1d(kernel, x, s0, 0, 1)
    return SuiteCase("conv_transpose_1d", "CONV_TRANSPOSE_1D",
                     vars_of(ne_input=ne_input, ne_kernel=ne_kernel, s0=s0, p0=0,
                             d0=1), build)


def conv_transpose_cases():
    for p in grid(c_out=(1, 9), c_in=(1, 7), k=(1, 3, 1337), n=(1, 2, 13), s0=(1, 2, 3)):
        yield conv_transpose_1d((p["n"], p["c_in"], 1, 1), (p["k"], p["c_out"], p["c_in"], 1), p["s0"])
    for x, k, s0 in (((197, 32), (16, 32, 32), 1), ((3, 2), (2, 3, 2), 3), ((3, 2), (2, 3, 2), 2),
                     ((3, 2), (2, 3, 2), 1), ((3, 2), (3, 2, 2), 2), ((3, 2), (3, 2, 2), 1), ((3, 2), (3, 1, 2), 1),
                     ((2, 1), (3, 1, 1), 1)):
        yield conv_transpose_1d((*x, 1, 1), (*k, 1), s0)
    for type in (F32, F16):
        for x, k, s in (((3, 2, 3, 1), (2, 2, 1, 3), 1), ((10, 10, 9, 1), (3, 3, 1, 9), 2),
                        ((129, 63, 35, 1), (3, 3, 48, 35), 1)):
            def build(m, type=type, x=x, k=k, s=s):
                b = m.new(F32, x)
                return m.conv_transpose_2d_p0(m.new(type, k), b, s)
            yield SuiteCase("conv_transpose_2d", "CONV_TRANSPOSE_2D", vars_of(kernel_type=type, ne_input=x, ne_kernel=k,
                                                                              stride=s), build, 5e-4)


def col2im_cases():
    for type, (K, OC, T, s0, p0) in itertools.product((F32, F16, BF16), (
            (16, 32, 197, 8, 0), (4, 3, 7, 2, 0), (1, 5, 13, 1, 0), (6, 4, 11, 3, 1), (2, 3, 9, 3, 0), (5, 4, 11, 2, 0),
            (8, 4, 13, 4, 2), (4, 3, 1, 2, 0), (16, 1, 197, 8, 0), (1, 5, 13, 3, 0), (8, 2, 3, 2, 5))):
        def build(m, type=type, K=K, OC=OC, T=T, s0=s0, p0=p0):
            return m.col2im_1d(m.new(type, (K * OC, T)), s0, OC, p0)
        yield SuiteCase("col2im_1d", "COL2IM_1D", vars_of(type=type, K=K, OC=OC, T_in=T, s0=s0, p0=p0), build,
                        1e-7 if type is F32 else 5e-4)


FAMILIES = (pool2d_cases, pool1d_cases, im2col_cases, im2col_3d_cases, conv_2d_cases, conv_2d_dw_cases, conv_3d_cases,
            conv_transpose_cases, col2im_cases)
