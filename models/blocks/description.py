"""The description of a network: its blocks in order, and what comes before and after them.

    x = scale embd[ids] (+ positions) (normed)
    x = frame.before(x)
    per block:   x += mixer(norm x),  x += feed_forward(norm x)         (with norms after them, scales, or in parallel)
    x = frame.after(x)
    logits = cap(scale Wout norm x)

Pieces are given a Loader to take their tensors from, and a Scope to build their part of a graph in.
"""
import collections
import dataclasses
import functools
from typing import Any

import numpy as np

import ggjit as gg

WHOLE = "whole"                         # names of what a layer keeps begin with it that belongs to no token of the text


class Loader:
    """Tensors of a file by name and shape, as `Weights.want`; `matrices`: those that only products read.

    `beside(name)`: [(A, B, factor)] of the adapters of a weight.
    """

    def __init__(self, weights, n_embd, n_vocab=0):
        self.want, self.n_embd, self.n_vocab, self.matrices = weights.want, n_embd, n_vocab, []
        self._used, self.beside, self._tensors = weights.used, weights.beside, weights.file.tensors
        self.tables = []                        # tables of relative positions; the first serves layers without one

    def linear(self, name, n_in, n_out, bias=None):
        """The weights tuple of a product, as the function `linear` takes it.  bias: True: it must be there, False: it
        must not, None: either."""
        weight = self.want(name + ".weight", n_in, n_out)
        self.matrices.append(weight)
        bias = None if bias is False else self.want(name + ".bias", n_out, optional=not bias)
        return weight, bias, *self.beside(name + ".weight")

    def has(self, name):
        """Does the file hold a tensor of that name?"""
        return name in self._tensors

    def scaled(self, name, n_in, n_out):
        """As `linear`, without a bias; the file may hold a factor of the product."""
        factor = self.want(name + ".scale", 1, optional=True)
        weight, bias, *adapters = self.linear(name, n_in, n_out, False)
        return weight, bias, *([] if factor is None else [(None, factor, 1.0)]), *adapters

    def all_or_none(self, *names):
        """Are these tensors, which belong together, in the file?  One alone asks for the others: a file that lost some
        would compute something else."""
        return any(map(self.has, names)) or None

    def ignore(self, *names):
        """Count tensors as used that do not change the results."""
        self._used.update(names)

    def rope_factors(self, rope):
        """The tensor of factors of a Rope, or None."""
        n_factors = rope.n_factors or rope.n_dims // 2
        names = [n for n in (rope.factors, *rope.unused) if n]
        factors = [self.want(n, n_factors, optional=not self.all_or_none(*names)) for n in names]
        return factors[0] if factors else None

    def norm(self, name, kind, *ne):
        """The parameters of a norm of that kind.  Some converters write its name without ".weight"."""
        ne = ne or (self.n_embd,)
        weight = name if self.has(name) else name + ".weight"
        return (self.want(weight, *ne) if "bare" not in kind else None,
                self.want(name + ".bias", *ne) if kind in ("layer", "rms biased") else None)


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """Sizes and types of the layers' caches."""
    n_embd: int
    kv_type: Any                        # of keys
    v_type: Any                         # of values
    rows: dict                          # {window: cache rows of layers with it}
    n_state_rows: int                   # rows of states


@dataclasses.dataclass
class Scope:
    """The graph that is being built, as pieces of a network see it."""
    leaf: dict                          # inputs by name
    n_tokens: int
    n_kv: int                           # cache rows that are looked at
    eps: float
    flash: bool
    cache: list | None                  # what each layer keeps between calls; None: nothing is kept
    n_seqs: int = 1                     # texts the tokens belong to, as many tokens each; recurrent layers ask
    states: list = dataclasses.field(default_factory=list)      # nodes that write states: nothing reads them
    shared: dict = dataclasses.field(default_factory=dict)      # values that one layer leaves for later ones
    whole: bool = False                 # do all tokens pass the last layer, also those whose result is not wanted?
    block_input: Any = None             # input of the block, for feed-forwards that read it (reads_input)

    def norm(self, x, kind, params):
        """kind: rms: x / rms(x) * w (+ b: rms biased; rms bare: without w);  layer: (x - mean) / std * w + b;  centred:
        without b;  bare: without both."""
        w, b = params
        x = gg.rms_norm(x, self.eps) if kind.startswith("rms") else gg.norm(x, self.eps)
        x = x if w is None else gg.mul(x, w)
        return x if b is None else gg.add(x, b)

    def mask(self, window):
        """None: every token sees every other."""
        return self.leaf.get(mask_name(window))

    def rows(self, window):
        """The cache rows of these tokens."""
        return self.leaf[rows_name(window)]

    def pages(self, window):
        """The page tables of these tokens, or None: rows are looked at as they lie in the cache."""
        return self.leaf.get(pages_name(window))

    @property
    def n_each(self):
        """Tokens of each text."""
        return self.n_tokens // self.n_seqs

    def states_of(self, i, k):
        """State k of layer i of all texts: [n, n_state_rows]."""
        return next(leaf for leaf in self.cache[i] if leaf.name == f"state {k} {i}")

    def state(self, i, k):
        """State k of layer i before these tokens: [n, n_seqs]."""
        return gg.get_rows(self.states_of(i, k), self.leaf["state_row"])

    def keep(self, i, k, new):
        """Store state k of layer i."""
        kept = self.states_of(i, k)
        new = gg.set_name(gg.reshape_2d(new, kept.ne[0], self.n_seqs), f"state_{k}-{i}")
        self.states.append(gg.set_rows(kept, new, self.leaf["next_state_row"]))


def mask_name(window):
    return f"mask_{window}" if window else "mask"


def rows_name(window):
    return f"rows_{window}" if window else "rows"


def pages_name(window):
    return f"pages_{window}" if window else "pages"


def linear(weights, x):
    """W x (+ factor B (A x) of every adapter) (+ b); weights: (W, b or None, then A, B, factor of each adapter).

    Without an A, B is a factor of W x.
    """
    a, bias, *adapters = weights
    y = gg.mul_mat(a, x)
    for low, up, factor in adapters:
        y = gg.mul(y, up) if low is None else gg.add(y, gg.scale(gg.mul_mat(up, gg.mul_mat(low, x)), factor))
    return y if bias is None else gg.add(y, bias)


@dataclasses.dataclass(frozen=True)
class Block:
    """One layer.  Norms are tensor names without ".weight"; "": there is none.  Without mixer and feed_forward it
    gives x on.

    parallel: x + mixer(n) + feed_forward(m), n and m both norms of x; without an ffn_norm m is n.
    """
    mixer: Any
    feed_forward: Any = None
    norm: str = "rms"                   # kind, as Scope.norm has them
    attn_norm: str = "attn_norm"
    attn_post: str = ""
    ffn_norm: str = "ffn_norm"
    ffn_post: str = ""
    parallel: bool = False
    residual_scale: float = 0.0         # factor of what mixer and feed_forward add; 0: none
    post_eps: float = 0.0               # epsilon of the norms after mixer and feed_forward; 0: as the others'
    output_transform: Any = None        # a piece that takes what mixer and feed_forward made of x

    def load(self, loader, p):
        names = [self.attn_norm, self.attn_post] if self.mixer else []
        names += [self.ffn_norm, self.ffn_post] if self.feed_forward else []
        w = {}
        for piece in (self.mixer, self.feed_forward, self.output_transform):
            w |= piece.load(loader, p) if piece else {}
        return w | {n: loader.norm(p + n, self.norm) for n in names if n}

    def cache(self, sizes):
        """[(name, type, ne)] of what the layer keeps between tokens."""
        return [kept for piece in (self.mixer, self.feed_forward) if piece for kept in piece.cache(sizes)]

    def build(self, g, x, w, i, rows=None):
        """x after the block.  rows: of the tokens, those that are wanted from here on."""
        def named(t, name):
            return gg.set_name(t, f"{name}-{i}")

        def normed(x, name):
            return named(g.norm(x, self.norm, w[name]), name) if name else x

        late = g.whole or getattr(self.feed_forward, "looks_back", False)

        def picked(x, now=not late):
            return gg.get_rows(x, rows) if now and rows is not None else x

        def scaled(y, name):
            if self.post_eps and name:
                y = named(gg.mul(gg.rms_norm(y, self.post_eps), w[name][0]), name)
            else:
                y = normed(y, name)
            return gg.scale(y, self.residual_scale) if self.residual_scale else y
        if self.mixer is None:
            return self._unmixed(g, x, w, i, picked, scaled)
        n = normed(x, self.attn_norm)
        a = scaled(named(self.mixer.build(g, n, w, i), "attn_out"), self.attn_post)
        if self.feed_forward is None:
            return picked(named(gg.add(a, x), "l_out"), True)
        if self.parallel:
            m, a, x = picked(normed(x, self.ffn_norm) if self.ffn_norm else n), picked(a), picked(x)
        else:
            if getattr(self.feed_forward, "reads_input", False):
                g.block_input = picked(x)
            x = picked(named(gg.add(a, x), "ffn_inp"))
            m = normed(x, self.ffn_norm)
        f = scaled(named(self.feed_forward.build(g, m, w, i), "ffn_out"), self.ffn_post)
        y = gg.add(gg.add(f, a), x) if self.parallel else gg.add(f, x)
        if self.output_transform:
            y = self.output_transform.build(g, y, w, i, picked)
        return picked(named(y, "l_out"), late)

    def _unmixed(self, g, x, w, i, picked, scaled):
        """The block without its mixer."""
        x = picked(x, True)
        if self.feed_forward is None:
            return gg.set_name(gg.cont(x), f"l_out-{i}")
        m = gg.set_name(g.norm(x, self.norm, w[self.ffn_norm]), f"{self.ffn_norm}-{i}")
        return gg.set_name(gg.add(scaled(gg.set_name(self.feed_forward.build(g, m, w, i), f"ffn_out-{i}"), ""), x),
                           f"l_out-{i}")


@dataclasses.dataclass(frozen=True)
class EmbeddingNorm:
    """A Description.frame: the embeddings pass an RMS norm without weights (Muse Glimmer)."""

    def load(self, loader):
        return {}

    def before(self, g, x, w):
        return gg.rms_norm(x, g.eps)

    def after(self, g, x, w, rows):
        return x


@dataclasses.dataclass(frozen=True)
class EmbeddingSkip:
    """A Block.output_transform: adds the embeddings to a layer's result, times a learned number of the layer (Talkie).
    """

    def load(self, loader, p):
        return {"layer_output_scale": loader.want(p + "layer_output_scale.weight", 1)}

    def build(self, g, y, w, i, picked):
        return gg.add(y, gg.mul(picked(g.shared["embd"]), w["layer_output_scale"]))


@dataclasses.dataclass(frozen=True)
class LoopNorm:
    """A Block.output_transform: the last norm, before the blocks are passed again (Nanbeige)."""

    def load(self, loader, p):
        return {"again": loader.norm("output_norm", "rms")}

    def build(self, g, y, w, i, picked):
        return g.norm(y, "rms", w["again"])


@dataclasses.dataclass(frozen=True)
class HalvedOutput:
    """A Block.output_transform: halves a layer's result (RWKV 6, whose later weights make up for it)."""

    def load(self, loader, p):
        return {}

    def build(self, g, y, w, i, picked):
        return gg.scale(y, 0.5)


@dataclasses.dataclass(frozen=True)
class ParallelMixers:
    """A mixer made of two, attention and one with states, that read the same input; their results are added."""
    attention: Any
    other: Any

    window = property(lambda self: self.attention.window)
    rope = property(lambda self: self.attention.rope)
    d_head = property(lambda self: self.attention.d_head)
    d_head_v = property(lambda self: self.attention.d_head_v)

    def cache(self, sizes):
        return self.attention.cache(sizes) + self.other.cache(sizes)

    def load(self, loader, p):
        return self.attention.load(loader, p) | self.other.load(loader, p)

    def build(self, g, n, w, i):
        return gg.add(self.attention.build(g, n, w, i), self.other.build(g, n, w, i))


@dataclasses.dataclass(frozen=True)
class PostNormBlock:
    """One layer of BERT's kind: y = norm(x + mixer(x)), norm(y + feed_forward(y)).

    double_residual: y = norm(y + x) in between (jina-bert-v2 for code).
    """
    mixer: Any
    feed_forward: Any
    double_residual: bool = False
    norm = "layer"

    def load(self, loader, p):
        names = ["attn_output_norm", "layer_output_norm"] + ["attn_norm_2"] * self.double_residual
        w = self.mixer.load(loader, p) | self.feed_forward.load(loader, p)
        return w | {n: loader.norm(p + n, self.norm) for n in names}

    def build(self, g, x, w, i, rows=None):
        def named(t, name):
            return gg.set_name(t, f"{name}-{i}")

        def normed(y, name, called=None):
            return named(g.norm(y, self.norm, w[name]), called or name)
        y = normed(gg.add(named(self.mixer.build(g, x, w, i), "attn_out"), x), "attn_output_norm")
        if self.double_residual:
            y = normed(gg.add(y, x), "attn_norm_2")
        return normed(gg.add(named(self.feed_forward.build(g, y, w, i), "ffn_out"), y), "layer_output_norm", "l_out")


def _short(piece):
    """A piece of a layer in a few words: "Attention(n_head=9, n_head_kv=3)"."""
    if piece is None:
        return ""
    told = [f"{name}={getattr(piece, name)}" for name in ("n_head", "n_head_kv", "d_head", "window", "n_ff", "n_expert")
            if getattr(piece, name, None)]
    return f"{type(piece).__name__}({', '.join(told)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Description:
    """A whole network; shown in short, `dataclasses.asdict(m.description)` is all of it."""
    blocks: list
    eps: float
    norm: str = "rms"                   # kind of the last norm, and of embd_norm
    embd_scale: float = 0.0             # 0: none
    embd_norm: str = ""                 # name of a norm of the embeddings; "": none
    out_norm: str = "output_norm"
    positions: bool = False             # a learned vector is added for every position
    token_types: bool = False           # add the embedding of token type 0, if the file has token types
    logit_scale: float = 0.0            # 0: none
    softcap: float = 0.0                # logits become softcap tanh(logits / softcap); 0: none
    tied: bool | None = None            # does the embedding give the logits?  None: where there is no output matrix
    output_bias: bool = False
    prefix: str = "blk."
    stored: tuple = ()                  # of each block, its number in the file: some are passed again; (): in order
    for_pictures: tuple = ()            # tensors of every block that pictures pass in place of those for text
    no_text: tuple = (0, 0)             # ids from the first up to the second are no text: their logits are the lowest
    projections: tuple = ()             # (name, n_in, n_out) of matrices that the pooled embedding of an encoder passes
    temperature: tuple | None = None    # (scale, length, first), see `temperatures`
    chunked: bool = False               # windows are chunks: a token sees those of its own
    frame: Any = None                   # a piece around the blocks: .before(g, x, w), .after(g, x, w, rows)
    n_deep: int = 0                     # first layers to whose output a picture's further vectors are added
    inputs: tuple = ()                  # what pieces read beside the usual inputs: .arrays(n_tokens, n_kv), .fill(...)
    next_token: Any = None              # a NextToken behind the network, which guesses (blocks/next_token.py)

    def __str__(self):
        kinds = collections.Counter(" + ".join(filter(None, map(_short, (b.mixer, getattr(b, "cross", None),
                                                                         b.feed_forward)))) for b in self.blocks)
        return "; ".join(f"{n} x {kind}" for kind, n in kinds.items())

    def __repr__(self):
        return f"<Description of {len(self.blocks)} layers: {self}>"

    @functools.cached_property
    def pieces(self):
        return [piece for b in self.blocks for piece in (b.mixer, getattr(b, "cross", None), b.feed_forward)
                if piece is not None]

    @functools.cached_property
    def windows(self):
        """Windows of all layers: each has a mask of its own; 0 is the whole text."""
        return sorted({w for p in self.pieces if hasattr(p, "window") for w in getattr(p, "windows", (p.window,))})

    def temperatures(self, past, n):
        """What queries of the n positions from `past` on are multiplied by."""
        scale, length, first = self.temperature
        return 1 + scale * np.log1p((np.arange(past, past + n) + first) // length)

    @functools.cached_property
    def constants(self):
        """{name: array} that pieces read as inputs."""
        ropes = [p.rope for p in self.pieces if getattr(p, "rope", None) is not None]
        return {rope.non_rotary_name: rope.non_rotary_factors for rope in ropes if rope.n_non_rotary}

    def alibi(self):
        return any(getattr(p, "max_alibi_bias", 0) for p in self.pieces)

    @functools.cached_property
    def has_grid(self):
        """Does RoPE tell the rows and columns of a picture apart?"""
        return any(getattr(getattr(p, "rope", None), "sections", ()) for p in self.pieces)

    @functools.cached_property
    def rotates(self):
        return self.positions or any(getattr(p, "rope", None) is not None for p in self.pieces)
