"""Whisper: the encoder reads 30 seconds of sound, the decoder writes the text (sounds/speech_network.py).

    mel [frames, n_mels] -> conv 3, GELU -> conv 3 stride 2, GELU -> [dim, n_audio] + positions -> blocks
    tokens -> embedding + positions -> blocks;   feed forward: W2 gelu(W1 x)
"""
import numpy as np

import ggjit as gg
from ggjit.models.core.checks import one_of
from ggjit.models.networks.sounds.speech_network import (
    ALIGN,
    ENCODE,
    GELUS,
    MAX_ROWS,
    N_KEYS,
    N_TOKENS,
    Decode,
    SpeechNetwork,
)
from ggjit.ops.core.errors import ModelError, ShapeError
from ggjit.ops.core.types import F16, F32


class Whisper(SpeechNetwork):
    """`hear(mel)`, then `feed(tokens)`; models/speech makes text of it.

    gelu: "exact", or "ggml": the tanh form, and activations rounded to F16 beside F16 weights, as whisper.cpp computes.
    """

    def __init__(self, file, options=None, kv_type=None, gelu="exact"):
        self._gelu = one_of("gelu", gelu, GELUS)
        super().__init__(file, options, kv_type)

    # ------------------------------------------------------------ loading
    def _load_model(self, hparams):
        self.n_audio, self.n_mels = hparams.positive("encoder.context_length"), hparams.positive("encoder.mel_count")
        if max(self.n_audio, self.n_mels) > MAX_ROWS:
            raise ModelError(f"{self.file.path}: {self.n_audio} frames and {self.n_mels} bands of sound do not fit a "
                             f"Whisper model")
        filters = self.file.arch_get("encoder.mel_filters", kind=np.ndarray)
        if filters.size % self.n_mels or filters.dtype.kind != "f":
            raise ModelError(f"{self.file.path}: {filters.size} numbers of mel filters do not make {self.n_mels} bands")
        self.mel_filters = filters.reshape(self.n_mels, -1).astype(np.float32)
        self._load_weights()

    def _alignment_heads(self):
        flat = self.file.arch_get("alignment_heads", np.zeros(0, np.int32), np.ndarray)
        pairs = [(int(i), int(h)) for i, h in flat.reshape(-1, 2)] if flat.size % 2 == 0 else [(-1, -1)]
        if any(not (0 <= i < self.n_decoder and 0 <= h < self.n_head) for i, h in pairs):
            raise ModelError(f"{self.file.path}: alignment heads {flat.tolist()} are outside of {self.n_decoder} "
                             f"layers of {self.n_head} heads")
        return pairs or super()._alignment_heads()

    def _load_weights(self):
        want, d = self.weights.want, self.n_embd
        self._load_blocks(4 * d, 4 * d, ("query", "value", "out"), norm_bias=True)

        def conv(name, n_in):
            return want(name + ".weight", 3, n_in, d), want(name + ".bias", 1, d)
        self._conv1, self._conv2 = conv("encoder.conv1", self.n_mels), conv("encoder.conv2", d)
        self._audio_positions = want("encoder.positional_embedding", d, self.n_audio)
        self._text_positions = want("decoder.positional_embedding", d, self.n_text)

    # ------------------------------------------------------------ graphs
    def _compared_shapes(self):
        """One pair: the encoder's graph of a whole window and the decoder's of two tokens."""
        return [((ENCODE, self.n_audio), (ALIGN, N_TOKENS, self.n_audio, 0))]

    def largest_graph(self, all_logits=False):
        """The encoder's graph for a whole window."""
        return self.graph(ENCODE, self.n_audio)

    def _common_shapes(self):
        return [(ENCODE, self.n_audio), *(Decode(n, N_KEYS, 1, 1, 1, self.n_audio) for n in (1, 3))]

    def _embedded(self, leaf):
        return gg.add(super()._embedded(leaf), gg.get_rows(self._text_positions, leaf["positions"]))

    def _build_encoder(self, ctx, n_audio):
        """Result [dim, n_audio]; the keys and values for the decoder go to the rows that the input "cache_at" says."""
        inputs = {"mel": np.zeros((self.n_mels, 2 * n_audio), np.float32),
                  "cache_at": np.zeros(n_audio * self.n_head, np.int64)}
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        gelu, d = GELUS[self._gelu], self.n_embd
        (w1, b1), (w2, b2) = self._conv1, self._conv2
        patches = F32 if self._gelu == "exact" else F16
        x = gg.conv_1d(w1, leaf["mel"], 1, 1, 1, patches)
        x = gg.set_name(gelu(gg.add(gg.reshape_2d(x, 2 * n_audio, d), b1)), "conv1")
        # the second convolution gives frames as rows, as the blocks need them
        cols = gg.im2col(w2, x, 2, 0, 1, 0, 1, 0, False, patches)
        x = self._product((gg.reshape_2d(w2, 3 * d, d), gg.reshape_1d(b2, d)), gg.reshape_2d(cols, 3 * d, n_audio))
        x = gg.set_name(gelu(x), "conv2")
        p = self._audio_positions
        x = gg.set_name(gg.add(x, gg.view_2d(p, d, n_audio, p.nb[1], 0)), "enc_embd")
        x, *written = self._encoded(x, n_audio, leaf)
        return inputs, x, *written

    # ------------------------------------------------------------ running
    def hear(self, mel, window=0, n_audio=None):
        """The encoder's results (n_audio, dim) of a mel (n_mels, 2 n_audio), which the decoder reads as that window.

        The array is valid until the network runs again.  Errors: ShapeError.
        """
        n_audio = self.n_audio if n_audio is None else n_audio
        if mel.shape != (self.n_mels, 2 * n_audio):
            raise ShapeError(f"a window of {n_audio} frames has a mel of shape ({self.n_mels}, {2 * n_audio}), got "
                             f"{mel.shape}")
        return self._heard((ENCODE, n_audio), n_audio, window, mel=mel)
