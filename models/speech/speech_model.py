"""The common part of all speech models: sounds, the voice detector, names of tensors, memory."""
import os
import pathlib

from ggjit.core.process_memory import give_back_heap
from ggjit.models.files.sound import Sound, open_sound, with_samples
from ggjit.models.networks.sounds.silero import find_silero, load_vad
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.user_warnings import warn


class SpeechModel:
    """Base of Speech (Whisper) and MoonshineSpeech.  `.network`: of models/networks."""
    network = None
    _vad = None

    def names(self, pattern="*"):
        """The named tensors of encoder and decoder that match: name, op, shape in NumPy order, backend.

            m.names("blk.*.enc_l_out")          # what each layer of the encoder gives on
            m.names("blk.3.cross_*")            # the decoder's attention to the sound, in its layer 3

        Errors: ParamError where nothing matches, with the nearest name.
        """
        return self.network.names(pattern)

    def patch(self, changes):
        """A `with` block in which tensors get other values: {name or pattern: function, number or array}.

            with m.patch({"blk.3.enc_ffn_out": 0}):
                m.transcribe("talk.wav").text

        A function gets a copy of the values and gives the new ones.  Errors: as `names`.
        """
        return self.network.patch(changes)

    def memory(self):
        """A MemoryUse: the bytes that the model takes from this process now, by term (m.memory() of load_model).  What
        spectrograms and recordings left on the heap goes back to the system first."""
        give_back_heap()
        return self.network.memory()

    # ------------------------------------------------------------ sound
    def _sound(self, sound, rate):
        if isinstance(sound, Sound):
            return sound
        if isinstance(sound, str | os.PathLike):
            return open_sound(sound)
        return with_samples(sound, rate)

    def _stretches(self, sound, vad):
        """[(first, end), ...] in seconds with speech; None: no detector looked for it."""
        if vad is False or vad is None:
            return None
        if vad is True:
            vad = self._own_vad()
            if vad is None:
                return None
        elif not hasattr(vad, "stretches"):
            raise ParamError(f"vad must be True, False or a model of load_vad, got {vad!r}")
        return vad.stretches(sound.read, sound.n_samples)

    def _own_vad(self):
        """The Silero that lies beside the model, loaded once; None, and a warning, where there is none."""
        if self._vad is None:
            path = find_silero(pathlib.Path(self.network.file.path).parent)
            if path is None:
                warn(f"no voice detector beside {self.network.file.path}: silence is heard too. Put "
                              f"whisper.cpp's ggml-silero-v6.2.0.bin there, name it in GGJIT_VAD, or say vad=False")
                return None
            self._vad = load_vad(path)
        return self._vad

    def free(self):
        """Give weights and caches back; a second call does nothing."""
        self.network.free()
        if self._vad is not None:
            self._vad.free()
            self._vad = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.free()

    def __repr__(self):
        n = self.network
        return f"<{type(self).__name__} {n.file.path}: {n.n_layer} + {n.n_decoder} layers of {n.n_embd}, on " \
               f"{n.backend!r}>"
