"""State space models, linear attention, delta nets, hyper-connections, triangular systems."""
import itertools

from ggjit.tools.suite.cases.case import F32, I32, SuiteCase, vars_of
from ggjit.tools.suite.cases.inputs import shuffled, triangle, uniform

DECAY = uniform(-1.0, -0.5)


def ssm_conv_shapes():
    for d_conv, d_inner in itertools.product((3, 4, 9), (1024, 1536, 2048)):
        for n, s in ((d_conv, 1), (2 * d_conv, 1), (d_conv, 4), (d_conv - 1 + 64, 1), (d_conv - 1 + 64, 4)):
            yield (n, d_inner, s, 1), (d_conv, d_inner, 1, 1)


def ssm_conv_cases():
    for ne_a, ne_b in ssm_conv_shapes():
        yield SuiteCase("ssm_conv", "SSM_CONV", vars_of(type=F32, ne_a=ne_a, ne_b=ne_b),
                        lambda m, ne_a=ne_a, ne_b=ne_b: m.ssm_conv(m.new(F32, ne_a), m.new(F32, ne_b)))


def scan_sources(m, d_state, head_dim, n_head, n_group, n_seq_tokens, n_seqs, xbc_overlap=False):
    """s, x, dt, A, B, C, ids of ssm_scan; xbc_overlap: x, B and C are windows of one tensor."""
    s = m.new(F32, (d_state, head_dim, n_head, n_seqs))
    dt = m.new(F32, (n_head, n_seq_tokens, n_seqs))
    A = m.new(F32, (1 if head_dim > 1 else d_state, n_head), DECAY)
    ne_x, ne_b = (head_dim, n_head, n_seq_tokens, n_seqs), (d_state, n_group, n_seq_tokens, n_seqs)
    if xbc_overlap:
        xbc = m.new(F32, (d_state, n_head, n_seq_tokens, 2 * n_seqs))
        x, B, C = m.window(xbc, ne_x, xbc.nb[3]), m.window(xbc, ne_b), m.window(xbc, ne_b, 2 * xbc.nb[3])
    else:
        x, B, C = m.new(F32, ne_x), m.new(F32, ne_b), m.new(F32, ne_b)
    return s, x, dt, A, B, C, m.new(I32, (n_seqs,), shuffled())


SCAN = ("d_state", "head_dim", "n_head", "n_group", "n_seq_tokens", "n_seqs")


def ssm_scan(*sizes, xbc_overlap=False, K=1):
    params = vars_of(type=F32, **dict(zip(SCAN, sizes, strict=True)), xbc_overlap=xbc_overlap, K=K)
    return SuiteCase("ssm_scan", "SSM_SCAN", params, lambda m: m.ssm_scan(*scan_sources(m, *sizes, xbc_overlap), K),
                     2e-7 if sizes[1] > 1 else 1e-7)


def ssm_scan_cases():
    yield ssm_scan(16, 1, 1024, 1, 32, 4)               # Mamba-1
    yield ssm_scan(128, 64, 16, 2, 32, 4)               # Mamba-2
    yield ssm_scan(256, 64, 8, 2, 32, 4)                # Falcon-H1
    yield ssm_scan(128, 128, 4, 4, 16, 2, xbc_overlap=True)
    yield ssm_scan(128, 80, 128, 1, 256, 1)
    yield ssm_scan(128, 80, 128, 1, 512, 1)
    yield ssm_scan(128, 64, 80, 8, 300, 2)
    yield ssm_scan(128, 64, 16, 2, 4, 2, K=4)
    yield ssm_scan(128, 64, 16, 2, 8, 2, K=3)


def rollback_cases():
    """Snapshots of the last K states equal the final states of scans over shorter sequences."""
    sizes, K = (128, 64, 16, 2, 8, 2), 3
    d_state, head_dim, n_head, n_group, n_tokens, n_seqs = sizes

    def build(m):
        s, x, dt, A, B, C, ids = scan_sources(m, *sizes)
        full = m.ssm_scan(s, x, dt, A, B, C, ids, K)
        n_state, out = d_state * head_dim * n_head * n_seqs, None
        for slot in range(K):
            n = n_tokens - slot
            short = [m.cont(m.window(t, ne)) for t, ne in (
                (x, (head_dim, n_head, n, n_seqs)), (B, (d_state, n_group, n, n_seqs)),
                (C, (d_state, n_group, n, n_seqs)))]
            dt_short = m.cont(m.view_3d(dt, n_head, n, n_seqs, dt.nb[1], dt.nb[2], 0))
            prefix = m.ssm_scan(s, short[0], dt_short, A, *short[1:], ids, 1)
            states = [m.view_1d(t, n_state, 4 * (head_dim * n_head * n_y * n_seqs + skip)) for t, n_y, skip in (
                (full, n_tokens, slot * n_state), (prefix, n, 0))]
            diff = m.sum(m.sqr(m.sub(*states)))
            out = diff if out is None else m.add(out, diff)
        return out
    params = vars_of(type=F32, **dict(zip(SCAN, sizes, strict=True)), K=K)
    yield SuiteCase("ssm_scan_rollback", "SSM_SCAN_ROLLBACK", params, build, 1e-6, "largest", whole=True)


def rwkv_cases():
    H, S = 32, 64

    def tokens(m, T, n):
        return [m.new(F32, (S, H, T)) for _ in range(n)]

    def wkv6(m, T, n_seqs):
        k, v, r, td = tokens(m, T, 4)
        return m.rwkv_wkv6(k, v, r, m.new(F32, (S, H)), td, m.new(F32, (S * S * H, n_seqs)))

    def wkv7(m, T, n_seqs):
        r, w, k, v, a, b = tokens(m, T, 6)
        return m.rwkv_wkv7(r, w, k, v, m.l2_norm(a, 1e-7), m.l2_norm(b, 1e-7), m.new(F32, (S * S * H, n_seqs)))

    def gla(m, T, n_seqs):
        k, v, q, g = tokens(m, T, 4)
        return m.gated_linear_attn(k, v, q, g, m.new(F32, (S * S * H, n_seqs)), S ** -0.5)
    for family, op, f, sizes in (
            ("rwkv_wkv6", "RWKV_WKV6", wkv6, ((1, 1), (32, 1), (32, 4), (128, 4))),
            ("rwkv_wkv7", "RWKV_WKV7", wkv7, ((1, 1), (1, 4), (32, 1), (32, 4), (128, 4))),
            ("gla", "GATED_LINEAR_ATTN", gla, ((1, 1), (32, 1), (32, 4), (128, 4)))):
        for n, s in sizes:
            yield SuiteCase(family, op, vars_of(type=F32, head_count=H, head_size=S, n_seq_tokens=n, n_seqs=s),
                            lambda m, f=f, n=n, s=s: f(m, n * s, s))


def gated_delta_net(head_count, head_size, n_seq_tokens, n_seqs, v_repeat=1, permuted=False, kda=False, K=1):
    H, S, T = head_count, head_size, n_seq_tokens

    def tokens(m, heads, init=None):
        if permuted:
            return m.permute(m.new(F32, (S, T, heads, n_seqs), init), 0, 2, 1, 3)
        return m.new(F32, (S, heads, T, n_seqs), init)

    def build(m):
        q, k = tokens(m, H), tokens(m, H)
        # ggml's ranges hang on the tensor's name, which the permuted v does not pass on
        v = tokens(m, H * v_repeat, None if permuted else uniform(-0.3, 5.0))
        g = m.new(F32, (S if kda else 1, H * v_repeat, T, n_seqs), uniform(-20.0, -1e-4))
        beta = m.new(F32, (1, H * v_repeat, T, n_seqs), uniform(0.0, 1.0))
        state = m.new(F32, (S, S, H * v_repeat, n_seqs))
        return m.gated_delta_net(m.l2_norm(q, 1e-6), m.l2_norm(k, 1e-6), v, g, beta, state, K)
    params = vars_of(type=F32, head_count=H, head_size=S, n_seq_tokens=T, n_seqs=n_seqs, v_repeat=v_repeat,
                     permuted=permuted, kda=kda, K=K)
    return SuiteCase("gated_delta_net", "GATED_DELTA_NET", params, build)


DELTA = (
    (32, 128, 1, 1), (32, 16, 1, 1), (32, 16, 1, 1, 1, True, True), (32, 16, 1, 1, 1, False, True), (16, 64, 1, 2),
    (4, 64, 4, 1), (4, 64, 4, 2), (8, 32, 4, 2, 2), (4, 64, 4, 2, 1, True), (4, 64, 4, 1, 1, True),
    *((h, s, t, n, r, p, True) for h, s, t, n, r, p in (
        (4, 64, 1, 1, 1, False), (4, 64, 1, 2, 1, False), (4, 16, 1, 2, 1, False), (4, 32, 4, 1, 1, False),
        (4, 64, 4, 2, 1, False), (8, 32, 4, 2, 2, False), (4, 64, 4, 2, 1, True), (4, 16, 4, 2, 1, True))),
    *((4, 64, t, n) for t, n in ((64, 1), (127, 1), (256, 1), (65, 1), (100, 1), (200, 1), (127, 2))),
    *((4, 64, t, 1, 1, False, True) for t in (64, 33, 100)),
    (4, 16, 2, 1, 1, False, False, 2), (4, 32, 4, 1, 1, False, False, 4), (4, 64, 4, 2, 1, False, False, 4),
    (8, 128, 4, 1, 1, False, False, 4), (4, 64, 4, 2, 1, False, True, 4), (8, 32, 4, 2, 2, False, True, 4),
    (4, 32, 8, 1, 1, False, False, 3), (4, 64, 16, 2, 1, False, False, 4))


def gated_delta_net_cases():
    return (gated_delta_net(*p) for p in DELTA)


def hyper_connection_cases():
    hc, unit = 4, uniform(0.0, 1.0)
    for n_tokens, n_iter in ((1, 1), (17, 4), (257, 8), (17, 20)):
        yield SuiteCase("dsv4_hc_comb", "DSV4_HC_COMB", vars_of(n_tokens=n_tokens, n_iter=n_iter, eps=1e-6),
                        lambda m, n=n_tokens, k=n_iter: m.dsv4_hc_comb(
                            m.new(F32, ((2 + hc) * hc, n), uniform(-2.0, 2.0)), m.new(F32, (3,), uniform(-0.5, 0.5)),
                            m.new(F32, ((2 + hc) * hc,), uniform(-0.25, 0.25)), 1e-6, k))
    sizes = ((1, 1), (31, 17), (128, 257), (4096, 21))
    for e, n in sizes:
        yield SuiteCase("dsv4_hc_pre", "DSV4_HC_PRE", vars_of(n_embd=e, n_tokens=n), lambda m, e=e, n=n:
                        m.dsv4_hc_pre(m.new(F32, (e, hc, n)), m.new(F32, (hc, n), unit)))
    for e, n in sizes:
        yield SuiteCase("dsv4_hc_post", "DSV4_HC_POST", vars_of(n_embd=e, n_tokens=n),
                        lambda m, e=e, n=n: m.dsv4_hc_post(
            m.new(F32, (e, n)), m.new(F32, (e, hc, n)), m.new(F32, (hc, n), uniform(0.0, 2.0)),
            m.new(F32, (hc, hc, n), unit)))


SOLVE = (((10, 4, 3), 3), ((11, 1, 1), 5), ((17, 2, 4), 9), ((30, 7, 1), 8), ((42, 5, 2), 10), ((64, 2, 2), 10),
         ((64, 2, 2), 64), ((79, 5, 3), 417), ((128, 4, 2), 32), ((80, 2, 8), 80), ((80, 2, 8), 79), ((80, 2, 8), 81),
         ((80, 8, 8), 80), ((80, 8, 8), 79), ((80, 8, 8), 81), ((84, 4, 4), 32), ((95, 8, 8), 40), ((100, 4, 4), 41),
         ((128, 4, 4), 31), ((128, 4, 4), 32), ((128, 3, 4), 32), ((128, 4, 1), 32), ((64, 4, 4), 200),
         ((64, 4, 4), 384))


def solve_tri_cases():
    for (n, *batch), k in SOLVE:
        lhs, rhs = (n, n, *batch), (k, n, *batch)
        yield SuiteCase("solve_tri", "SOLVE_TRI", vars_of(type=F32, ne_lhs=lhs, ne_rhs=rhs), lambda m, lhs=lhs, rhs=rhs:
                        m.solve_tri(m.new(F32, lhs, triangle(0.1, 1.0)), m.new(F32, rhs), True, True, False))


FAMILIES = (ssm_conv_cases, ssm_scan_cases, rollback_cases, rwkv_cases, gated_delta_net_cases, hyper_connection_cases,
            solve_tri_cases)
