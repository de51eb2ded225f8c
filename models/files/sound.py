"""Recordings as float32 samples of one channel at 16 kHz, read in parts: ten hours take no more memory than ten
seconds.

    with_samples(array)       an array that is there
    open_sound("talk.wav")    WAV, mapped: PCM of 8, 16, 24, 32 bits, float of 32, 64
    read_sound(source)        any of them, the bytes of a file, or (samples, rate)
    open_sound("talk.mp3")    anything PyAV reads (pip install 'ggjit[audio]'), by way of a temporary file

Several channels are averaged.  Another sample rate is changed by a windowed sinc, and `sound.notes` says so.
"""
import contextlib
import functools
import itertools
import math
import mmap
import os
import stat
import struct
import tempfile

import numpy as np

from ggjit.models.core.checks import integer
from ggjit.ops.core.errors import BadFile, ParamError, ShapeError, TypeMismatch, extra

RATE = 16000
LOWEST, HIGHEST = 1000, 768000          # Hz of a recording
MAX_CHANNELS = 64
PIECE = 1 << 20                         # samples at a time
LOBES = 24                              # zero crossings of the sinc on each side
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE   # WAVE_FORMAT_*
# {(format, bits): (dtype, zero, amplitude)}; 24 bits are three bytes
FORMATS = {(PCM, 8): ("u1", 128, 1 << 7), (PCM, 16): ("<i2", 0, 1 << 15), (PCM, 24): ("u1", 0, 1 << 23),
           (PCM, 32): ("<i4", 0, 1 << 31), (FLOAT, 32): ("<f4", 0, 1), (FLOAT, 64): ("<f8", 0, 1)}
OF_DTYPE = {"u1": (PCM, 8), "i2": (PCM, 16), "i4": (PCM, 32)}


class Sound:
    """n_samples at RATE, `read(first, n)` and `notes`, what was done to the recording.

    frames(first, n): float32 of the source, one channel at `rate`; checked here for values that are no numbers.
    """

    def __init__(self, name, frames, n_frames, rate=RATE, notes=()):
        self.name, self._frames, self._n, self.rate, self.notes = name, frames, n_frames, rate, list(notes)
        if not n_frames:
            raise ParamError(f"{name}: there are no samples")
        if rate != RATE:
            self.notes.append(f"{name}: {rate} Hz, changed to {RATE} Hz")
        self.n_samples = n_frames if rate == RATE else -(-n_frames * RATE // rate)

    @property
    def seconds(self):
        return self.n_samples / RATE

    def read(self, first, n):
        """float32 of the samples first ... first + n - 1, fewer at the end.  Errors: ParamError."""
        n = max(0, min(n, self.n_samples - first))
        x = self._source(first, n) if self.rate == RATE else self._resampled(first, n)
        return x

    def _source(self, first, n):
        """n samples of the source, zeros before the start and behind the end."""
        a, b = max(first, 0), min(first + n, self._n)
        out = np.zeros(max(n, 0), np.float32)
        if b > a:
            x = self._frames(a, b - a)
            if not np.isfinite(x).all():
                at = a + int(np.flatnonzero(~np.isfinite(x))[0])
                raise ParamError(f"{self.name}: sample {at} is not a finite number")
            out[a - first:b - first] = x
        return out

    def _resampled(self, first, n):
        """Output m lies at m down / up of the source; a row of `taps` for each of the `up` fractions."""
        up, down, taps = _filters(self.rate)
        width, out = taps.shape[1], np.empty(n, np.float32)
        for start in range(0, n, PIECE // 8):
            m = np.arange(first + start, first + min(n, start + PIECE // 8), dtype=np.int64)
            at, phase = np.divmod(m * down, up)
            base = int(at[0]) - width // 2 + 1
            x = self._source(base, int(at[-1]) - int(at[0]) + width)
            windows = np.lib.stride_tricks.sliding_window_view(x, width)
            out[start:start + len(m)] = np.einsum("ij,ij->i", windows[at - at[0]], taps[phase])
        return out


@functools.lru_cache(8)
def _filters(rate):
    """(up, down, float32 [up, width]): a sinc of LOBES zero crossings under a Kaiser window, below both Nyquist
    frequencies; each row sums to 1."""
    common = math.gcd(rate, RATE)
    up, down = RATE // common, rate // common
    cut = min(1.0, RATE / rate) * 0.95
    half = math.ceil(LOBES / cut)
    t = np.arange(-half + 1, half + 1)[None] - np.arange(up)[:, None] / up
    window = np.i0(12 * np.sqrt(np.maximum(0, 1 - (t / (half + 1)) ** 2))) / np.i0(12)
    taps = cut * np.sinc(cut * t) * window
    return up, down, (taps / taps.sum(1, keepdims=True)).astype(np.float32)


def with_samples(samples, rate=RATE):
    """The Sound of an array: floats in [-1, 1], or integers of 16, 32 or (unsigned) 8 bits.  Errors: TypeMismatch,
    ShapeError, ParamError."""
    rate = integer("sample_rate", rate, LOWEST, HIGHEST, " Hz")
    try:
        a = np.asarray(samples)
    except ValueError:                      # a ragged list
        a = np.empty(0, object)
    kind = a.dtype.str[1:]
    if a.dtype.kind != "f" and kind not in OF_DTYPE:
        raise TypeMismatch(f"samples are floats in [-1, 1], or integers of 16 bits, got {a.dtype}")
    if a.ndim != 1:
        raise ShapeError(f"samples are one row of one channel, got shape {a.shape}; take .mean(axis) over the channels")
    _, zero, amplitude = FORMATS[OF_DTYPE[kind]] if kind in OF_DTYPE else ("", 0, 1)

    def frames(first, n):
        part = a[first:first + n]
        if amplitude == 1:
            return part.astype(np.float32)
        return ((part.astype(np.float64) - zero) / amplitude).astype(np.float32)
    sound = Sound("samples", frames, a.size, rate)
    for first in range(0, a.size, PIECE):   # what is in memory is checked before anything is computed
        sound._source(first, PIECE)
    return sound


def read_sound(source, max_seconds):
    """The Sound of a path, the bytes of a file, samples at RATE, or (samples, rate); of at most so many seconds.

    Errors: BadFile, ParamError, ShapeError, TypeMismatch, MissingExtra.
    """
    if isinstance(source, bytes | bytearray):
        sound = _of_bytes(source)
    elif isinstance(source, str | os.PathLike):
        sound = open_sound(source)
    else:
        sound = with_samples(*(source if isinstance(source, tuple) and len(source) == 2 else (source,)))
    if sound.seconds > max_seconds:
        raise ParamError(f"{sound.name}: {sound.seconds:.0f} seconds, more than {max_seconds}; cut it first")
    return sound


def _of_bytes(data):
    """The Sound of a file's bytes; as floats in memory, since the file does not stay."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "sound")
        with open(path, "wb") as f:
            f.write(data)
        sound = open_sound(path)
        return with_samples(sound.read(0, sound.n_samples))


def open_sound(path):
    """The Sound of a file.  Errors: BadFile (not audio, damaged), MissingExtra (no WAV, and PyAV is missing)."""
    path = os.fspath(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadFile(f"{path}: not a regular file; give the path of a recording")
        with open(path, "rb") as f:
            start = f.read(12)
    except OSError as e:
        raise BadFile(f"{path}: {e.strerror}; check the path and the permissions") from e
    except ValueError as e:                 # a null byte in the path
        raise e if isinstance(e, BadFile) else BadFile(f"{path!r} is not a path of a file: {e}") from None
    if start[:4] == b"RIFF" and start[8:] == b"WAVE":
        wav = _wav(path)
        if wav is not None:
            return wav
    return _by_av(path)


def _wav(path):
    """The Sound of a WAV file; None for formats that are not read here."""
    with open(path, "rb") as f:
        data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    form, at = None, 12
    while at + 8 <= len(data):
        name, nbytes = data[at:at + 4], struct.unpack_from("<I", data, at + 4)[0]
        at += 8
        if name == b"fmt ":
            if nbytes < 16 or at + nbytes > len(data):
                break
            code, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", data, at)
            if code == EXTENSIBLE and nbytes >= 40:
                code = struct.unpack_from("<H", data, at + 24)[0]
            form = code, bits, channels, rate
        if name == b"data":
            # a recorder that was killed leaves 2^32 - 1 as size
            return _wav_data(path, data, at, min(nbytes, len(data) - at), form)
        at += nbytes + nbytes % 2
    raise BadFile(f"{path}: a WAV file without samples; it is damaged, or was cut off")


def _wav_data(path, data, at, nbytes, form):
    if form is None:
        raise BadFile(f"{path}: a WAV file that does not say what its samples are; it is damaged")
    code, bits, channels, rate = form
    if (code, bits) not in FORMATS:
        return None
    if not 1 <= channels <= MAX_CHANNELS or not LOWEST <= rate <= HIGHEST:
        raise BadFile(f"{path}: {channels} channels at {rate} Hz; expected up to {MAX_CHANNELS} at {LOWEST} to "
                      f"{HIGHEST} Hz")
    dtype, zero, amplitude = FORMATS[code, bits]
    size = bits // 8
    n = nbytes // (size * channels)
    if not n:
        raise BadFile(f"{path}: a WAV file without samples")
    parts = size // np.dtype(dtype).itemsize
    raw = np.frombuffer(data, dtype, n * channels * parts, at).reshape(n, channels, parts)

    def frames(first, n):
        a = raw[first:first + n]
        if parts == 3:
            a = a.astype(np.int64)
            x = a[..., 0] | a[..., 1] << 8 | ((a[..., 2] ^ 0x80) - 0x80) << 16
        else:
            x = a[..., 0].astype(np.float64) - zero
        return (x.mean(1) / amplitude).astype(np.float32)
    notes = [f"{path}: {channels} channels, averaged"] if channels > 1 else []
    return Sound(path, frames, n, rate, notes)


def _by_av(path):
    """The Sound of a file that PyAV decodes: 16-bit samples in a temporary file without a name."""
    av = extra("av", "audio")
    spool = tempfile.TemporaryFile()
    try:
        with av.open(path) as container:
            stream = next((s for s in container.streams if s.type == "audio"), None)
            if stream is None:
                raise BadFile(f"{path}: there is no sound in it")
            resampler = av.AudioResampler("s16", "mono", RATE)
            for frame in itertools.chain(_decoded(container, stream, av), [None]):
                for out in resampler.resample(frame):
                    spool.write(out.to_ndarray().tobytes())
    except (av.FFmpegError, OSError, ValueError) as e:
        spool.close()
        if isinstance(e, BadFile):
            raise
        raise BadFile(f"{path}: not audio that can be read ({e})") from None
    n = spool.tell() // 2
    if not n:
        raise BadFile(f"{path}: there are no samples in it")
    spool.flush()
    samples = np.frombuffer(mmap.mmap(spool.fileno(), 0, access=mmap.ACCESS_READ), "<i2")
    spool.close()
    return Sound(path, lambda first, n: samples[first:first + n].astype(np.float32) / np.float32(1 << 15), n)


def _decoded(container, stream, av):
    """Frames; damaged packets are skipped, as players do."""
    for packet in container.demux(stream):
        with contextlib.suppress(av.error.InvalidDataError):
            yield from packet.decode()
