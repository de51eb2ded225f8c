"""Moonshine: speech networks whose encoder takes sounds of any length (sounds/speech_network.py).

    samples at 16 kHz -> conv 127 stride 64, tanh, group norm -> conv 7 stride 3, GELU -> conv 3 stride 2, GELU
                      -> [dim, n_audio], a frame of 24 ms each -> blocks
    tokens -> embedding -> blocks;   feed forward of the decoder: W2 (silu(gate) up)

No bias in attention and norms; RoPE turns pairs of neighbours of the first n_rot numbers of each head.

Source: arXiv 2410.15608; transformers' modeling_moonshine.
"""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.hparams import ROPE_BASES, ROPE_NORMAL
from ggjit.models.networks.sounds.speech_network import ALIGN, ENCODE, N_KEYS, N_TOKENS, Decode, SpeechNetwork
from ggjit.ops.core.errors import ModelError, ParamError, ShapeError
from ggjit.ops.core.types import F32

KERNELS, STRIDES = (127, 7, 3), (64, 3, 2)      # of the convolutions
RATE = 16000
MAX_SECONDS = 30                # of a sound that is heard at once
GROUP_EPS = 1e-5


def n_frames(n_samples):
    """Frames of so many samples; 0 where they are too few for one."""
    for kernel, stride in zip(KERNELS, STRIDES, strict=True):
        n_samples = max(0, (n_samples - kernel) // stride + 1)
    return n_samples


LEAST = next(n for n in range(RATE) if n_frames(n))     # samples of one frame


class Moonshine(SpeechNetwork):
    """`hear(samples)`, then `feed(tokens)`; models/speech makes text of it."""

    # ------------------------------------------------------------ loading
    def _load_model(self, hparams):
        self.n_audio = n_frames(MAX_SECONDS * RATE)
        self.n_rot = hparams.positive("rope.dimension_count")
        self._base = hparams.between("rope.freq_base", *ROPE_BASES, 10000.0)
        if self.n_rot > self.d_head or self.n_rot % 2:
            raise ModelError(f"{self.file.path}: {self.n_rot} rotated numbers of heads of {self.d_head} are not "
                             f"those of a Moonshine model")
        want, d, n_ff = self.weights.want, self.n_embd, hparams.positive("feed_forward_length")
        self._load_blocks(n_ff, 2 * n_ff, (), norm_bias=False)
        sizes = (1, d), (d, 2 * d), (2 * d, d)
        self._convs = [want(f"encoder.conv{i}.weight", kernel, *ne)
                       for i, (kernel, ne) in enumerate(zip(KERNELS, sizes, strict=True), 1)]
        self._conv_biases = [want(f"encoder.conv{i}.bias", n) for i, n in ((2, 2 * d), (3, d))]
        self._group_norm = [want(f"encoder.group_norm.{what}", d) for what in ("weight", "bias")]

    # ------------------------------------------------------------ graphs
    def largest_graph(self, all_logits=False):
        """The encoder's graph for the longest sound."""
        return self.graph(ENCODE, MAX_SECONDS * RATE)

    def _compared_shapes(self):
        return [((ENCODE, 10 * RATE), (ALIGN, N_TOKENS, n_frames(10 * RATE), 0))]

    def _common_shapes(self):
        n = n_frames(10 * RATE)
        return [(ENCODE, 10 * RATE), *(Decode(n_tokens, N_KEYS, 1, 1, 1, n) for n_tokens in (1, 3))]

    def _turned(self, x, leaf):
        heads = gg.reshape_3d(x, self.d_head, self.n_head, x.ne[1])
        y = gg.rope_ext(heads, leaf["positions"], None, self.n_rot, ROPE_NORMAL, 0, self._base, 1.0, 0.0, 1.0,
                        0.0, 0.0)
        return gg.reshape_2d(y, self.n_embd, x.ne[1])

    def _build_encoder(self, ctx, n_samples):
        n_audio, d = n_frames(n_samples), self.n_embd
        inputs = {"samples": np.zeros((1, n_samples), np.float32), "positions": np.arange(n_audio, dtype=np.int32),
                  "cache_at": np.zeros(n_audio * self.n_head, np.int64)}
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        x = gg.tanh(self._conv(0, leaf["samples"], None))
        x = gg.cont(gg.transpose(x))                                    # [frames, dim]: one group over all of it
        x = gg.group_norm(gg.reshape_3d(x, x.ne[0], d, 1), 1, GROUP_EPS)
        w, b = (gg.reshape_2d(p, 1, d) for p in self._group_norm)
        x = gg.set_name(gg.add(gg.mul(gg.reshape_2d(x, x.ne[0], d), w), b), "conv1")
        x = gg.set_name(gg.gelu_erf(self._conv(1, x, self._conv_biases[0])), "conv2")
        x = gg.gelu_erf(self._conv(2, gg.cont(gg.transpose(x)), self._conv_biases[1]))
        x, *written = self._encoded(gg.set_name(x, "enc_embd"), n_audio, leaf)
        return inputs, x, *written

    def _conv(self, i, x, bias):
        """[channels, frames] of x [frames, channels]."""
        w = self._convs[i]
        cols = gg.im2col(w, x, STRIDES[i], 0, 0, 0, 1, 0, False, F32)
        n = cols.ne[0]
        return self._product((gg.reshape_2d(w, n, w.ne[2]), bias), gg.reshape_2d(cols, n, cols.ne[1]))

    # ------------------------------------------------------------ running
    def hear(self, samples, window=0):
        """The encoder's results (frames, dim) of float32 samples (n,), which the decoder reads as that window.

        The array is valid until the network runs again.  Errors: ShapeError, ParamError for a sound that is too short
        or longer than 30 s.
        """
        if samples.ndim != 1:
            raise ShapeError(f"a sound is one row of samples, got shape {samples.shape}")
        if not LEAST <= len(samples) <= MAX_SECONDS * RATE:
            raise ParamError(f"{len(samples)} samples: {LEAST} to {MAX_SECONDS * RATE} are heard at once; transcribe "
                             f"takes any number")
        return self._heard((ENCODE, len(samples)), n_frames(len(samples)), window, samples=samples)
