"""Families of random graphs, for asking how good an order of nodes is.  FAMILIES[name](seed): a Net of alloc_graphs."""
import alloc_graphs as graphs
import numpy as np

from ggjit.ops.core.record import OP


def branchy(seed):
    """Blocks of arms with random widths and depths, joined; some arms begin at an earlier block."""
    g, rng, side = graphs.Net(), np.random.default_rng(seed), 8
    x = g.input(side, side, int(rng.integers(4, 40)))
    skips = [x]
    for _ in range(int(rng.integers(2, 9))):
        arms = []
        for _ in range(int(rng.integers(2, 6))):
            y = x if rng.random() < 0.85 else skips[int(rng.integers(len(skips)))]
            for _ in range(int(rng.integers(1, 5))):
                y = g.new(OP.CONV_2D, (side, side, int(rng.integers(2, 80))), (y,))
                y = y if rng.random() < 0.7 else g.unary(y)
            arms.append(y)
        y = arms[0]
        for z in arms[1:]:
            y = g.new(OP.CONCAT, (side, side, g.ne(y)[2] + g.ne(z)[2]), (y, z))
        x = g.new(OP.CONV_2D, (side, side, int(rng.integers(4, 60))), (y,)) if rng.random() < 0.7 else y
        skips.append(x)
    return g.output(x)


def wired(seed):
    rng = np.random.default_rng(seed)
    return graphs.randwire(int(rng.integers(20, 150)), seed, int(rng.integers(1, 16)))


def inception(seed):
    rng = np.random.default_rng(seed)
    return graphs.inception(int(rng.integers(1, 7)), int(rng.integers(4, 30)), int(rng.integers(20, 300)))


def _shape(rng, most_heads, most_width):
    """(heads, width of a model with them)."""
    heads = int(rng.integers(1, most_heads))
    return heads, 2 * heads * int(rng.integers(4, most_width))


def experts(seed):
    rng = np.random.default_rng(seed)
    heads, d = _shape(rng, 8, 40)
    top, n_layer, ff = int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.integers(16, 4 * d))
    vocab, n = int(rng.integers(50, 4000)), int(rng.integers(1, 200))
    return graphs.llama(n_layer, d, heads, heads, ff, vocab, n, 200, bool(rng.integers(2)), top + int(rng.integers(8)),
                        top)


def attention(seed):
    rng = np.random.default_rng(seed)
    heads, d = _shape(rng, 8, 40)
    n, n_layer = int(rng.integers(4, 300)), int(rng.integers(1, 5))
    if rng.random() < 0.5:
        return graphs.vit(n_layer, d, heads, n, n * int(rng.integers(0, 3)))
    return graphs.gpt2(n_layer, d, heads, n, int(rng.integers(50, 4000)))


def training(seed):
    rng = np.random.default_rng(seed)
    heads, d = _shape(rng, 5, 30)
    n, n_layer, vocab = int(rng.integers(4, 100)), int(rng.integers(1, 3)), int(rng.integers(50, 2000))
    kind = int(rng.integers(5))
    if kind == 0:
        ff = int(rng.integers(16, 4 * d))
        return graphs.train(graphs.llama(n_layer, d, heads, heads, ff, vocab, n, n, all_logits=True, train=True))
    if kind == 1:
        return graphs.train(graphs.gpt2(n_layer, d, heads, n, vocab, train=True))
    if kind == 2:
        return graphs.train(graphs.vit(n_layer, d, heads, n))
    if kind == 3:
        return graphs.train(graphs.densenet(tuple(map(int, rng.integers(1, 5, 2))), int(rng.integers(4, 24)), 8))
    return graphs.train(branchy(seed))


def small_unet(seed):
    """Images of 8 to 32 pixels beside a text of 77 x 768: its keys and values weigh as much as the image."""
    rng = np.random.default_rng(seed)
    mult, heads = tuple(map(int, rng.integers(1, 5, int(rng.integers(1, 3))))), int(rng.choice([1, 2, 4, 8]))
    return graphs.unet(int(rng.choice([8, 16, 32])), 8 * int(rng.integers(1, 5)), mult, 1, heads)


FAMILIES = {"branchy": branchy, "random wiring": wired, "inception": inception, "experts": experts,
            "attention": attention, "training": training, "small U-Nets": small_unet, "any ops": graphs.random_graph}
