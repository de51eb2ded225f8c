"""Small networks that guess what a larger one, their target, will write; they read values of its layers.

    EAGLE-3     f = Wfc [h_a | h_b | h_c]                   inputs of three layers of the target at a token
                x = f + attention [norm(embd[next]) | norm(f)],  h = x + feed_forward(norm x)
                logits = Wout norm(h);  h is the f of the next guess
    DFlash      f = norm(Wfc [inputs of some layers])       every layer keeps keys and values of f, as of a token
                a block: the last token, then masks; its tokens see each other and all that is kept;
                the logits at each mask are the guesses, all at once.  With Markov matrices (DSpark) W2 W1[token before]
                is added to them, one after the other
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
        logits = gg.mul_mat(w.get("output", out), g.norm(x, "rms", w["output_norm"]))
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
