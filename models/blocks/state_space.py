"""Selective state spaces: Mamba 1 and 2, and PLaMo 2's.  Source: arXiv 2312.00752, 2405.21060.

    x, z     = Win n                                Mamba 2: x, B, C, z and dt
    x        = silu(conv(x) + bias)                 Mamba 2: of x, B and C
    dt, B, C = Wx x,  dt = Wdt dt + bias            Mamba 2: dt + bias
    h        = exp(softplus(dt) A) h + softplus(dt) B x,   y = C h + D x
    result   = Wout (silu(z) * y)                   Mamba 2: y is normed by group before Wout
"""
import dataclasses

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.short_conv import convolved, state


@dataclasses.dataclass(frozen=True)
class Mamba:
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int
    norms: str = ""                     # of dt, B and C, a kind of Scope.norm: "rms bare" (FalconMamba), "rms" (Jamba)

    def cache(self, sizes):
        return [state(sizes, 0, (self.d_conv - 1) * self.d_inner), state(sizes, 1, self.d_state * self.d_inner)]

    def load(self, loader, p):
        d, f, s, r, want, p = loader.n_embd, self.d_inner, self.d_state, self.dt_rank, loader.want, p + "ssm_"
        w = {"in": loader.linear(p + "in", d, 2 * f, False), "x": loader.linear(p + "x", f, r + 2 * s, False),
             "dt": loader.linear(p + "dt", r, f, True), "out": loader.linear(p + "out", f, d, False),
             "conv": want(p + "conv1d.weight", self.d_conv, f), "conv_bias": want(p + "conv1d.bias", f),
             "a": want(p + "a", s, f), "d": want(p + "d", f)}
        return w | _picking_norms(loader, p, self.norms, r, s)

    def build(self, g, n, w, i):
        t, f, s, r = g.n_tokens, self.d_inner, self.d_state, self.dt_rank
        xz = linear(w["in"], n)
        x, z = (gg.view_2d(xz, f, t, xz.nb[1], j * f * xz.nb[0]) for j in range(2))
        x = gg.silu(gg.add(convolved(g, i, 0, x, w["conv"]), w["conv_bias"]))
        db = linear(w["x"], x)
        dt = gg.view_2d(db, r, t, db.nb[1], 0)
        n = g.n_each, g.n_seqs
        b, c = (gg.view_4d(db, s, 1, *n, s * db.nb[0], db.nb[1], n[0] * db.nb[1], (r + j * s) * db.nb[0])
                for j in range(2))
        if self.norms:
            dt, b, c = (g.norm(v, self.norms, w[name + "_norm"]) for v, name in ((dt, "dt"), (b, "b"), (c, "c")))
        dt = gg.reshape_3d(linear(w["dt"], dt), f, *n)
        y = scanned(g, i, gg.reshape_4d(x, 1, f, *n), dt, w["a"], b, c)
        y = gg.add(gg.set_name(gg.reshape_2d(y, f, t), f"scan-{i}"), gg.mul(x, w["d"]))
        return linear(w["out"], gg.swiglu_split(gg.cont(z), y))


@dataclasses.dataclass(frozen=True)
class Mamba2:
    d_inner: int
    d_state: int
    d_conv: int
    n_head: int
    n_group: int
    normed: bool = True                 # y has a norm

    @property
    def n_conv(self):
        return self.d_inner + 2 * self.n_group * self.d_state

    def cache(self, sizes):
        return [state(sizes, 0, (self.d_conv - 1) * self.n_conv), state(sizes, 1, self.d_state * self.d_inner)]

    def load(self, loader, p):
        d, f, h, c, want, p = loader.n_embd, self.d_inner, self.n_head, self.n_conv, loader.want, p + "ssm_"
        w = {"in": loader.linear(p + "in", d, f + c + h, False), "out": loader.linear(p + "out", f, d, False),
             "conv": want(p + "conv1d.weight", self.d_conv, c), "conv_bias": want(p + "conv1d.bias", c),
             "dt_bias": want(p + "dt.bias", h), "a": want(p + "a", 1, h), "d": want(p + "d", 1, h)}
        return w | ({"ssm_norm": want(p + "norm.weight", f // self.n_group, self.n_group)} if self.normed else {})

    def build(self, g, n, w, i):
        t, f, s, h, groups = g.n_tokens, self.d_inner, self.d_state, self.n_head, self.n_group
        zxbcdt = linear(w["in"], n)
        row, size = zxbcdt.nb[1], zxbcdt.nb[0]
        z = gg.view_2d(zxbcdt, f, t, row, 0)
        xbc = gg.view_2d(zxbcdt, self.n_conv, t, row, f * size)
        dt = gg.add(gg.cont(gg.view_2d(zxbcdt, h, t, row, (f + self.n_conv) * size)), w["dt_bias"])
        xbc = gg.silu(gg.add(convolved(g, i, 0, xbc, w["conv"]), w["conv_bias"]))
        row, n = xbc.nb[1], (g.n_each, g.n_seqs)
        x = gg.view_4d(xbc, f // h, h, *n, f // h * size, row, n[0] * row, 0)
        b, c = (gg.view_4d(xbc, s, groups, *n, s * size, row, n[0] * row, (f + j * groups * s) * size)
                for j in range(2))
        y = scanned(g, i, x, gg.reshape_3d(dt, h, *n), w["a"], b, c)
        y = gg.set_name(gg.reshape_3d(y, f // h, h, t), f"scan-{i}")
        y = gg.add(gg.reshape_4d(y, f // h, h, *n), gg.mul(x, w["d"]))
        y = gg.swiglu_split(gg.cont(z), gg.reshape_2d(y, f, t))
        if self.normed:
            y = gg.mul(gg.rms_norm(gg.reshape_3d(y, f // groups, groups, t), g.eps), w["ssm_norm"])
        return linear(w["out"], gg.reshape_2d(y, f, t))


@dataclasses.dataclass(frozen=True)
class MambaByHead:
    """PLaMo 2: dt, B and C as Mamba 1 chooses them, with norms; one dt, A and D for each of Mamba 2's heads.

    z and x of a head lie side by side in Win n.
    """
    d_inner: int
    d_state: int
    d_conv: int
    n_head: int
    dt_rank: int

    def cache(self, sizes):
        return [state(sizes, 0, (self.d_conv - 1) * self.d_inner), state(sizes, 1, self.d_state * self.d_inner)]

    def load(self, loader, p):
        d, f, s, r, h, want, p = (loader.n_embd, self.d_inner, self.d_state, self.dt_rank, self.n_head, loader.want,
                                  p + "ssm_")
        w = {"in": loader.linear(p + "in", d, 2 * f, False), "x": loader.linear(p + "x", f, r + 2 * s, False),
             "dt": loader.linear(p + "dt", r, h, True), "out": loader.linear(p + "out", f, d, False),
             "conv": want(p + "conv1d.weight", self.d_conv, f), "a": want(p + "a", h), "d": want(p + "d", h)}
        return w | _picking_norms(loader, p, "rms", r, s)

    def build(self, g, n, w, i):
        t, f, s, h, r = g.n_tokens, self.d_inner, self.d_state, self.n_head, self.dt_rank
        each = f // h
        zx = linear(w["in"], n)
        z, x = (gg.reshape_2d(gg.cont(gg.view_3d(zx, each, h, t, 2 * each * zx.nb[0], zx.nb[1], j * each * zx.nb[0])),
                              f, t) for j in range(2))
        x = gg.silu(convolved(g, i, 0, x, w["conv"]))
        picked, n = linear(w["x"], x), (g.n_each, g.n_seqs)
        b, c, dt = (g.norm(gg.view_2d(picked, size, t, picked.nb[1], first * picked.nb[0]), "rms", w[name + "_norm"])
                    for name, size, first in (("b", s, 0), ("c", s, s), ("dt", r, 2 * s)))
        b, c = (gg.reshape_4d(v, s, 1, *n) for v in (b, c))
        dt = gg.reshape_3d(linear(w["dt"], dt), h, *n)
        a, d = (gg.reshape_2d(w[name], 1, h) for name in "ad")
        by_head = gg.reshape_4d(x, each, h, *n)
        y = gg.set_name(gg.reshape_4d(scanned(g, i, by_head, dt, a, b, c), each, h, *n), f"scan-{i}")
        y = gg.reshape_2d(gg.add(y, gg.mul(by_head, d)), f, t)
        return linear(w["out"], gg.swiglu_split(z, y))


def _picking_norms(loader, p, kind, dt_rank, d_state):
    """The parameters of the norms of dt, B and C."""
    sizes = {"dt_norm": dt_rank, "b_norm": d_state, "c_norm": d_state}
    return {name: loader.norm(p + name, kind, n) for name, n in sizes.items()} if kind else {}


def scanned(g, i, x, dt, a, b, c):
    """y, the numbers of x [head_dim, n_head, n_each, n_seqs]; the state is number 1 of layer i."""
    head_dim, n_head = x.ne[:2]
    kept = g.states_of(i, 1)
    states = gg.reshape_4d(kept, b.ne[0], head_dim, n_head, kept.ne[1])
    out = gg.ssm_scan(states, x, dt, a, b, c, g.leaf["state_row"])
    n = head_dim * n_head * g.n_tokens
    g.keep(i, 1, gg.view_1d(out, kept.ne[0] * g.n_seqs, n * out.nb[0]))
    return gg.view_1d(out, n, 0)
