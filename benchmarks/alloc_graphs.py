"""Graphs as bare TENSOR records, for measuring and testing memory plans: no engine, no numbers, only shapes.

`SUITE` holds 26 networks in ggml's op order; `random_graph(seed)` draws small graphs with views, in-place ops,
outputs, inputs and external tensors.  A `Net` gives `table`, `nodes`, `leafs` (table ids in ggml's visiting order) and
`sizes` as a `PlanRequest` takes them; `plan_table` plans them.  Weights and caches are external: they have a buffer.
"""
import dataclasses
import math

import numpy as np

from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.plan_request import PlanOptions, PlanRequest
from ggjit.alloc.reorder import reorder
from ggjit.ops.core.record import (
    FLAG_INPUT,
    FLAG_OUTPUT,
    OP,
    T_BUFFER,
    T_FLAGS,
    T_NB,
    T_NE,
    T_OP,
    T_SRC,
    T_TYPE,
    T_VIEW_OFFS,
    T_VIEW_SRC,
    T_WORDS,
)

F32, F16, I32 = 0, 1, 26
BYTES = {F32: 4, F16: 2, I32: 4}

ASKED = {f.name for f in dataclasses.fields(PlanRequest)}


def plan_table(*tensors, **settings):
    """The GraphPlan of table, node ids, leaf ids and sizes.  settings: of PlanRequest and of PlanOptions."""
    request = PlanRequest(*tensors, **{k: v for k, v in settings.items() if k in ASKED})
    return plan_graph(request, PlanOptions(**{k: v for k, v in settings.items() if k not in ASKED}))


def ordered(*tensors):
    """Their node ids in an order that needs less memory."""
    return reorder(PlanRequest(*tensors))


class Net:
    """A growing table with ggml's graph expansion."""

    def __init__(self):
        self.rows, self.nodes, self.leafs, self.roots, self._seen, self.params = [], [], [], [], set(), []

    # ---- tensors
    def new(self, op, ne, src=(), type=F32, nb=None, view=None, offs=0, ext=False, out=False, inp=False):
        ne = [int(x) for x in ne] + [1] * (4 - len(ne))
        if nb is None:
            nb = [BYTES[type] * math.prod(ne[:k]) for k in range(4)]
        r = np.zeros(T_WORDS, np.int64)
        r[T_TYPE], r[T_OP], r[T_NE:T_NE + 4], r[T_NB:T_NB + 4] = type, int(op), ne, nb
        r[T_SRC:T_SRC + 10] = [*src] + [-1] * (10 - len(src))
        r[T_VIEW_SRC], r[T_VIEW_OFFS] = -1, 0
        if view is not None:
            base = self.rows[view]
            nested = base[T_VIEW_SRC] >= 0
            r[T_VIEW_SRC] = base[T_VIEW_SRC] if nested else view
            r[T_VIEW_OFFS] = offs + (base[T_VIEW_OFFS] if nested else 0)
        r[T_BUFFER] = 0 if ext else -1
        r[T_FLAGS] = FLAG_OUTPUT * out | FLAG_INPUT * inp
        self.rows.append(r)
        return len(self.rows) - 1

    def ne(self, i):
        return [int(x) for x in self.rows[i][T_NE:T_NE + 4]]

    def nb(self, i):
        return [int(x) for x in self.rows[i][T_NB:T_NB + 4]]

    def weight(self, *ne, type=F32):
        self.params.append(self.new(OP.NONE, ne, type=type, ext=True))
        return self.params[-1]

    def input(self, *ne, type=F32):
        return self.new(OP.NONE, ne, type=type, inp=True)

    def like(self, op, a, *others, **kw):
        return self.new(op, self.ne(a), (a, *others), **kw)

    def mul_mat(self, w, x):
        return self.new(OP.MUL_MAT, [self.ne(w)[1], *self.ne(x)[1:]], (w, x))

    def reshape(self, a, *ne):
        return self.new(OP.RESHAPE, ne, (a,), self.rows[a][T_TYPE], view=a)

    def view(self, a, ne, nb=None, offs=0):
        return self.new(OP.VIEW, ne, (a,), self.rows[a][T_TYPE], nb=nb or self.nb(a), view=a, offs=offs)

    def permute(self, a, *axes):
        ne, nb = [0] * 4, [0] * 4
        for k, p in enumerate(axes):
            ne[p], nb[p] = self.ne(a)[k], self.nb(a)[k]
        return self.new(OP.PERMUTE, ne, (a,), self.rows[a][T_TYPE], nb=nb, view=a)

    def cont(self, a, *ne):
        return self.new(OP.CONT, ne or self.ne(a), (a,))

    def cpy(self, a, dst):
        return self.new(OP.CPY, self.ne(dst), (a, dst), self.rows[dst][T_TYPE], nb=self.nb(dst), view=dst)

    # ---- layers
    def linear(self, x, n, bias=False):
        y = self.mul_mat(self.weight(self.ne(x)[0], n), x)
        return self.like(OP.ADD, y, self.weight(n)) if bias else y

    def norm(self, x, op=OP.RMS_NORM, bias=False):
        y = self.like(OP.MUL, self.like(op, x), self.weight(self.ne(x)[0]))
        return self.like(OP.ADD, y, self.weight(self.ne(x)[0])) if bias else y

    def unary(self, x):
        return self.like(OP.UNARY, x)

    # ---- graph
    def expand(self, root):
        """Depth first, sources before the node, in order; op NONE makes a leaf."""
        self.roots.append(root)
        stack = [(root, 0)] if root not in self._seen else []
        self._seen.add(root)
        while stack:
            i, k = stack.pop()
            srcs = [int(s) for s in self.rows[i][T_SRC:T_SRC + 10] if s >= 0]
            if k == len(srcs):
                (self.leafs if self.rows[i][T_OP] == int(OP.NONE) else self.nodes).append(i)
                continue
            stack.append((i, k + 1))
            if srcs[k] not in self._seen:
                self._seen.add(srcs[k])
                stack.append((srcs[k], 0))
        return self

    def output(self, i):
        self.rows[i][T_FLAGS] |= FLAG_OUTPUT
        return self.expand(i)

    @property
    def table(self):
        return np.array(self.rows, np.int64)

    def nbytes(self, ids):
        return np.array([BYTES[int(self.rows[i][T_TYPE])] * math.prod(self.ne(i)) for i in ids], np.int64)

    @property
    def sizes(self):
        return self.nbytes(self.nodes), self.nbytes(self.leafs)


# ---------------------------------------------------------------- transformers
def _experts(g, x, d, ff, n_expert, top):
    n = g.ne(x)[1]
    probs = g.like(OP.SOFT_MAX, g.linear(x, n_expert))
    sel = g.view(g.like(OP.ARGSORT, probs, type=I32), (top, n))
    w = g.new(OP.GET_ROWS, (1, top, n), (g.reshape(probs, 1, n_expert, n), sel))
    w = g.reshape(w, top, n)
    w = g.reshape(g.new(OP.DIV, (top, n), (w, g.new(OP.SUM_ROWS, (1, n), (w,)))), 1, top, n)
    g.expand(w)
    x = g.reshape(x, d, 1, n)
    up = g.new(OP.MUL_MAT_ID, (ff, top, n), (g.weight(d, ff, n_expert), x, sel))
    gate = g.unary(g.new(OP.MUL_MAT_ID, (ff, top, n), (g.weight(d, ff, n_expert), x, sel)))
    y = g.new(OP.MUL_MAT_ID, (d, top, n), (g.weight(ff, d, n_expert), g.like(OP.MUL, gate, up), sel))
    y = g.like(OP.MUL, y, w)
    nb = [4, 4 * d * top, 4 * d * top * n, 4 * d * top * n]
    total = g.view(y, (d, n), nb)
    for e in range(1, top):
        total = g.new(OP.ADD, (d, n), (total, g.view(y, (d, n), nb, 4 * d * e)))
    return total


def llama(n_layer, d, n_head, n_kv, ff, vocab, n, ctx, flash=False, experts=0, top=2, all_logits=False, train=False):
    g, hd = Net(), d // n_head
    x = g.new(OP.GET_ROWS, (d, n), (g.weight(d, vocab), g.input(n, type=I32)))
    pos, mask, keep = g.input(n, type=I32), g.input(ctx, n), g.input(n if all_logits else 1, type=I32)
    for layer in range(n_layer):
        c = g.norm(x)
        q = g.like(OP.ROPE, g.reshape(g.linear(c, d), hd, n_head, n), pos)
        k = g.like(OP.ROPE, g.reshape(g.linear(c, n_kv * hd), hd, n_kv, n), pos)
        v = g.linear(c, n_kv * hd)
        if train:
            k, v = g.permute(k, 0, 2, 1, 3), g.cont(g.permute(g.reshape(v, hd, n_kv, n), 1, 2, 0, 3))
        else:
            for z in (q, v, k):
                g.expand(z)
            kc, vc = (g.new(OP.NONE, (hd * n_kv, ctx), type=F16, ext=True) for _ in range(2))
            g.expand(g.cpy(k, g.view(kc, (hd * n_kv * n,))))
            g.expand(g.cpy(v, g.view(vc, (hd * n_kv * n,))))
            k = g.permute(g.reshape(kc, hd, n_kv, ctx), 0, 2, 1, 3)
            v = g.view(vc, (ctx, hd, n_kv), [2, 2 * ctx, 2 * ctx * hd, 2 * ctx * hd * n_kv])
        q = g.permute(q, 0, 2, 1, 3)
        if flash:
            o = g.reshape(g.new(OP.FLASH_ATTN_EXT, (hd, n_head, n), (q, k, v, mask)), d, n)
        else:
            kq = g.like(OP.SOFT_MAX, g.new(OP.MUL_MAT, (ctx, n, n_head), (k, q)), mask)
            o = g.cont(g.permute(g.new(OP.MUL_MAT, (hd, n, n_head), (v, kq)), 0, 2, 1, 3), d, n)
        o = g.linear(o, d)
        if layer == n_layer - 1 and not all_logits:
            o, x = (g.new(OP.GET_ROWS, (d, 1), (z, keep)) for z in (o, x))
        h = g.like(OP.ADD, o, x)
        c = g.norm(h)
        if experts:
            y = _experts(g, c, d, ff, experts, top)
        else:
            up = g.linear(c, ff)
            g.expand(up)
            y = g.linear(g.like(OP.MUL, g.unary(g.linear(c, ff)), up), d)
        x = g.like(OP.ADD, y, h)
        g.expand(x)
    return g.output(g.linear(g.norm(x), vocab))


def _attention(g, q, k, v, n_head, scale=True):
    """q (d, n), k and v (d, m) -> (d, n), everything materialised."""
    d, n, m = g.ne(q)[0], g.ne(q)[1], g.ne(k)[1]
    hd = d // n_head
    q, k = (g.permute(g.reshape(z, hd, n_head, g.ne(z)[1]), 0, 2, 1, 3) for z in (q, k))
    v = g.cont(g.permute(g.reshape(v, hd, n_head, m), 1, 2, 0, 3), m, hd, n_head)
    kq = g.new(OP.MUL_MAT, (m, n, n_head), (k, q))
    kq = g.like(OP.SOFT_MAX, g.like(OP.SCALE, kq) if scale else kq)
    o = g.new(OP.MUL_MAT, (hd, n, n_head), (v, kq))
    return g.cont(g.permute(o, 0, 2, 1, 3), d, n)


def _mlp(g, x, d):
    return g.linear(g.unary(g.linear(x, 4 * d, True)), d, True)


def gpt2(n_layer, d, n_head, n, vocab, train=False):
    g = Net()
    x = g.new(OP.GET_ROWS, (d, n), (g.weight(d, vocab), g.input(n, type=I32)))
    x = g.like(OP.ADD, x, g.new(OP.GET_ROWS, (d, n), (g.weight(d, 1024), g.input(n, type=I32))))
    for _ in range(n_layer):
        qkv = g.linear(g.norm(x, OP.NORM, True), 3 * d, True)
        q, k, v = (g.cont(g.view(qkv, (d, n), offs=4 * d * z)) for z in range(3))
        if not train:
            cache = g.new(OP.NONE, (d, n), ext=True)
            g.expand(g.cpy(k, g.view(cache, (d, n))))
        x = g.like(OP.ADD, g.linear(_attention(g, q, k, v, n_head), d, True), x)
        x = g.like(OP.ADD, _mlp(g, g.norm(x, OP.NORM, True), d), x)
    return g.output(g.linear(g.norm(x, OP.NORM, True), vocab))


def vit(n_layer, d, n_head, n, window=0):
    g = Net()
    x = g.linear(g.input(768, n), d, True)
    for layer in range(n_layer):
        c = g.norm(x, OP.NORM, True)
        windowed = window and layer % 3 != 2
        if windowed:
            c = g.new(OP.WIN_PART, (d, -(-n // window) * window), (c,))
        o = _attention(g, g.linear(c, d, True), g.linear(c, d, True), g.linear(c, d, True), n_head)
        o = g.linear(o, d, True)
        x = g.like(OP.ADD, g.new(OP.WIN_UNPART, (d, n), (o,)) if windowed else o, x)
        x = g.like(OP.ADD, _mlp(g, g.norm(x, OP.NORM, True), d), x)
    return g.output(x)


# ---------------------------------------------------------------- convolutional and irregular networks
def _conv(g, x, oc, k=3, stride=1, bias=True):
    w, h, ic = g.ne(x)[:3]
    w, h = w // stride, h // stride
    cols = g.new(OP.IM2COL, (ic * k * k, w, h), (g.weight(k, k, ic, oc), x), type=F16)
    y = g.new(OP.MUL_MAT, (w * h, oc), (g.reshape(cols, ic * k * k, w * h), g.weight(ic * k * k, oc)))
    y = g.reshape(y, w, h, oc)
    return g.like(OP.ADD, y, g.weight(1, 1, oc)) if bias else y


def _group_norm(g, x):
    c = g.ne(x)[2]
    return g.unary(g.like(OP.ADD, g.like(OP.MUL, g.like(OP.GROUP_NORM, x), g.weight(1, 1, c)), g.weight(1, 1, c)))


def _unet_attn(g, x, ctx, n_head):
    w, h, c = g.ne(x)[:3]
    t = g.cont(g.permute(_conv(g, _group_norm(g, x), c, 1), 1, 2, 0, 3), c, w * h)
    for other in (None, ctx):
        z = g.norm(t, OP.NORM, True)
        src = z if other is None else other
        o = _attention(g, g.linear(z, c), g.linear(src, c), g.linear(src, c), n_head)
        t = g.like(OP.ADD, g.linear(o, c, True), t)
    u = g.linear(g.norm(t, OP.NORM, True), 8 * c, True)
    a, b = (g.cont(g.view(u, (4 * c, w * h), offs=16 * c * z)) for z in range(2))
    t = g.like(OP.ADD, g.linear(g.like(OP.MUL, a, g.unary(b)), c, True), t)
    return g.like(OP.ADD, _conv(g, g.cont(g.permute(t, 2, 0, 1, 3), w, h, c), c, 1), x)


def unet(side, ch, mult, per_level=2, n_head=8):
    g = Net()
    x, emb, ctx = g.input(side, side, 4), g.input(4 * ch), g.input(768, 77)
    emb = g.linear(g.unary(g.linear(emb, 4 * ch, True)), 4 * ch, True)

    def res(x, oc):
        h = _conv(g, _group_norm(g, x), oc)
        h = g.like(OP.ADD, h, g.reshape(g.linear(g.unary(emb), oc, True), 1, 1, oc))
        h = _conv(g, _group_norm(g, h), oc)
        return g.like(OP.ADD, h, x if g.ne(x)[2] == oc else _conv(g, x, oc, 1))
    x = _conv(g, x, ch)
    skips = [x]
    for level, m in enumerate(mult):
        for _ in range(per_level):
            x = res(x, ch * m)
            x = _unet_attn(g, x, ctx, n_head) if level < 3 else x
            skips.append(x)
        if level < len(mult) - 1:
            x = _conv(g, x, ch * m, 3, 2)
            skips.append(x)
    x = res(_unet_attn(g, res(x, ch * mult[-1]), ctx, n_head), ch * mult[-1])
    for level in reversed(range(len(mult))):
        for _ in range(per_level + 1):
            s = skips.pop()
            w, h, c = g.ne(x)[:3]
            x = res(g.new(OP.CONCAT, (w, h, c + g.ne(s)[2]), (x, s)), ch * mult[level])
            x = _unet_attn(g, x, ctx, n_head) if level < 3 else x
        if level:
            w, h, c = g.ne(x)[:3]
            x = _conv(g, g.new(OP.UPSCALE, (2 * w, 2 * h, c), (x,)), c)
    return g.output(_conv(g, _group_norm(g, x), 4))


def densenet(blocks=(6, 12, 24, 16), growth=32, side=56):
    g = Net()
    x = g.input(side, side, 64)

    def bn_conv(x, oc, k):
        return _conv(g, g.unary(g.like(OP.MUL, x, g.weight(1, 1, g.ne(x)[2]))), oc, k, 1, False)
    for b, n in enumerate(blocks):
        for _ in range(n):
            w, h, c = g.ne(x)[:3]
            x = g.new(OP.CONCAT, (w, h, c + growth), (x, bn_conv(bn_conv(x, 4 * growth, 1), growth, 3)))
        if b < len(blocks) - 1:
            w, h, c = g.ne(x)[:3]
            x = g.new(OP.POOL_2D, (w // 2, h // 2, c // 2), (bn_conv(x, c // 2, 1),))
    return g.output(x)


def inception(n=8, side=28, c=256):
    g = Net()
    x = g.input(side, side, c)
    for _ in range(n):
        relu = lambda x, oc, k: g.unary(_conv(g, x, oc, k))     # noqa: E731
        arms = [relu(x, c // 4, 1), relu(relu(x, c // 2, 1), c // 3, 3), relu(relu(x, c // 8, 1), c // 6, 5),
                relu(g.like(OP.POOL_2D, x), c // 5, 1)]
        y = arms[0]
        for a in arms[1:]:
            y = g.new(OP.CONCAT, (side, side, g.ne(y)[2] + g.ne(a)[2]), (y, a))
        x = y
    return g.output(x)


def randwire(n, seed, c=16):
    """Random acyclic wiring: nodes of different widths, each fed by one to three earlier ones."""
    g, rng = Net(), np.random.default_rng(seed)
    made = [g.input(32, 32, c)]
    for _ in range(n):
        k = int(rng.integers(1, 4))
        back = [made[max(0, len(made) - 1 - int(rng.geometric(0.12)) + 1)] for _ in range(k)]
        oc = c * int(rng.integers(1, 9))
        made.append(g.new(OP.CONV_2D, (32, 32, oc), tuple(dict.fromkeys(back))))
    used = {int(s) for r in g.rows for s in r[T_SRC:T_SRC + 10]}
    loose = [i for i in made if i not in used]
    y = g.new(OP.CONCAT, (32, 32, sum(g.ne(i)[2] for i in loose[:10])), tuple(loose[:10]))
    for i in loose[10:]:
        y = g.new(OP.CONCAT, (32, 32, g.ne(y)[2] + g.ne(i)[2]), (y, i))
    return g.output(y)


# ---------------------------------------------------------------- training
_BACK = {OP.UNARY: OP.SILU_BACK, OP.RMS_NORM: OP.RMS_NORM_BACK, OP.NORM: OP.RMS_NORM_BACK,
         OP.GROUP_NORM: OP.RMS_NORM_BACK, OP.SOFT_MAX: OP.SOFT_MAX_BACK, OP.ROPE: OP.ROPE_BACK}


def train(g):
    """Append loss, gradients of every weight and optimiser steps to a forward network."""
    forward, y = list(g.nodes), g.roots[-1]
    loss = g.new(OP.CROSS_ENTROPY_LOSS, (1,), (y, g.new(OP.NONE, g.ne(y), inp=True)))
    g.output(loss)
    grad = {y: g.like(OP.CROSS_ENTROPY_LOSS_BACK, y, loss)}
    params = set(g.params)
    wants = set(params)
    for i in forward:
        if any(int(s) in wants for s in g.rows[i][T_SRC:T_SRC + 10] if s >= 0):
            wants.add(i)

    def add(s, d):
        grad[s] = g.new(OP.ADD, g.ne(s), (grad[s], d)) if s in grad else d
    for i in reversed(forward):
        if i not in grad:
            continue
        dy, op = grad.pop(i), OP(int(g.rows[i][T_OP]))
        srcs = [int(s) for s in g.rows[i][T_SRC:T_SRC + 10] if s >= 0]
        for k, s in enumerate(srcs):
            if s in wants:
                add(s, _local_gradient(g, op, i, dy, s, srcs, k))
    for p in g.params:
        if p in grad:
            g.expand(g.new(OP.OPT_STEP_ADAMW, g.ne(p), (p, grad[p]), view=p))
    return g


def _local_gradient(g, op, i, dy, s, srcs, k):
    ne = g.ne(s)
    if op in (OP.ADD, OP.CPY):
        return dy if ne == g.ne(dy) else g.new(OP.REPEAT_BACK, ne, (dy,))
    if op == OP.MUL:
        full = g.like(OP.MUL, dy, srcs[1 - k])
        return full if ne == g.ne(dy) else g.new(OP.REPEAT_BACK, ne, (full,))
    if op == OP.MUL_MAT:
        return g.new(OP.OUT_PROD, ne, (srcs[1 - k], dy))
    if op in _BACK:
        return g.new(_BACK[op], ne, (dy, s))
    if op == OP.RESHAPE:
        return g.reshape(dy, *ne)
    if op in (OP.PERMUTE, OP.CONT):
        return g.cont(dy, *ne)
    if op == OP.SCALE:
        return g.like(OP.SCALE, dy)
    if op == OP.IM2COL:
        return g.new(OP.IM2COL_BACK, ne, (dy, s))
    if op == OP.GET_ROWS:
        return g.new(OP.GET_ROWS_BACK, ne, (dy, srcs[1]))
    return g.new(OP.ACC, ne, (dy, s))           # views, concat, pools: a scatter into the source's shape


MB7 = (32, 4096, 32, 32, 11008, 32000)
SUITE = {
    "llama-7b pp512": lambda: llama(*MB7, 512, 512),
    "llama-7b tg1 ctx4096": lambda: llama(*MB7, 1, 4096),
    "llama-7b pp512 ctx4096": lambda: llama(*MB7, 512, 4096),
    "llama-7b pp512 flash": lambda: llama(*MB7, 512, 512, flash=True),
    "llama3-8b all logits": lambda: llama(32, 4096, 32, 8, 14336, 128256, 512, 512, all_logits=True),
    "tinyllama pp128": lambda: llama(22, 2048, 32, 4, 5632, 32000, 128, 128),
    "stories15M pp64": lambda: llama(6, 288, 6, 6, 768, 32000, 64, 64),
    "mixtral pp512": lambda: llama(32, 4096, 32, 8, 14336, 32000, 512, 512, experts=8),
    "moe 64x8 pp256": lambda: llama(16, 2048, 16, 16, 1024, 50304, 256, 256, experts=64, top=8),
    "gpt2 pp1024": lambda: gpt2(12, 768, 12, 1024, 50257),
    "gpt2 pp128": lambda: gpt2(12, 768, 12, 128, 50257),
    "vit-b 4096": lambda: vit(12, 768, 12, 4096),
    "sam-b windows": lambda: vit(12, 768, 12, 4096, 196),
    "unet sd1 64": lambda: unet(64, 320, (1, 2, 4, 4)),
    "unet small 32": lambda: unet(32, 64, (1, 2, 4)),
    "densenet121": densenet,
    "inception x8": inception,
    "randwire 60 a": lambda: randwire(60, 0),
    "randwire 60 b": lambda: randwire(60, 1),
    "randwire 200": lambda: randwire(200, 2),
    "train llama 4L": lambda: train(llama(4, 512, 8, 8, 1376, 4096, 256, 256, all_logits=True, train=True)),
    "train gpt2 6L": lambda: train(gpt2(6, 384, 6, 128, 8192, train=True)),
    "train vit 6L": lambda: train(vit(6, 384, 6, 256)),
    "train unet small": lambda: train(unet(32, 32, (1, 2, 4))),
    "train llama 24L": lambda: train(llama(24, 512, 8, 8, 1376, 4096, 256, 256, all_logits=True, train=True)),
    "train densenet": lambda: train(densenet((6, 12, 8), 16, 28)),
}


# ---------------------------------------------------------------- random graphs
IN_PLACE = (OP.ADD, OP.MUL, OP.UNARY, OP.SCALE, OP.SOFT_MAX, OP.RMS_NORM, OP.SUB, OP.FILL, OP.ROPE_BACK)
PLAIN = (OP.MUL_MAT, OP.CONT, OP.CONCAT, OP.GET_ROWS, OP.SUM_ROWS, OP.NORM)


def random_graph(seed):
    g, rng = Net(), np.random.default_rng(seed)
    shapes = [tuple(int(x) for x in rng.integers(1, 40, 2)) for _ in range(4)]
    shape = lambda: shapes[rng.integers(4)]     # noqa: E731
    ids = [g.new(OP.NONE, shape(), ext=rng.random() < 0.3, inp=rng.random() < 0.3) for _ in range(4)]

    def pick():
        return ids[len(ids) - 1 - min(len(ids) - 1, int(rng.geometric(0.25)) - 1)]
    for _ in range(int(rng.integers(5, 60))):
        a, r = pick(), rng.random()
        if r < 0.12:
            y = g.reshape(a, *g.ne(a))
        elif r < 0.2:
            ne = g.ne(a)
            y = g.view(a, [max(1, ne[0] // 2), *ne[1:]], offs=g.nb(a)[0] * int(rng.integers(0, max(1, ne[0] // 2))))
        elif r < 0.24:
            y = g.cpy(pick(), a)
        elif r < 0.65:
            y = g.new(IN_PLACE[rng.integers(len(IN_PLACE))], g.ne(a), (a, pick()) if rng.random() < 0.7 else (a,))
        else:
            y = g.new(PLAIN[rng.integers(len(PLAIN))], shape(), (a, pick()))
        if rng.random() < 0.05:
            g.rows[y][T_FLAGS] |= FLAG_OUTPUT
        if rng.random() < 0.03 and g.rows[y][T_OP] not in IN_PLACE:    # ggml may corrupt those: see alloc/ggml/alias.py
            g.rows[y][T_FLAGS] |= FLAG_INPUT
        ids.append(y)
    for q in ids[-3:]:
        g.expand(q)
    return g
