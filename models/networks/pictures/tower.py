"""Towers: the stacks of blocks that turn the patches of a picture or a sound into vectors for a decoder.

    block     x += attention(norm x)    x += feed forward(norm x)        every place sees every other

Their families (projector.py) say what goes in, what comes out, and what their attention has of its own.
"""
import dataclasses
import functools
import math

import numpy as np

import ggjit as gg
from ggjit.models.blocks.attention import attend
from ggjit.models.blocks.description import linear
from ggjit.models.core.checks import FIND_BROKEN, BrokenValues
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.networks.base.network import Network
from ggjit.ops.core.errors import ModelError

ARCH = "clip"
OWN_TERMS = "weights", "repacked weights", "compute", "inputs"
SOUND_PARTS = "a.", "mm.a."         # how names of tensors begin that are of what hears
OMNI = {("qwen2.5o", "vision"): "qwen2.5vl_merger", ("qwen2.5o", "audio"): "qwen2a"}    # one name for two families
LIMITS = "input_min", "input_max", "output_min", "output_max"


class SenseFile(GGUFFile):
    """What sees or hears beside a decoder: an mmproj file.  Errors: BadFile, ModelError."""
    SENSE, PART = "vision", "vision part"       # of its keys, of messages

    def __init__(self, path):
        super().__init__(path)
        if super().arch != ARCH or not self.metadata.get(f"clip.has_{self.SENSE}_encoder", False):
            raise ModelError(f"{path}: not a {self.PART} (general.architecture {super().arch!r}); it is "
                             f"llama.cpp's mmproj file, load_model(model, vision=mmproj)")

    @property
    def arch(self):
        """The prefix of its keys in the file."""
        return f"clip.{self.SENSE}"

    @property
    def projector(self):
        """The family by name, or None."""
        name = self.metadata.get("clip.projector_type") or self.arch_get("projector_type", None, str)
        return OMNI.get((name, self.SENSE), name)

    @property
    def has_both(self):
        """Has the file a part that sees and one that hears?"""
        return all(self.metadata.get(f"clip.has_{sense}_encoder", False) for sense in ("vision", "audio"))


def senses_of(path):
    """Which encoders an mmproj file has: of "vision", "audio"."""
    metadata = GGUFFile(path).metadata
    return [sense for sense in ("vision", "audio") if metadata.get(f"clip.has_{sense}_encoder", False)]


class Tower(Network):
    """Base of Vision and Hearing.  `prefix`: of names of tensors; `family`: a Projector."""
    REPACKS = True
    CAUSAL = False
    prefix = "v"
    named_after = "picture"                     # of terms of memory, beside those of the decoder

    # ------------------------------------------------------------ weights, for families, too
    def linear_of(self, name, n_in, n_out, bias=None):
        """What `linear` takes.  bias: must there be one, must not, or either?"""
        w = self.weights.want(name + ".weight", n_in, n_out)
        self._products.append(w)
        limits = [self.numbers_of(f"{name}.{what}") for what in LIMITS]
        if any(x is not None for x in limits):
            self._limits[name + ".weight"] = [math.copysign(math.inf, k % 2 - 1) if x is None else float(x[0])
                                              for k, x in enumerate(limits)]
        return w, None if bias is False else self.weights.want(name + ".bias", n_out, optional=not bias)

    def numbers_of(self, name):
        """float32 of a small tensor of the file, None where there is none."""
        info = self.file.tensors.get(name)
        if info is None:
            return None
        self.weights.used.add(name)
        return gg.dequantize(info.type, self.file.tensor_bytes(name), info.shape).astype(np.float32).reshape(-1)

    def norm_of(self, name, n):
        want = self.weights.want
        return want(name + ".weight", n), want(name + ".bias", n, optional=True)

    def chain(self, n_in, *names):
        """[what `linear` takes] of matrices one after the other; `n_out`: the rows of the last."""
        layers = []
        for name in names:
            info = self.file.tensors.get(name + ".weight")
            if info is None or len(info.ne) != 2:
                raise ModelError(f"{self.file.path}: tensor {name + '.weight'!r}, a matrix, is missing; convert the "
                                 f"model again")
            layers.append(self.linear_of(name, n_in, info.ne[1]))
            n_in = self.n_out = info.ne[1]
        return layers

    def _load_blocks(self):
        """The blocks and the norms around them."""
        tensors, p = self.file.tensors, self.prefix
        self._pre_norm = self.norm_of(f"{p}.pre_ln", self.n_embd) if f"{p}.pre_ln.weight" in tensors else None
        self._post_norm = self.norm_of(f"{p}.post_ln", self.n_embd) if f"{p}.post_ln.weight" in tensors else None
        self._blocks = [self._load_block(f"{p}.blk.{i}.") for i in range(self.n_layer)]
        behind = [n for n in tensors if n.startswith(f"{p}.blk.") and int(n.split(".")[2]) >= self.n_layer]
        self.weights.used.update(behind)        # layers behind the one that is taken
        self._leave_other_sense()

    def _leave_other_sense(self):
        """Tensors of what sees are not wanted of what hears, in a file with both."""
        if self.file.has_both:
            self.weights.used.update(name for name in self.file.tensors
                                     if name.startswith(SOUND_PARTS) != (self.prefix == "a"))

    def _load_block(self, at):
        d, tensors, want = self.n_embd, self.file.tensors, self.weights.want
        w = {"ln1": self.norm_of(at + "ln1", d), "ln2": self.norm_of(at + "ln2", d),
             "out": self.linear_of(at + "attn_out", d, d)}
        if at + "attn_qkv.weight" in tensors:
            w["qkv"] = self.linear_of(at + "attn_qkv", d, 3 * d)
        else:
            w |= {c: self.linear_of(f"{at}attn_{c}", d, d) for c in "qkv"}
        w |= {name: want(f"{at}{name}.weight", d, optional=True)
              for name in ("attn_post_norm", "ffn_post_norm", "ls1", "ls2")}
        for name in ("attn_q_norm", "attn_k_norm"):         # over all heads, or over each
            ne = getattr(tensors.get(f"{at}{name}.weight"), "ne", (d,))
            w[name] = want(f"{at}{name}.weight", self.d_head if ne == (self.d_head,) else d, optional=True)
        w["out_scale"] = want(f"{at}out_scale.weight", 1, optional=True)
        names, up = ("ffn_up", "ffn_down"), getattr(tensors.get(at + "ffn_up.weight"), "ne", (d, 0))
        if up[0] != d:
            names, up = names[::-1], up[::-1]           # older files have the two names exchanged
        n_ff = up[-1]
        return w | {"up": self.linear_of(at + names[0], d, n_ff), "down": self.linear_of(at + names[1], n_ff, d),
                    "gate": self.linear_of(at + "ffn_gate", d, n_ff) if at + "ffn_gate.weight" in tensors else None}

    def _matrices(self):
        return self._products

    # ------------------------------------------------------------ graphs
    def normed(self, x, params):
        w, b = params
        x = gg.mul(gg.rms_norm(x, self.eps) if self.norm_kind == "rms" else gg.norm(x, self.eps), w)
        return x if b is None else gg.add(x, b)

    def product(self, weights, x):
        """W x (+ b); in some files within limits, and so is x."""
        limits = self._limits.get(weights[0].name)
        if limits is None:
            return linear(weights, x)
        return gg.clamp(linear(weights, gg.clamp(gg.cont(x), *limits[:2])), *limits[2:])

    def _block(self, g, x, w, i, windows=()):
        def name(t, what):
            return gg.set_name(t, f"{what}-{i}")

        def scaled(t, by, norm):
            t = t if w[norm] is None else self.normed(t, (w[norm], None))
            return t if w[by] is None else gg.mul(t, w[by])
        h = name(self.normed(x, w["ln1"]), "attn_norm")
        q, k, v = self._by_head(h, w)
        q, k = (self.family.turned(self, t, g.leaf) for t in (q, k))
        o = name(self._attended(g, q, k, v, windows or [(1, x.ne[1])], i), "attn")
        o = name(self.product(w["out"], o), "attn_out")
        x = gg.add(x, scaled(o, "ls1", "attn_post_norm"))
        h = self.normed(x, w["ln2"])
        up = self.product(w["up"], h)
        h = self._act(up) if w["gate"] is None else gg.mul(self._act(self.product(w["gate"], h)), up)
        x = gg.add(x, scaled(name(self.product(w["down"], h), "ffn_out"), "ls2", "ffn_post_norm"))
        return name(x if w["out_scale"] is None else gg.mul(x, w["out_scale"]), "l_out")

    def _attended(self, g, q, k, v, windows, i):
        """[n_embd, n] of q, k and v [d_head, n_head, n]; windows: as Projector has them, all of them."""
        scale = self.d_head ** -0.5 if self.family.scale is None else self.family.scale
        parts, at = [], 0
        for count, n in windows:
            of_run = (gg.view_4d(t, *t.ne[:2], n, count, t.nb[1], t.nb[2], n * t.nb[2], at * t.nb[2])
                      for t in (q, k, v))
            o = attend(g, *(gg.permute(t, 0, 2, 1, 3) for t in of_run), None, scale, i)
            parts.append(gg.reshape_2d(o, self.n_embd, n * count))
            at += n * count
        return functools.reduce(lambda a, b: gg.concat(a, b, 1), parts)

    def _by_head(self, h, w):
        """q, k and v as [d_head, n_head, n]; norms over all heads, or over each, as wide as their weights."""
        d, d_head, n_head, n = self.n_embd, self.d_head, self.n_head, h.ne[1]
        if "qkv" in w:
            y = self.product(w["qkv"], h)
            parts = [gg.view_2d(y, d, n, y.nb[1], at * d * y.nb[0]) for at in range(3)]
        else:
            parts = [self.product(w[c], h) for c in "qkv"]
        out = []
        for t, norm in zip(parts, (w["attn_q_norm"], w["attn_k_norm"], None), strict=True):
            if norm is not None and norm.ne[0] == d:
                t = self.normed(t, (norm, None))
            t = gg.view_3d(t, d_head, n_head, n, d_head * t.nb[0], t.nb[1], 0)
            out.append(self.normed(t, (norm, None)) if norm is not None and norm.ne[0] == d_head != d else t)
        if self.family.v_norm:
            out[2] = gg.rms_norm(out[2], self.eps)
        return out

    # ------------------------------------------------------------ running
    def _vectors(self, shape, **inputs):
        """float32 (n, n_out) of the graph of that shape."""
        with self._lock:
            step = self._step(shape)
            for name, x in inputs.items():
                step.inputs[name][:] = x
            out = step.run().reshape(-1, self.n_out).copy()
        if not np.isfinite(out).all():
            raise BrokenValues(f"the {self.named_after}'s vectors hold NaN or infinity: {FIND_BROKEN}")
        return out

    def named_terms(self, terms):
        """MemoryTerms beside those of the decoder, without what is the decoder's, too."""
        return [dataclasses.replace(t, name=f"{self.named_after} {t.name}") for t in terms if t.name in OWN_TERMS]

    def memory_terms(self):
        """[MemoryTerm] of what it takes now."""
        return self.named_terms(self._memory_terms())
