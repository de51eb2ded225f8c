"""Sounds for tests, WAV files of them, and how far they are apart."""
import struct

import numpy as np

RATE = 16000


def noise(seconds, seed=1, loudness=0.3):
    return (np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * loudness).astype(np.float32)


def relative(a, b):
    """|a - b| / |b|."""
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def wav(path, x, rate=RATE, channels=1, bits=16, code=1):
    amplitude = 1 if code == 3 else 1 << bits - 1
    a = np.clip(np.round(x.astype(np.float64) * amplitude), -amplitude, amplitude - 1) if code == 1 else x
    a = np.repeat(a[:, None], channels, 1).reshape(-1)
    raw = {(1, 8): lambda: (a + 128).astype("u1").tobytes(), (1, 16): lambda: a.astype("<i2").tobytes(),
           (1, 24): lambda: a.astype("<i4").view("u1").reshape(-1, 4)[:, :3].tobytes(),
           (1, 32): lambda: a.astype("<i4").tobytes(), (3, 32): lambda: a.astype("<f4").tobytes(),
           (3, 64): lambda: a.astype("<f8").tobytes()}[code, bits]()
    block = channels * bits // 8
    path.write_bytes(b"RIFF" + struct.pack("<I", 36 + len(raw)) + b"WAVEfmt " + struct.pack(
        "<IHHIIHH", 16, code, channels, rate, rate * block, block, bits) + b"data" + struct.pack("<I", len(raw)) + raw)
    return path
