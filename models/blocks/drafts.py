"""Draft networks: small networks that predict the tokens of a larger one, their target, from values of its layers.

    EAGLE-3     f = Wfc [h_a | h_b | h_c]                   inputs of three layers of the target at a token
                x = f + attention [norm(embd[next]) | norm(f)],  h = x + feed_forward(norm x)
                logits = Wout norm(h);  h is the f of the next guess
    DFlash      f = norm(Wfc [inputs of some layers])       every layer keeps keys and values of f, as of a token
                a block: the last token, then masks; its tokens see each other and all that is kept;
                the logits at each mask are the guesses, all at once.  With Markov matrices (DSpark) W2 W1[token before]
                is added to them, one after the other.  DFlash 2 convolves what every piece of a layer reads and gives,
                and picks of the n likeliest ids c at a mask the largest of logits[c] + next[c] . (prev[token before]
                * Wg h)
    Gemma 4's   x = Wpre [sqrt(n) embd[token] | h]          h: the target's last state, normed, before the token
                blocks whose attention reads the target's own keys and values
                h = Wpost norm(x)

Embeddings and output matrix are the target's where the file has none.  d2t: the target's id of each id of a smaller
vocabulary.  Sources: arXiv 2503.01840 (EAGLE-3), arXiv 2602.06036 (DFlash); llama.cpp's graphs.
"""
import dataclasses
import math

import ggjit as gg
from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.feed_forward import Dense


@dataclasses.dataclass(frozen=True)
class BorrowedTables:
    """Embeddings and output matrix of a file that may leave them to its target."""
    has_embd: bool                      # is there a token_embd?
    has_output: bool
    n_mapped: int                       # ids of its own that d2t maps; 0: its ids are the target's

    @property
    def needs_target(self):
        return not (self.has_embd and self.has_output)

    def load(self, loader):
        d, n = loader.n_embd, loader.n_vocab
        w = {"token_embd": loader.want("token_embd.weight", d, n)} if self.has_embd else {}
        if self.has_output or self.n_mapped:
            w["output"] = loader.want("output.weight", d, self.n_mapped or n)
        elif self.has_embd:
            w["output"] = w["token_embd"]
        return w | ({"d2t": loader.want("d2t", self.n_mapped)} if self.n_mapped else {})


def fused(g, features, w):
    """Wfc of the inputs of the target's layers, one above the other."""
    x = features[0]
    for other in features[1:]:
        x = gg.concat(x, other, 0)
    return linear(w["fc"], x if w["fc_norm"] is None else g.norm(x, "rms", w["fc_norm"]))


@dataclasses.dataclass(frozen=True)
class Eagle3:
    attention: Attention
    feed_forward: Dense
    tables: BorrowedTables
    layers: tuple                       # whose inputs it reads; the number of layers: the last one's output
    n_target: int                       # embedding length of the target
    eps: float
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    P = "blk.0."
    window = 0

    @property
    def mixers(self):
        return [self.attention]

    def load(self, loader):
        n = len(self.layers) * self.n_target
        w = self.tables.load(loader) | self.attention.load(loader, self.P) | self.feed_forward.load(loader, self.P)
        w |= {name: loader.norm(self.P + name, "rms") for name in ("attn_norm", "attn_norm_2", "ffn_norm")}
        return w | {"fc": loader.linear("fc", n, loader.n_embd, False),
                    "fc_norm": loader.norm("enc.output_norm", "rms", n) if self.norm_before_fc else None,
                    "output_norm": loader.norm("output_norm", "rms")}

    def read(self, g, features, w):
        return fused(g, features, w)

    def build(self, g, embd, out, w):
        """(logits, state) after the last token."""
        e, f = gg.get_rows(w.get("token_embd", embd), g.leaf["tokens"]), g.leaf["before"]
        normed = g.norm(f, "rms", w["attn_norm_2"])
        both = gg.concat(g.norm(e, "rms", w["attn_norm"]), normed, 0)
        x = gg.add(self.attention.build(g, both, w, 0), normed if self.norm_before_residual else f)
        x = gg.get_rows(x, g.leaf["out_rows"])
        h = gg.add(self.feed_forward.build(g, g.norm(x, "rms", w["ffn_norm"]), w, 0), x)
        return gg.mul_mat(w.get("output", out), g.norm(h, "rms", w["output_norm"])), h


@dataclasses.dataclass(frozen=True)
class Selector:
    """Picks the id of each mask by the one before it."""
    rank: int
    n_top: int

    def load(self, loader):
        return {"selector_hidden": loader.linear("selector_hidden", loader.n_embd, self.rank, False), **{
            name: loader.want(f"{name}.weight", self.rank, loader.n_vocab)
            for name in ("selector_predecessor", "selector_successor")}}

    def ids(self, g, logits, h, w):
        """[size of the block - 1]; logits [n_vocab, size], h [n_embd, size]: after each token of the block."""
        n, size = self.n_top, logits.ne[1]
        picked = gg.cont(gg.top_k(logits, n))
        values = gg.get_rows(gg.reshape_3d(logits, 1, *logits.ne[:2]), picked)          # [1, n, size]
        gates, before, found = linear(w["selector_hidden"], h), gg.view_1d(g.leaf["tokens"], 1, 0), None
        for i in range(1, size):
            ids = gg.view_1d(picked, n, i * picked.nb[1])
            wanted = gg.mul(gg.get_rows(w["selector_predecessor"], before),
                            gg.view_2d(gates, self.rank, 1, gates.nb[1], i * gates.nb[1]))
            scores = gg.mul_mat(gg.get_rows(w["selector_successor"], ids), wanted)
            scores = gg.add(scores, gg.view_2d(values, n, 1, values.nb[2], i * values.nb[2]))
            before = gg.reshape_1d(gg.get_rows(gg.reshape_2d(ids, 1, n), gg.argmax(scores)), 1)
            found = before if found is None else gg.concat(found, before, 0)
        return found


@dataclasses.dataclass(frozen=True)
class Convolved:
    """A piece of a layer that reads a convolution of its input over the tokens of a block, and so gives its result.

    y[t] = sum over k of (base[k] + P x[t]) * x[t - k]; P x has a number for each group of numbers and k.
    """
    piece: object
    name: str                           # attn or ffn
    kernel: int
    group: int

    window = property(lambda self: self.piece.window)

    def written(self, *args):
        return self.piece.written(*args)

    def cache(self, sizes):
        return self.piece.cache(sizes)

    def load(self, loader, p):
        d, name = loader.n_embd, f"{self.name}_conv_"
        return self.piece.load(loader, p) | {
            name + "base": loader.want(p + name + "base", d, self.kernel, 2),
            name + "proj": loader.linear(p + name + "proj", d, 2 * self.kernel * d // self.group, False)}

    def build(self, g, x, w, i):
        shares, base = linear(w[f"{self.name}_conv_proj"], x), w[f"{self.name}_conv_base"]
        y = self.piece.build(g, self._convolved(x, shares, base, 0), w, i)
        return self._convolved(y, shares, base, 1)

    def _convolved(self, x, shares, base, side):
        (d, t), n, total = x.ne[:2], x.ne[0] // self.group, None
        x = gg.cont(x)
        for k in range(min(self.kernel, t)):
            own = gg.cont(gg.view_2d(shares, n, t, shares.nb[1], (side * self.kernel + k) * n * shares.nb[0]))
            own = gg.reshape_2d(gg.repeat_4d(gg.reshape_3d(own, 1, n, t), self.group, n, t, 1), d, t)
            factor = gg.add(own, gg.view_1d(base, d, side * base.nb[2] + k * base.nb[1]))
            past = gg.pad_ext(gg.view_2d(x, d, t - k, x.nb[1], 0), 0, 0, k, 0, 0, 0, 0, 0) if k else x
            term = gg.mul(factor, past)
            total = term if total is None else gg.add(total, term)
        return total


@dataclasses.dataclass(frozen=True)
class DFlash:
    blocks: list
    tables: BorrowedTables
    layers: tuple                       # of the target, whose inputs it reads
    eps: float
    block_size: int                     # tokens of a block, the last one of the text included
    mask_id: int
    embd_scale: float = 0.0             # 0: none
    causal: bool = False                # do the tokens of a block see those before them alone?
    rank: int = 0                       # of the Markov matrices; 0: there are none
    first: int = 1                      # of a block's tokens, the first whose logits are a guess
    confidence: bool = False            # is there a head that judges guesses?  It is not asked
    selector: Selector | None = None
    logit_scale: float = 0.0            # 0: none; before the selector
    softcap: float = 0.0

    @property
    def mixers(self):
        return [b.mixer for b in self.blocks]

    def load(self, loader):
        d, n_vocab = loader.n_embd, loader.n_vocab
        w = self.tables.load(loader) | {
            "fc": loader.scaled("fc", len(self.layers) * d, d), "fc_norm": None,
            "read_norm": loader.norm("enc.output_norm", "rms"), "output_norm": loader.norm("output_norm", "rms"),
            "blocks": [block.load(loader, f"blk.{i}.") for i, block in enumerate(self.blocks)]}
        if self.confidence:
            loader.ignore("conf_proj.weight", "conf_proj.bias")
        if self.selector:
            w |= self.selector.load(loader)
        if self.rank:
            w |= {"markov_w1": loader.want("markov_w1.weight", self.rank, n_vocab),
                  "markov_w2": loader.scaled("markov_w2", self.rank, self.tables.n_mapped or n_vocab)}
        return w

    def read(self, g, features, w):
        return g.norm(fused(g, features, w), "rms", w["read_norm"])

    def keep(self, g, w):
        """Nodes that write keys and values of what was read to the caches of all layers."""
        return [t for i, block in enumerate(self.blocks)
                for t in block.mixer.written(g, g.leaf["before"], w["blocks"][i], i)]

    def build(self, g, embd, out, w):
        """The ids that are guessed: [block_size - first]."""
        x = gg.get_rows(w.get("token_embd", embd), g.leaf["tokens"])
        x = gg.scale(x, self.embd_scale) if self.embd_scale else x
        for i, block in enumerate(self.blocks):
            x = block.build(g, x, w["blocks"][i], i)
        h = g.norm(x, "rms", w["output_norm"])
        logits = gg.mul_mat(w.get("output", out), h)
        if self.selector:
            logits = gg.scale(logits, self.logit_scale) if self.logit_scale else logits
            if self.softcap:
                logits = gg.scale(gg.tanh(gg.scale(logits, 1.0 / self.softcap)), self.softcap)
            found = self.selector.ids(g, logits, h, w)
            return gg.concat(gg.view_1d(g.leaf["tokens"], 1, 0), found, 0)      # as many as tokens
        if not self.rank:
            return gg.argmax(logits)
        return self._markov(g, logits, w)

    def _markov(self, g, logits, w):
        before = gg.view_1d(g.leaf["tokens"], 1, 0)
        found = gg.view_1d(g.leaf["tokens"], self.first, 0) if self.first else None
        for i in range(self.first, self.block_size):
            more = linear(w["markov_w2"], gg.get_rows(w["markov_w1"], before))
            best = gg.argmax(gg.add(gg.view_2d(logits, logits.ne[0], 1, logits.nb[1], i * logits.nb[1]), more))
            found = best if found is None else gg.concat(found, best, 0)
            before = gg.reshape_1d(gg.get_rows(g.leaf["d2t"], best), 1) if self.tables.n_mapped else best
        return found


@dataclasses.dataclass(frozen=True)
class Gemma4Assistant:
    blocks: list
    n_vocab: int
    n_target: int                       # embedding length of the target
    eps: float
    layers = ()
    tables = None

    @property
    def mixers(self):
        return [b.mixer for b in self.blocks]

    def load(self, loader):
        d, n = loader.n_embd, self.n_target
        loader.ignore("masked_embd_centroids.weight", "masked_embd_ordering")
        return {"token_embd": loader.want("token_embd.weight", d, self.n_vocab),
                "output_norm": loader.norm("output_norm", "rms"),
                "pre": loader.linear("nextn.pre_projection", 2 * n, d, False),
                "post": loader.linear("nextn.post_projection", d, n, False),
                "blocks": [block.load(loader, f"blk.{i}.") for i, block in enumerate(self.blocks)]}

    def build(self, g, embd, out, w):
        """(logits, state) after the token."""
        e = gg.scale(gg.get_rows(embd, g.leaf["tokens"]), math.sqrt(self.n_target))
        x = linear(w["pre"], gg.concat(e, g.leaf["before"], 0))
        for i, block in enumerate(self.blocks):
            x = block.build(g, x, w["blocks"][i], i)
        x = g.norm(x, "rms", w["output_norm"])
        return gg.mul_mat(w["token_embd"], x), linear(w["post"], x)
