"""MobileNet V5, the vision network of Gemma 3n: convolutions, then attention; a picture becomes 16 x 16 vectors.

    stem        conv 3 x 3, norm, GELU
    edge        conv 3 x 3, norm, GELU, conv 1 x 1, norm                                        (+ x)
    inverted    [depthwise, norm], 1 x 1, norm, GELU, [depthwise, norm, GELU], 1 x 1, norm      (* scale + x)
    attention   norm; several heads of queries, one of keys and values, which may be of every other row and column
                                                                                                * scale + x
    fusion      the last two stages side by side, 1 x 1, norm, GELU, 1 x 1, norm; the mean of squares; norm
    result      norm(W norm(sqrt(d) x))

The stem and the first block of each stage halve rows and columns.  Norms divide by the RMS.  Channels are the fastest
axis, [channels, columns, rows], so a 1 x 1 convolution is a product and a norm goes along a row.  Source: timm's
mobilenetv5, transformers' Gemma 3n; llama.cpp's clip.cpp for what the file holds.
"""
import itertools
import math

import numpy as np

import ggjit as gg
from ggjit.models.blocks.attention import attend
from ggjit.models.blocks.description import Scope
from ggjit.models.blocks.hparams import HParams
from ggjit.models.networks.pictures.projector import MAX_SIDE, Projector, mean_of_squares
from ggjit.models.networks.pictures.vision import Vision
from ggjit.ops.core.errors import ModelError, NotSupported

N_SIDE = 16                     # vectors a side of a picture
N_STAGES = 4
EPS = 1e-6
NEAREST = 0                     # of upscale
UNUSED = "patch_size", "block_count", "feed_forward_length", "attention.head_count", "projection_dim", \
    "projector.scale_factor"


class Gemma3n(Projector):
    before, after = "<start_of_image>", "<end_of_image>"


class MobileNet(Vision):
    # ------------------------------------------------------------ loading
    def _load(self):
        file, hparams = self.file, HParams(self.file)
        self.family, self.n_embd = Gemma3n(), hparams.n_embd
        self.image_size, self.eps = hparams.positive("image_size"), EPS
        if self.image_size % (2 << N_STAGES) or self.image_size > MAX_SIDE or self.image_size < N_SIDE << N_STAGES:
            raise ModelError(f"{file.path}: pictures of {self.image_size} pixels do not become {N_SIDE} x {N_SIDE} "
                             f"vectors")
        hparams.eps("layer")
        for key in UNUSED:
            hparams.get(key, 0, int)
        self.mean, self.std = (self._colours(hparams, name) for name in ("image_mean", "image_std"))
        self.patch_size, self.n_merge, self.n_side = self.image_size // N_SIDE, 1, N_SIDE
        self.n_vocab = self.n_ctx = 0
        self._load_weights()

    def _load_weights(self):
        want, d = self.weights.want, self.n_embd
        self._products, self._limits, self.norm_kind = [], {}, "rms"
        self._stem, n = self._conv("v.conv_stem.conv", 3)
        self._stem_bias = want("v.conv_stem.conv.bias", 1, 1, n, optional=True)
        self._stem_norm = want("v.conv_stem.bn.weight", n, optional=True)
        self._stages = []
        for stage in range(N_STAGES):
            blocks = []
            for i in itertools.count():
                block, n = self._load_any(f"v.blk.{stage}.{i}.", n)
                if block is None:
                    break
                blocks.append(block)
            if not blocks:
                raise ModelError(f"{self.file.path}: stage {stage} of MobileNet V5 has no blocks (v.blk.{stage}.0....)")
            self._stages.append((blocks, n))
        self._fused = {}
        n = self._point(self._fused, "v.msfa.ffn.", "pw_exp", sum(n for _, n in self._stages[-2:]))
        if self._point(self._fused, "v.msfa.ffn.", "pw_proj", n) != d:
            raise ModelError(f"{self.file.path}: the fusion does not make vectors of {d} numbers")
        self._fused["norm"] = want("v.msfa.norm.weight", d)
        self._soft_norm = want("mm.soft_emb_norm.weight", d)
        self._projection = self.chain(d, "mm.input_projection")
        self._leave_other_sense()

    def _conv(self, name, n_in, groups=False):
        """(weights, channels out); groups: one kernel for each channel."""
        info = self.file.tensors.get(name + ".weight")
        ne = getattr(info, "ne", ())
        if len(ne) != 4 or ne[0] != ne[1] or ne[2] != (1 if groups else n_in) or groups and ne[3] != n_in:
            found = f"has shape {list(ne)}" if ne else "is missing"
            raise ModelError(f"{self.file.path}: tensor {name + '.weight'!r}, a convolution of {n_in} channels, "
                             f"{found}; convert the model again")
        return self.weights.want(name + ".weight", *ne), ne[3]

    def _point(self, block, at, name, n):
        """Channels behind a 1 x 1 convolution and its norm."""
        block[name], n = self._conv(f"{at}{name}.conv", n)
        block[name + "_norm"] = self.weights.want(f"{at}{name}.bn.weight", n, optional=True)
        return n

    def _depthwise(self, block, at, name, n):
        if f"{at}{name}.conv.weight" in self.file.tensors:
            block[name], _ = self._conv(f"{at}{name}.conv", n, groups=True)
            block[name + "_norm"] = self.weights.want(f"{at}{name}.bn.weight", n, optional=True)

    def _load_any(self, at, n):
        """(block, channels behind it) of a block that gets n channels; (None, n) where there is none."""
        tensors, want, block = self.file.tensors, self.weights.want, {}
        if at + "conv_exp.weight" in tensors:
            block["conv_exp"], wide = self._conv(at + "conv_exp", n)
            block["bn1"] = want(at + "bn1.weight", wide, optional=True)
            block["conv_pwl"], n = self._conv(at + "conv_pwl", wide)
            block["bn2"] = want(at + "bn2.weight", n, optional=True)
            return block, n
        if at + "attn.query.proj.weight" in tensors:
            self._load_attention(block, at, n)
        elif at + "pw_exp.conv.weight" in tensors:
            self._depthwise(block, at, "dw_start", n)
            wide = self._point(block, at, "pw_exp", n)
            self._depthwise(block, at, "dw_mid", wide)
            n = self._point(block, at, "pw_proj", wide)
        else:
            return None, n
        block["scale"] = want(at + "layer_scale.gamma", 1, 1, n, optional=True)
        return block, n

    def _load_attention(self, block, at, n):
        want = self.weights.want
        block["norm"] = want(at + "norm.weight", n)
        for name in ("key", "value"):
            block[name], d_head = self._conv(f"{at}attn.{name}.proj", n)
            if f"{at}attn.{name}.down_conv.weight" in self.file.tensors:
                block[name + "_down"], _ = self._conv(f"{at}attn.{name}.down_conv", n, groups=True)
                block[name + "_norm"] = want(f"{at}attn.{name}.norm.weight", n, optional=True)
        block["query"], n_q = self._conv(at + "attn.query.proj", n)
        block["output"], n_out = self._conv(at + "attn.output.proj", n_q)
        if n_q % d_head or block["value"].ne[3] != d_head or n_out != n:
            raise ModelError(f"{self.file.path}: {at}attn has {n_q} numbers of queries, heads of {d_head} and "
                             f"{n_out} channels behind {n}; convert the model again")

    # ------------------------------------------------------------ graphs
    def _build(self, ctx, shape):
        """shape: (columns, rows) of vectors, always 16 x 16."""
        side = self.image_size
        inputs = {"pixels": np.zeros((side, side, 3), np.float32)}
        x = gg.from_numpy(ctx, inputs["pixels"], "pixels")
        x = self._halved_conv(self._stem, x)
        x = x if self._stem_bias is None else gg.add(x, gg.reshape_1d(self._stem_bias, x.ne[0]))
        x, of_stages, i = gg.gelu(self._rms(x, self._stem_norm)), [], 0
        for blocks, _ in self._stages:
            for k, block in enumerate(blocks):
                x = gg.set_name(self._any(x, block, k == 0), f"l_out-{i}")
                i += 1
            of_stages.append(x)
        x = self._fusion(*of_stages[-2:])
        x = gg.rms_norm(gg.scale(gg.set_name(x, "result_norm"), math.sqrt(self.n_embd)), EPS)
        x = self.product(self._projection[0], gg.mul(x, self._soft_norm))
        return inputs, gg.set_name(gg.rms_norm(x, EPS), "vectors")

    def _rms(self, x, w):
        return x if w is None else self.normed(x, (w, None))

    def _any(self, x, block, halves):
        if "conv_exp" in block:
            y = self._halved_conv(block["conv_exp"], x) if halves else self._wide_conv(block["conv_exp"], x, 1)
            y = _pointwise(block["conv_pwl"], gg.gelu(self._rms(y, block["bn1"])))
            y = self._rms(y, block["bn2"])
        elif "query" in block:
            y = self._attention(x, block)
        else:
            y = self._inverted(x, block, halves)
        if block.get("scale") is not None:
            y = gg.mul(y, gg.reshape_1d(block["scale"], y.ne[0]))
        return gg.add(y, x) if y.ne == x.ne else y

    def _inverted(self, x, block, halves):
        if "dw_start" in block:
            x = self._rms(_by_channel(block["dw_start"], x), block["dw_start_norm"])
        x = gg.gelu(self._rms(_pointwise(block["pw_exp"], x), block["pw_exp_norm"]))
        if "dw_mid" in block:
            x = _by_channel(block["dw_mid"], x, 2 if halves else 1)
            x = gg.gelu(self._rms(x, block["dw_mid_norm"]))
        return self._rms(_pointwise(block["pw_proj"], x), block["pw_proj_norm"])

    def _attention(self, x, block):
        n, d_head = x.ne[1] * x.ne[2], block["key"].ne[3]
        h, parts = self._rms(x, block["norm"]), []
        for name in ("key", "value"):
            t = h
            if name + "_down" in block:
                t = self._rms(_by_channel(block[name + "_down"], t, 2), block[name + "_norm"])
            t = _pointwise(block[name], t)
            parts.append(gg.reshape_3d(t, d_head, t.ne[1] * t.ne[2], 1))
        q = gg.reshape_3d(_pointwise(block["query"], h), d_head, block["query"].ne[3] // d_head, n)
        g = Scope({}, n, 0, EPS, self._flash, None)
        o = attend(g, gg.permute(q, 0, 2, 1, 3), *parts, None, d_head ** -0.5, None)
        return _pointwise(block["output"], gg.reshape_3d(o, d_head * q.ne[1], *x.ne[1:3]))

    def _halved_conv(self, w, x):
        return self._wide_conv(w, _same(x, w.ne[0], 2), 0, 2)

    @staticmethod
    def _wide_conv(w, x, pad, step=1):
        """A convolution over all channels."""
        y = gg.conv_2d_direct(w, gg.permute(x, 2, 0, 1, 3), step, step, pad, pad, 1, 1)
        return gg.cont(gg.permute(y, 1, 2, 0, 3))

    def _fusion(self, fine, coarse):
        """[n_embd, 256] of the last two stages, the second of which has half as many rows and columns."""
        block, (_, columns, rows, _) = self._fused, fine.ne
        if coarse.ne[1:3] != (columns, rows):
            coarse = gg.upscale_ext(coarse, coarse.ne[0], columns, rows, 1, NEAREST)
        x = gg.gelu(self._rms(_pointwise(block["pw_exp"], gg.concat(fine, coarse, 0)), block["pw_exp_norm"]))
        x = self._rms(_pointwise(block["pw_proj"], x), block["pw_proj_norm"])
        x = gg.reshape_2d(x, self.n_embd, columns * rows)
        if columns > N_SIDE:
            x = mean_of_squares(x, columns // N_SIDE, columns, rows)
        return self._rms(x, block["norm"])

    # ------------------------------------------------------------ running
    def encode_field(self, field):
        x = (field.astype(np.float32) / np.float32(255) - self.mean) / self.std
        return self._vectors((N_SIDE, N_SIDE), pixels=x)

    def attention(self, picture, field=0):
        raise NotSupported(f"{self.file.path}: MobileNet V5 has no patches that look at each other in every layer; "
                           f"m.vision.fields(picture).plot() shows what it gets")


def _same(x, n, step):
    """x [channels, columns, rows] with zeros around it, so that a kernel of n gives size / step places; what is odd
    comes behind."""
    pads = []
    for size in x.ne[1:3]:
        least = max((-(-size // step) - 1) * step + n - size, 0)
        pads += [least // 2, least - least // 2]
    return gg.pad_ext(x, 0, 0, *pads, 0, 0) if any(pads) else x


def _by_channel(w, x, step=1):
    """A kernel for each channel."""
    pad = w.ne[0] // 2 if step == 1 else 0
    x = x if step == 1 else _same(x, w.ne[0], step)
    y = gg.conv_2d_dw_direct(w, gg.permute(x, 2, 0, 1, 3), step, step, pad, pad, 1, 1)
    return gg.permute(y, 1, 2, 0, 3)


def _pointwise(w, x):
    """A 1 x 1 convolution."""
    y = gg.mul_mat(gg.reshape_2d(w, w.ne[2], w.ne[3]), gg.reshape_2d(x, x.ne[0], x.ne[1] * x.ne[2]))
    return gg.reshape_3d(y, w.ne[3], *x.ne[1:3])
