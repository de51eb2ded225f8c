"""Reads WAV files as samples for speech models."""
import os
import wave

import numpy as np

from ggjit.ops.core.errors import BadFile
from ggjit.ops.core.host_memory import oom_guard

WIDTHS = {1: ("u1", 128, 7), 2: ("<i2", 0, 15), 4: ("<i4", 0, 31)}      # bytes: dtype, zero, bits of the amplitude


def read_wav(path, sample_rate=16000):
    """float32 in [-1, 1) of one channel: several channels are averaged.  Whole-number PCM of 8, 16 or 32 bits.

    Errors: BadFile, also for another sample rate (the message says how to convert).
    """
    path = os.fspath(path)
    try:
        with wave.open(path) as w:
            rate, width, channels = w.getframerate(), w.getsampwidth(), w.getnchannels()
            raw = w.readframes(w.getnframes())
    except OSError as e:
        raise BadFile(f"{path}: {e.strerror}; check the path and the permissions") from e
    except (wave.Error, EOFError, ValueError, RuntimeError) as e:
        raise BadFile(f"{path}: not a PCM WAV file ({e or 'it ends too early'}); convert it with ffmpeg -i IN "
                      f"-ar {sample_rate} -ac 1 OUT.wav") from None
    if rate != sample_rate or width not in WIDTHS:
        raise BadFile(f"{path}: {rate} Hz, {8 * width} bits, expected {sample_rate} Hz with 8, 16 or 32 bits; convert "
                      f"it with ffmpeg -i IN -ar {sample_rate} -ac 1 OUT.wav")
    dtype, zero, bits = WIDTHS[width]
    n = len(raw) // (width * channels)
    with oom_guard(f"{path} as float32", 8 * n * channels):
        a = np.frombuffer(raw, dtype, n * channels).reshape(n, channels).astype(np.float64) - zero
        return (a.mean(1) / 2.0 ** bits).astype(np.float32)
