"""Whisper's encoder beside a decoder (llama.cpp's mmproj files): it turns a sound into vectors for the decoder.

    mel [frames, n_mels] -> conv 3, GELU -> conv 3 stride 2, GELU -> [dim, n_audio] + positions -> blocks -> projector

    ultravox    8 (or as the file says) frames side by side, W2 norm(swiglu(W1 norm x))
    qwen2a      the mean of two frames, W x
    voxtral     4 frames side by side, W2 gelu(W1 x)

A sound is heard in windows of 30 s, the last one filled up with silence.  Source: the models' own code in transformers
(Ultravox's beside its weights); llama.cpp's clip.cpp for what the file holds.  llama.cpp takes the mean of two of
Voxtral's frames before, which the model does not.
"""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import Scope, linear
from ggjit.models.blocks.hparams import HParams
from ggjit.models.files.mel import LogMel, mel_filters, n_frames
from ggjit.models.files.sound import Sound, read_sound
from ggjit.models.networks.pictures.projector import Projector
from ggjit.models.networks.pictures.tower import SenseFile, Tower
from ggjit.ops.core.errors import ModelError, NotSupported

AVG = 1                         # of pool_1d
RMS_EPS = 1e-6                  # of Ultravox's norms
MAX_MELS, MAX_FRAMES = 1 << 10, 1 << 13
MAX_SECONDS = 3600              # of one sound: 225,000 vectors and more


class Ears(Projector):
    """A family.  As written here: frames side by side."""

    def load(self, v):
        """The projector's weights; `v.n_out`."""

    def pooled(self, v, x):
        """The blocks' results, before the norm behind them."""
        return x

    def n_heard(self, v):
        """Vectors of a window."""
        return -(-v.n_audio // v.n_stack)


def stacked(v, x):
    """[d n_stack, n / n_stack]: frames side by side, zeros behind the last."""
    n = -(-x.ne[1] // v.n_stack) * v.n_stack
    x = x if n == x.ne[1] else gg.pad(x, 0, n - x.ne[1], 0, 0)
    return gg.reshape_2d(gg.cont(x), v.n_embd * v.n_stack, n // v.n_stack)


class Ultravox(Ears):
    def load(self, v):
        self.up, = v.chain(v.n_embd * v.n_stack, "mm.a.mlp.1")
        half = v.n_out // 2
        self.down, = v.chain(half, "mm.a.mlp.2")
        self.norms = [v.weights.want(f"mm.a.norm_{name}.weight", n)
                      for name, n in (("pre", v.n_embd * v.n_stack), ("mid", half))]

    def project(self, v, x, field):
        """The second half of W1's rows is the gate."""
        pre, mid = self.norms
        x = linear(self.up, gg.mul(gg.rms_norm(stacked(v, x), RMS_EPS), pre))
        x = gg.mul(gg.rms_norm(gg.swiglu_swapped(x), RMS_EPS), mid)
        return linear(self.down, x)


class Qwen2Audio(Ears):
    after, before = "<|audio_eos|>", "<|audio_bos|>"

    def load(self, v):
        self.projection, = v.chain(v.n_embd, "mm.a.fc")

    def pooled(self, v, x):
        return gg.cont(gg.transpose(gg.pool_1d(gg.cont(gg.transpose(x)), AVG, 2, 2, 0)))

    def project(self, v, x, field):
        return linear(self.projection, x)

    def n_heard(self, v):
        return v.n_audio // 2


class Voxtral(Ears):
    before = "[BEGIN_AUDIO]"

    def load(self, v):
        self.layers = v.chain(v.n_embd * v.n_stack, "mm.a.mlp.1", "mm.a.mlp.2")

    def project(self, v, x, field):
        up, down = self.layers
        return linear(down, gg.gelu_erf(linear(up, stacked(v, x))))


EARS = {"ultravox": Ultravox, "qwen2a": Qwen2Audio, "voxtral": Voxtral}
CONFORMER = "gemma4a"           # has a network of its own


class HearingFile(SenseFile):
    """What hears beside a decoder: an mmproj file.  Errors: BadFile, ModelError."""
    SENSE, PART = "audio", "part that hears"


class Hearing(Tower):
    """`encode(sound)`: float32 (n, n_out), the vectors of a sound."""
    prefix, named_after = "a", "sound"

    # ------------------------------------------------------------ loading
    def _load(self):
        file, hparams = self.file, HParams(self.file)
        if file.projector not in EARS:
            raise NotSupported(f"{file.path}: projector {file.projector!r} of sounds is not supported; supported: "
                               f"{', '.join((*EARS, CONFORMER))}")
        self.family = EARS[file.projector]()
        self.n_embd, self.n_layer = hparams.n_embd, hparams.n_layer
        self.n_head, self.eps = hparams.positive("attention.head_count"), hparams.eps("layer")
        self.n_mels = hparams.positive("num_mel_bins")
        self.n_stack = hparams.positive("projector.stack_factor", 1)
        positions = file.tensors.get("a.position_embd.weight")
        self.n_audio = positions.ne[1] if positions is not None and len(positions.ne) == 2 else 0
        if self.n_embd % self.n_head or self.n_mels > MAX_MELS or not 0 < self.n_audio <= MAX_FRAMES:
            raise ModelError(f"{file.path}: {self.n_head} heads of a width of {self.n_embd}, {self.n_mels} bands of "
                             f"sound and {self.n_audio} positions do not fit a network that hears")
        self.d_head, self.n_vocab, self.n_ctx = self.n_embd // self.n_head, 0, 0
        self._act = gg.gelu_erf
        for key in ("projection_dim", "feed_forward_length"):       # of the tensors
            hparams.get(key, 0, int)
        self.mel = LogMel(mel_filters(self.n_mels))
        self._load_weights()

    def _load_weights(self):
        want, d = self.weights.want, self.n_embd
        self._products, self._limits, self.norm_kind = [], {}, "layer"
        self._convs = [(want(f"a.conv1d.{i}.weight", 3, n, d), self._conv_bias(f"a.conv1d.{i}.bias"))
                       for i, n in ((1, self.n_mels), (2, d))]
        self._positions = want("a.position_embd.weight", d, self.n_audio)
        self._load_blocks()
        self.family.load(self)

    def _conv_bias(self, name):
        """A row of numbers, or a column of them."""
        ne = getattr(self.file.tensors.get(name), "ne", (1, self.n_embd))
        return self.weights.want(name, *((self.n_embd,) if len(ne) == 1 else (1, self.n_embd)))

    # ------------------------------------------------------------ graphs
    def _build(self, ctx, shape):
        """shape: (frames behind the convolutions,)."""
        n, d = shape[0], self.n_embd
        inputs = {"mel": np.zeros((self.n_mels, 2 * n), np.float32)}
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        (w1, b1), (w2, b2) = self._convs
        x = gg.reshape_2d(gg.conv_1d(w1, leaf["mel"], 1, 1, 1, gg.F32), 2 * n, d)
        x = gg.set_name(gg.gelu_erf(gg.add(x, gg.reshape_2d(b1, 1, d))), "conv1")
        # the second convolution gives frames as rows, as the blocks need them
        columns = gg.reshape_2d(gg.im2col(w2, x, 2, 0, 1, 0, 1, 0, False, gg.F32), 3 * d, n)
        x = gg.gelu_erf(linear((gg.reshape_2d(w2, 3 * d, d), gg.reshape_1d(b2, d)), columns))
        p = self._positions
        x = gg.set_name(gg.add(gg.set_name(x, "conv2"), gg.view_2d(p, d, n, p.nb[1], 0)), "embd")
        g = Scope(leaf, n, 0, self.eps, self._flash, None)
        for i, block in enumerate(self._blocks):
            x = self._block(g, x, block, i)
        x = self.family.pooled(self, x)
        x = x if self._post_norm is None else self.normed(x, self._post_norm)
        return inputs, gg.set_name(self.family.project(self, gg.set_name(x, "result_norm"), None), "vectors")

    def largest_graph(self, all_logits=False):
        return self.graph(self.n_audio)

    def _common_shapes(self):
        return ((self.n_audio,),)

    def _compared_shapes(self):
        return [(self.n_audio,)]

    # ------------------------------------------------------------ running
    def encode(self, sound):
        """float32 (n, n_out): vectors of a sound, as read_sound takes it; at most an hour.

        Errors: BadFile, ParamError, ShapeError, TypeMismatch.
        """
        sound = sound if isinstance(sound, Sound) else read_sound(sound, MAX_SECONDS)
        peak, n = self.mel.peak(sound), 2 * self.n_audio
        starts = range(0, max(n_frames(sound.n_samples), 1), n)
        return np.concatenate([self._vectors((self.n_audio,), mel=self.mel.window(sound, first, n, peak))
                               for first in starts])

    def pieces(self, sound):
        """[text or float32 vectors, ...]: what the decoder reads of a sound, in order."""
        return [piece for piece in (self.family.before, self.encode(sound), self.family.after) if len(piece)]
