"""From speech probabilities to stretches of speech: whisper.cpp's rules, which are Silero's.

    probability  ___/~~~~~~~\\_/~~~\\________/~~\\____      start: at `threshold`; end: below threshold - 0.15 for
                   |              |                      min_silence_duration_ms
    speech         +--------------+        too short
"""
import math

import numpy as np

from ggjit.models.core.checks import integer
from ggjit.ops.core.errors import ParamError, TypeMismatch

HYSTERESIS, LOWEST_END = 0.15, 0.01     # speech ends this far below the threshold, but never under the lowest
SPLIT_SILENCE_MS = 98                   # a silence longer than this is where speech that is too long may be cut
MERGE_GAP_MS = 200                      # stretches nearer to each other than this are one
MAX_MS = 1 << 31


def find_segments(probabilities, n_window, sample_rate=16000, threshold=0.5, min_speech_duration_ms=250,
                  min_silence_duration_ms=100, max_speech_duration_s=math.inf, speech_pad_ms=30):
    """[(start, end), ...] in seconds, ascending.

    probabilities: one per n_window samples.  Speech starts where a probability reaches `threshold` and ends where it
    stays below threshold - 0.15 for min_silence_duration_ms; stretches of min_speech_duration_ms or less are dropped,
    those longer than max_speech_duration_s are cut (whole seconds count), at their last silence if they had one;
    speech_pad_ms is added on both sides.  Errors: ParamError, TypeMismatch.
    Source: whisper_vad_segments_from_probs (which rounds to centiseconds).
    """
    p = np.asarray(probabilities)
    if p.ndim != 1 or p.dtype.kind != "f":
        raise TypeMismatch(f"probabilities must be one row of floats, got shape {p.shape} {p.dtype}")
    if isinstance(threshold, bool | str) or not 0 < threshold <= 1:
        raise ParamError(f"threshold must be above 0 and at most 1, got {threshold!r}")

    def samples(name, milliseconds):
        return integer(name, milliseconds, 0, MAX_MS, " milliseconds") * sample_rate // 1000
    pad = samples("speech_pad_ms", speech_pad_ms)
    shortest = samples("min_speech_duration_ms", min_speech_duration_ms)
    silence = samples("min_silence_duration_ms", min_silence_duration_ms)
    if isinstance(max_speech_duration_s, bool | str) or not max_speech_duration_s > 0:
        raise ParamError(f"max_speech_duration_s must be above 0, got {max_speech_duration_s!r}")
    longest = math.inf
    if max_speech_duration_s < math.inf:
        longest = sample_rate * int(max_speech_duration_s) - n_window - 2 * pad
        longest = longest if longest >= 0 else math.inf         # as whisper.cpp: no room for a cut, none is made
    total = len(p) * n_window
    found = _merged(_stretches(p, n_window, threshold, shortest, silence, longest, sample_rate), sample_rate)
    found = _padded([s for s in found if s[1] - s[0] >= shortest], pad, total)
    return [(start / sample_rate, end / sample_rate) for start, end in found]


def _stretches(p, n_window, threshold, shortest, silence, longest, sample_rate):
    """[[first sample, end], ...] by hysteresis."""
    low = max(threshold - HYSTERESIS, LOWEST_END)
    split_silence = SPLIT_SILENCE_MS * sample_rate // 1000
    found, start = [], None             # start: of the speech we are in
    quiet = cut = resumed = 0           # where the silence began; the last place for a cut; where speech came back
    for i, value in enumerate(p):
        at = i * n_window
        if value >= threshold:
            if quiet:
                quiet = 0
                resumed = at if resumed < cut else resumed
            if start is None:
                start = at
                continue
        if start is not None and at - start > longest:
            if not cut:
                found.append([start, at])
                start, quiet, resumed = None, 0, 0
                continue
            found.append([start, cut])
            start = None if resumed < cut else resumed
            quiet = cut = resumed = 0
        if value < low and start is not None:
            quiet = quiet or at
            if at - quiet > split_silence:
                cut = quiet
            if at - quiet >= silence:
                if quiet - start > shortest:
                    found.append([start, quiet])
                start, quiet, cut, resumed = None, 0, 0, 0
    end = len(p) * n_window
    if start is not None and end - start > shortest:
        found.append([start, end])
    return found


def _merged(found, sample_rate):
    """Stretches with a short gap between them become one."""
    out = found[:1]
    for start, end in found[1:]:
        if start - out[-1][1] < MERGE_GAP_MS * sample_rate // 1000:
            out[-1][1] = end
        else:
            out.append([start, end])
    return out


def _padded(found, pad, total):
    """The ranges with both ends moved outwards by `pad`; a gap smaller than two pads is shared."""
    if found:
        found[0][0] = max(0, found[0][0] - pad)
        found[-1][1] = min(total, found[-1][1] + pad)
    for left, right in zip(found, found[1:], strict=False):
        gap = right[0] - left[1]
        step = gap // 2 if gap < 2 * pad else pad
        left[1], right[0] = left[1] + step, right[0] - step
    return found
