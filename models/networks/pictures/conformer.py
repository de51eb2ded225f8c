"""The conformer of Gemma 4: it turns a sound into vectors, one for 40 ms.

    mel [n_mels, frames] -> twice: conv 3 x 3 of stride 2, norm over channels, ReLU -> W x -> blocks -> W x + b
                         -> W (x / rms(x))

    block         x += f(x) / 2    x += norm(attention(norm x))    x += convolution(norm x)    x += f'(x) / 2    norm x
    f             norm(W2 silu(W1 norm x))
    attention     q = Wq x / (sqrt(d_head) ln 2) * factors,  k = Wk x * log2(1 + e);  a place sees itself and 11 before
                  softmax(50 tanh((q k + q r[distance]) / 50)) v
    convolution   [a b] = W1 x;  a sigmoid(b), each number over the last 5 places;  W2 silu(norm y)

Attention goes over blocks of 12 places with the 12 before, so memory grows with the length of the sound.  A sound is
heard in windows of 30 s.  Source: transformers' Gemma 4; llama.cpp's clip.cpp for what the file holds.
"""
import math

import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.hparams import HParams
from ggjit.models.files.mel import RATE
from ggjit.models.files.short_mel import FRAME, frames_of, htk_filters, short_mel
from ggjit.models.files.sound import Sound, read_sound
from ggjit.models.networks.pictures.hearing import MAX_MELS, MAX_SECONDS, Ears, Hearing
from ggjit.ops.core.errors import ModelError

EPS = 1e-6                      # of every norm; files of older converters state another
BLOCK, BEFORE = 12, 12          # places that are computed together, places before them
SEEN = BLOCK + BEFORE
SOFTCAP = 50.0
Q_SCALE, K_SCALE = 1 / math.log(2), math.log2(1 + math.e)
MASKED = -1e4                   # of scores, which lie between -50 and 50
WINDOW = 30 * RATE              # samples


class Gemma4Ears(Ears):
    before, after = "<|audio>", "<audio|>"


def places_of(frames):
    """Places behind two convolutions of stride 2."""
    return -(-frames // 4)


class Conformer(Hearing):
    # ------------------------------------------------------------ loading
    def _load(self):
        file, hparams = self.file, HParams(self.file)
        self.family = Gemma4Ears()
        self.n_embd, self.n_layer = hparams.n_embd, hparams.n_layer
        self.n_head, self.n_mels = hparams.positive("attention.head_count"), hparams.positive("num_mel_bins")
        if self.n_embd % (2 * self.n_head) or self.n_mels > MAX_MELS or self.n_mels % 4:
            raise ModelError(f"{file.path}: {self.n_head} heads of a width of {self.n_embd} and {self.n_mels} bands of "
                             f"sound do not fit a network that hears")
        hparams.eps("layer")
        for key in ("projection_dim", "feed_forward_length"):       # of the tensors
            hparams.get(key, 0, int)
        self.eps, self.norm_kind, self.d_head = EPS, "rms", self.n_embd // self.n_head
        self.n_vocab = self.n_ctx = 0
        self.filters = htk_filters(self.n_mels)
        self._load_weights()

    def _load_weights(self):
        d, want = self.n_embd, self.weights.want
        self._products, self._limits, self._convs, n = [], {}, [], 1
        for i in range(2):
            name = f"a.conv1d.{i}"
            wide = (getattr(self.file.tensors.get(name + ".weight"), "ne", ()) or (0,))[-1]
            self._convs.append((want(name + ".weight", 3, 3, n, wide), want(name + ".norm.weight", wide)))
            n = wide
        self._in = self.linear_of("a.input_projection", n * self.n_mels // 4, d)
        self._blocks = [self._load_block(f"a.blk.{i}.") for i in range(self.n_layer)]
        self._out = self.chain(d, "a.pre_encode.out")[0]
        self._norm = want("mm.a.soft_emb_norm.weight", self.n_out, optional=True)
        self._projection = self.chain(self.n_out, "mm.a.input_projection")[0]
        self._leave_other_sense()

    def _load_block(self, at):
        d, want = self.n_embd, self.weights.want
        norms = "ffn_norm", "ffn_post_norm", "ffn_norm_1", "ffn_post_norm_1", "attn_post_norm", "conv_norm", "norm_conv"
        w = {name: want(f"{at}{name}.weight", d) for name in (*norms, "ln2")}
        named = "attn_pre_norm" if f"{at}attn_pre_norm.weight" in self.file.tensors else "ln1"
        w["attn_pre_norm"] = want(f"{at}{named}.weight", d)
        w |= {name: self.linear_of(f"{at}attn_{name}", d, d) for name in ("q", "k", "v", "out")}
        for k in ("", "_1"):
            w |= {"up" + k: self._wide(f"{at}ffn_up{k}", d), "down" + k: None}
            w["down" + k] = self.linear_of(f"{at}ffn_down{k}", w["up" + k][0].ne[1], d)
        n = (getattr(self.file.tensors.get(at + "conv_dw.weight"), "ne", ()) or (0,))[0]
        return w | {"pw1": self.linear_of(at + "conv_pw1", d, 2 * d), "pw2": self.linear_of(at + "conv_pw2", d, d),
                    "dw": want(at + "conv_dw.weight", n, d), "r": want(at + "attn_k_rel.weight", d, d),
                    "factors": want(at + "per_dim_scale.weight", self.d_head)}

    def _wide(self, name, n_in):
        """What `linear` takes, of as many rows as the file has."""
        ne = getattr(self.file.tensors.get(name + ".weight"), "ne", ())
        return self.linear_of(name, n_in, ne[1] if len(ne) == 2 else 0)

    # ------------------------------------------------------------ graphs
    def _build(self, ctx, shape):
        """shape: (frames,)."""
        n = places_of(shape[0])
        inputs = {"mel": np.zeros((shape[0], self.n_mels), np.float32), "mask": _mask(n),
                  "distances": _distances(self.n_embd)}
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        x = gg.set_name(self._subsampled(leaf["mel"], n), "embd")
        for i, w in enumerate(self._blocks):
            x = self._halfway(x, w, "")
            o = self._attention(gg.set_name(self._rms(x, w["attn_pre_norm"]), f"attn_norm-{i}"), w, leaf, i)
            x = gg.add(x, self._rms(gg.set_name(self.product(w["out"], o), f"attn_out-{i}"), w["attn_post_norm"]))
            x = gg.add(x, self._convolved(self._rms(x, w["conv_norm"]), w))
            x = gg.set_name(self._rms(self._halfway(x, w, "_1"), w["ln2"]), f"l_out-{i}")
        x = gg.rms_norm(gg.set_name(self.product(self._out, x), "result_norm"), EPS)
        x = x if self._norm is None else gg.mul(x, self._norm)
        return inputs, gg.set_name(self.product(self._projection, x), "vectors")

    def _rms(self, x, w):
        return self.normed(x, (w, None))

    def _subsampled(self, x, n):
        """[n_embd, n] of [n_mels, frames]; channels are the fastest axis."""
        x = gg.reshape_4d(x, *x.ne[:2], 1, 1)
        for w, norm in self._convs:
            x = gg.cont(gg.permute(gg.conv_2d_direct(w, x, 2, 2, 1, 1, 1, 1), 1, 2, 0, 3))
            x = gg.permute(gg.relu(gg.mul(gg.norm(x, EPS), norm)), 2, 0, 1, 3)
        x = gg.permute(x, 1, 2, 0, 3)
        return linear(self._in, gg.reshape_2d(x, x.ne[0] * x.ne[1], n))

    def _halfway(self, x, w, k):
        h = self.product(w["up" + k], self._rms(x, w["ffn_norm" + k]))
        h = self._rms(self.product(w["down" + k], gg.silu(h)), w["ffn_post_norm" + k])
        return gg.add(x, gg.scale(h, 0.5))

    def _attention(self, x, w, leaf, i):
        """[n_embd, n]; in blocks: q [d_head, BLOCK, blocks, n_head], keys and values of SEEN places for each."""
        d, n_head, n = self.d_head, self.n_head, x.ne[1]
        blocks = leaf["mask"].ne[2]
        q, k, v = (gg.reshape_3d(self.product(w[c], x), d, n_head, n) for c in "qkv")
        q = gg.mul(gg.scale(q, Q_SCALE / math.sqrt(d)), w["factors"])
        q = gg.reshape_4d(gg.pad(q, 0, 0, blocks * BLOCK - n, 0), d, n_head, BLOCK, blocks)
        q = gg.cont(gg.permute(q, 0, 3, 1, 2))
        k, v = (self._overlapping(t, blocks) for t in (gg.scale(k, K_SCALE), v))
        scores = gg.add(gg.mul_mat(gg.cont(gg.permute(k, 0, 3, 1, 2)), q), self._by_distance(q, w["r"], leaf))
        scores = gg.scale(gg.tanh(gg.scale(scores, 1 / SOFTCAP)), SOFTCAP)
        p = gg.set_name(gg.soft_max_ext(scores, leaf["mask"], 1.0, 0.0), f"kq_soft_max-{i}")
        o = gg.mul_mat(gg.cont(gg.permute(v, 1, 3, 0, 2)), p)               # [d_head, BLOCK, blocks, n_head]
        o = gg.reshape_2d(gg.cont(gg.permute(o, 0, 2, 3, 1)), self.n_embd, blocks * BLOCK)
        return gg.view_2d(o, self.n_embd, n, o.nb[1], 0)

    @staticmethod
    def _overlapping(x, blocks):
        """[d_head, n_head, SEEN, blocks]: places of each block and those before it."""
        d, n_head, n, _ = x.ne
        x = gg.pad_ext(x, 0, 0, 0, 0, BEFORE, blocks * BLOCK - n, 0, 0)
        return gg.view_4d(x, d, n_head, SEEN, blocks, x.nb[1], x.nb[2], BLOCK * x.nb[2], 0)

    def _by_distance(self, q, r, leaf):
        """[SEEN, BLOCK, blocks, n_head]: q r of the distance, for each place and what it may see."""
        d, _, blocks, n_head = q.ne
        r = gg.reshape_3d(gg.mul_mat(r, leaf["distances"]), d, n_head, BEFORE + 1)
        y = gg.mul_mat(gg.permute(r, 0, 2, 1, 3), gg.reshape_3d(q, d, BLOCK * blocks, n_head))
        # rows of SEEN + 1 read as rows of SEEN: each is one further to the right
        y = gg.reshape_3d(gg.pad(y, SEEN - BEFORE, 0, 0, 0), (SEEN + 1) * BLOCK, blocks, n_head)
        y = gg.cont(gg.view_3d(y, SEEN * BLOCK, blocks, n_head, y.nb[1], y.nb[2], 0))
        return gg.reshape_4d(y, SEEN, BLOCK, blocks, n_head)

    def _convolved(self, x, w):
        d, n, kernel = self.n_embd, x.ne[1], w["dw"]
        y = self.product(w["pw1"], x)
        a, b = (gg.view_2d(y, d, n, y.nb[1], k * d * y.nb[0]) for k in range(2))
        y = gg.cont(gg.transpose(gg.mul(a, gg.sigmoid(gg.cont(b)))))
        y = gg.ssm_conv(gg.pad_ext(y, kernel.ne[0] - 1, 0, 0, 0, 0, 0, 0, 0), kernel)
        return self.product(w["pw2"], gg.silu(self._rms(y, w["norm_conv"])))

    def largest_graph(self, all_logits=False):
        return self.graph(*self._common_shapes()[0])

    def _common_shapes(self):
        return ((frames_of(WINDOW),),)

    def _compared_shapes(self):
        return list(self._common_shapes())

    # ------------------------------------------------------------ running
    def encode(self, sound):
        """float32 (n, n_out): vectors of a sound, as read_sound takes it; at most an hour.

        Errors: BadFile, ParamError, ShapeError, TypeMismatch.
        """
        sound, out = sound if isinstance(sound, Sound) else read_sound(sound, MAX_SECONDS), []
        for start in range(0, max(sound.n_samples, 1), WINDOW):
            samples = sound.read(start, min(WINDOW, sound.n_samples - start))
            if not start:
                samples = np.pad(samples, (0, max(FRAME - len(samples), 0)))        # something is heard of every sound
            if frames_of(len(samples)):
                mel = short_mel(samples, self.filters)
                out.append(self._vectors((len(mel),), mel=mel))
        return np.concatenate(out)


def _mask(n):
    """float16 (blocks, BLOCK, SEEN): 0 where a place sees another."""
    first = np.arange(0, n, BLOCK)[:, None, None]
    place, other = first + np.arange(BLOCK)[:, None], first - BEFORE + np.arange(SEEN)
    sees = (other >= 0) & (other < n) & (other <= place) & (place - other < BEFORE)
    return np.where(sees, 0, MASKED).astype(np.float16)


def _distances(n_embd):
    """float32 (13, n_embd): sines and cosines of the distances 12, 11, ... 0."""
    n = n_embd // 2
    angles = np.outer(np.arange(BEFORE, -1, -1), np.exp(-np.arange(n) * (math.log(10000.0) / max(n - 1, 1))))
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
