"""Log-mel spectrograms of any part of a recording, as OpenAI's Whisper makes them.

    samples, mirrored at the start, zeros behind the end -> frames of 400, every 160 -> Hann window -> |DFT|^2 [201]
            -> mel filters -> log10, at least the recording's maximum - 8 -> (x + 4) / 4

The DFT of a real frame y of 400 samples is folded twice, since cosines and sines repeat themselves:

    e[n], o[n] = y[n] +- y[400 - n]                        201 cosines, 199 sines remain
    even k     e[n] + e[200 - n],  o[n] - o[200 - n]       101 and 99 of each remain
    odd k      e[n] - e[200 - n],  o[n] + o[200 - n]

which is 20,000 products of float64 for a frame instead of 160,000: 2 us.
"""
import numpy as np
from numba import types

from ggjit.ops.core.errors import ModelError
from ggjit.ops.core.host_memory import empty
from ggjit.ops.native.jit import array_maker, native
from ggjit.ops.native.mem import ld_f32, ld_f64, st_f64

RATE, N_FFT, HOP = 16000, 400, 160      # Hz, samples
HALF, QUARTER, N_BINS = 200, 100, 201
FRAMES_PER_SECOND = RATE // HOP
SILENCE = 3000                          # frames of silence behind the end of a recording
FLOOR, RANGE = 1e-10, 8.0               # smallest energy; decades below the maximum that are kept
AT_ONCE = 1 << 14                       # frames of a pass over a long recording
N_SCRATCH = N_FFT + 4 * 104 + 2 * 104   # float64: a frame, four folded rows, spectra of even and odd k
f64s = array_maker(types.float64)


@native("i64(i64, i64, i64, i64, i64, i64, i64)")
def mel_energies(samples, n_frames, tables, filters, n_mels, out, scratch):
    """Mel energies of n_frames frames from `samples` on, 160 apart: float64 out[n_frames, n_mels].

    tables: float64 window [400], then for even and odd k cosines and sines [101, 104] each: row n, column k / 2.
    filters: float64 rows of 2 + 201: first bin, end, weights.
    """
    y = f64s(scratch, 400)
    rows = scratch + 8 * 400
    re, im = f64s(rows + 8 * 416, 104), f64s(rows + 8 * 520, 104)
    power = f64s(scratch, 208)          # reuses the memory of the frame, which has been folded
    for frame in range(n_frames):
        at = samples + 4 * 160 * frame
        for n in range(400):
            y[n] = ld_f32(at + 4 * n) * ld_f64(tables + 8 * n)
        ce, co, so, se = (f64s(rows, 104), f64s(rows + 8 * 104, 104), f64s(rows + 8 * 208, 104),
                          f64s(rows + 8 * 312, 104))
        for n in range(101):
            e1 = y[n] + y[400 - n] if n else y[0]
            e2 = y[200 - n] + y[200 + n] if n else y[200]
            o1 = y[n] - y[400 - n] if n else 0.0
            o2 = y[200 - n] - y[200 + n]
            half = 0.5 if n == 100 else 1.0             # the middle sample is folded onto itself
            ce[n], co[n] = half * (e1 + e2), half * (e1 - e2)
            so[n], se[n] = half * (o1 - o2), half * (o1 + o2)
        for parity in range(2):
            cos = tables + 8 * 400 + 8 * 101 * 104 * 2 * parity
            sin = cos + 8 * 101 * 104
            for k in range(104):
                re[k] = 0.0
                im[k] = 0.0
            for n in range(101):
                c = co[n] if parity else ce[n]
                s = se[n] if parity else so[n]
                crow, srow = f64s(cos + 8 * 104 * n, 104), f64s(sin + 8 * 104 * n, 104)
                for k in range(104):
                    re[k] += c * crow[k]
                    im[k] += s * srow[k]
            for k in range(101 - parity):
                power[2 * k + parity] = re[k] * re[k] + im[k] * im[k]
        for m in range(n_mels):
            row = f64s(filters + 8 * 203 * m, 203)
            total = 0.0
            for k in range(int(row[0]), int(row[1])):
                total += power[k] * row[2 + k]
            st_f64(out + 8 * (frame * n_mels + m), total)
    return 0


def _tables():
    """float64: the window, then cosines and sines of even k, of odd k, each [101, 104]."""
    n, k = np.arange(QUARTER + 1)[:, None], np.arange(104)[None]
    out = [0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)]
    for parity in (0, 1):
        angle = 2 * np.pi * n * (2 * k + parity) / N_FFT
        out += [np.cos(angle).reshape(-1), np.sin(angle).reshape(-1)]
    return np.concatenate(out)


class LogMel:
    """Spectrograms by the mel filters (n_mels, 201) of a model.  sound: a Sound (sound.py)."""

    def __init__(self, filters):
        if filters.shape[1] != N_BINS:
            raise ModelError(f"mel filters over {filters.shape[1]} frequencies, expected {N_BINS}")
        self.n_mels, self._tables = len(filters), _tables()
        self._filters = np.zeros((self.n_mels, 2 + N_BINS))
        self._filters[:, 2:] = filters
        for row in self._filters:
            used = np.flatnonzero(row[2:])
            row[:2] = (used[0], used[-1] + 1) if len(used) else (0, 0)

    def energies(self, sound, first, n):
        """float64 (n, n_mels) of the frames first ... first + n - 1 of a recording."""
        out = empty((n, self.n_mels), np.float64, "a spectrogram")
        # only frames that overlap the sound; the others are zero
        n_heard = max(0, min(n, -(-(sound.n_samples + HALF) // HOP) - first))
        out[n_heard:] = 0.0
        if n_heard:
            start = first * HOP - HALF
            x = _padded(sound, start, (n_heard - 1) * HOP + N_FFT)
            mel_energies(x, n_heard, self._tables, self._filters, self.n_mels, out, np.empty(N_SCRATCH))
        return out

    def peak(self, sound):
        """log10 of the largest energy of the whole recording."""
        n, top = n_frames(sound.n_samples) + 2, 0.0         # the last frames lie partly behind the end
        for first in range(0, n, AT_ONCE):
            top = max(top, self.energies(sound, first, min(AT_ONCE, n - first)).max(initial=0.0))
        return float(np.log10(max(top, FLOOR)))

    def window(self, sound, first, n, peak):
        """float32 (n_mels, n) of those frames; peak: of the recording."""
        x = np.log10(np.maximum(self.energies(sound, first, n), FLOOR))
        return np.ascontiguousarray(((np.maximum(x, peak - RANGE) + 4.0) / 4.0).T, np.float32)

    def __call__(self, sound):
        """float32 (n_mels, frames) of a whole recording and 30 s of silence behind it."""
        return self.window(sound, 0, n_frames(sound.n_samples) + SILENCE, self.peak(sound))


def mel_filters(n_mels):
    """float32 (n_mels, 201): triangles of equal area, on a scale that is linear up to 1000 Hz and logarithmic above
    (Slaney's)."""
    def hz(mel):
        return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))
    edges = hz(np.linspace(0, 15 + 27 * np.log(RATE / 2000) / np.log(6.4), n_mels + 2))
    bins = np.linspace(0, RATE / 2, N_FFT // 2 + 1)
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
    triangles *= (2 / (edges[2:] - edges[:-2]))[:, None]
    return triangles


def n_frames(n_samples):
    """Frames of a recording, of 10 ms."""
    return n_samples // HOP


def _padded(sound, start, n):
    """float32 samples start ... start + n - 1, mirrored before the start, zeros behind the end."""
    x = np.zeros(n, np.float32)
    before = max(0, -start)
    part = sound.read(start + before, n - before)
    x[before:before + len(part)] = part
    if before:
        mirrored = sound.read(1, before)
        x[before - len(mirrored):before] = mirrored[::-1]
    return x
