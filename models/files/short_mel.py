"""Gemma's log-mel spectrograms: short frames, magnitudes, the natural logarithm.

    samples, 160 zeros before them -> frames of 320, every 160 -> Hann window -> |DFT of 512| [257]
            -> mel filters -> ln(x + 0.001)

A frame counts if it and the sample behind it lie within the sound.  Source: transformers' Gemma4AudioFeatureExtractor.
"""
import numpy as np

from ggjit.models.files.mel import RATE

FRAME, STEP, N_FFT = 320, 160, 512      # samples
BEFORE = FRAME // 2                     # zeros
FLOOR = 0.001


def frames_of(n_samples):
    """Frames of a sound; 0 for one that is shorter than a frame."""
    return max((n_samples + BEFORE - FRAME - 1) // STEP + 1, 0)


def short_mel(samples, filters):
    """float32 (frames, n_mels) of float32 samples; filters: float64 (257, n_mels)."""
    n = frames_of(len(samples))
    padded = np.concatenate([np.zeros(BEFORE, np.float32), samples])
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::STEP][:n]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)
    return np.log(np.abs(np.fft.rfft(frames * window, N_FFT)) @ filters + FLOOR).astype(np.float32)


def htk_filters(n_mels):
    """float64 (257, n_mels): triangles of height 1, equally far apart on the scale 2595 log10(1 + f / 700)."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, n_mels + 2) / 2595) - 1)
    bins = np.linspace(0, RATE / 2, N_FFT // 2 + 1)[:, None]
    rising, falling = (bins - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - bins) / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rising, falling))
