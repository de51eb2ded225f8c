"""Times of words, by the path through the attention of those decoder heads that follow the sound.

    attention of the alignment heads [heads, tokens, frames]
        -> over the window's frames, each token less the mean of all, divided by their deviation
        -> median of 7 frames -> mean over the heads -> cheapest way from the first token and frame to the last

                frames ->
    token 0     **......        the way goes right or down or both; a token's time is the frame in which it enters
    token 1     ..*.....        the token's row
    token 2     ...***..

The method is OpenAI's, its rules for long words at the borders of sentences included.
"""
from typing import NamedTuple

import numpy as np
from numba import types

from ggjit.models.files.mel import f64s
from ggjit.ops.native.jit import array_maker, native

FRAME = 0.02                    # seconds of an encoder's frame
MEDIAN_WIDTH = 7
SENTENCE_ENDS = ".。!！?？"
OPENING, CLOSING = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"
LONGEST_MEDIAN = 0.7            # seconds
u8s = array_maker(types.uint8)


class Word(NamedTuple):
    """start and end in seconds of the recording; word: with the space before it; probability: mean of its tokens'."""
    start: float
    end: float
    word: str
    probability: float

    @property
    def text(self):
        return self.word.strip()


class Alignment(NamedTuple):
    """weights (tokens + 1, frames), of which the path is made, the last row that of the end; path (n, 2): row, frame;
    starts: the frame of each row; pieces: "", then the text of each token; heads (n_heads, tokens + 1, frames): the
    attention as it is."""
    weights: np.ndarray
    path: np.ndarray
    starts: np.ndarray
    pieces: list
    probabilities: np.ndarray
    heads: np.ndarray


@native("i64(i64, i64, i64, i64)")
def median_rows(x, n_rows, n, out):
    """float64 rows of n: the median of 7 values around each, the row mirrored at its ends."""
    for r in range(n_rows):
        a, b = f64s(x + 8 * r * n, n), f64s(out + 8 * r * n, n)
        for i in range(n):
            # counting: the value that three are below or equal and three above; seven values, ties by their place
            for p in range(7):
                ip = abs(i + p - 3)
                ip = ip if ip < n else 2 * n - 2 - ip
                rank = 0
                for q in range(7):
                    iq = abs(i + q - 3)
                    iq = iq if iq < n else 2 * n - 2 - iq
                    rank += 1 if a[iq] < a[ip] or (a[iq] == a[ip] and q < p) else 0
                if rank == 3:
                    b[i] = a[ip]
    return 0


@native("i64(i64, i64, i64, i64, i64)")
def cheapest_way(cost, n, m, sums, steps):
    """float64 cost[n, m] -> uint8 steps[n + 1, m + 1]: 0 from the left and above, 1 from above, 2 from the left."""
    last = f64s(sums, m + 1)
    here = f64s(sums + 8 * (m + 1), m + 1)
    for j in range(m + 1):
        last[j] = np.inf
    last[0] = 0.0
    for i in range(1, n + 1):
        row, way = f64s(cost + 8 * (i - 1) * m, m), u8s(steps + i * (m + 1), m + 1)
        here[0] = np.inf
        for j in range(1, m + 1):
            both, down, right = last[j - 1], last[j], here[j - 1]
            step, least = 2, right
            if both < down and both < right:
                step, least = 0, both
            elif down < both and down < right:
                step, least = 1, down
            here[j] = row[j - 1] + least
            way[j] = step
        for j in range(m + 1):
            last[j] = here[j]
    return 0


def dtw(cost):
    """(n, 2) int: (row, column) of the cheapest way through float64 cost (rows, columns), from corner to corner."""
    n, m = cost.shape
    steps, sums = np.zeros((n + 1, m + 1), np.uint8), np.empty(2 * (m + 1))
    cheapest_way(np.ascontiguousarray(cost, np.float64), n, m, sums, steps)
    steps[0, :], steps[:, 0] = 2, 1
    i, j, path = n, m, []
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = steps[i, j]
        i, j = i - (step != 2), j - (step != 1)
    return np.array(path[::-1], np.int64)


def alignment(network, vocab, tokens, language, task, n_frames, n_audio=None, window=0):
    """The Alignment of text tokens with the first n_frames frames (10 ms) of a window that was heard."""
    head = vocab.prompt(language, task, False)
    tokens = [t for t in tokens if t < vocab.eot]
    logits, weights = network.align([*head, *tokens, vocab.eot], n_audio, window)
    first = len(head) - 1                               # the row that predicts the first token
    x = logits[first:first + len(tokens), :vocab.eot].astype(np.float64)
    x = np.exp(x - x.max(1, keepdims=True, initial=-np.inf))
    probabilities = x[np.arange(len(tokens)), tokens] / x.sum(1)
    w = weights[:, :, :max(1, min(n_frames // 2, weights.shape[2]))].astype(np.float64)
    w /= np.maximum(w.sum(2, keepdims=True), 1e-30)
    heads = w[:, first:-1].astype(np.float32)
    deviation = w.std(1, keepdims=True)
    w = (w - w.mean(1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0)
    if w.shape[2] > MEDIAN_WIDTH // 2:
        smooth = np.empty_like(w)
        median_rows(np.ascontiguousarray(w), w.shape[0] * w.shape[1], w.shape[2], smooth)
        w = smooth
    matrix = w.mean(0)[first:-1]
    path = dtw(-matrix)
    entered = np.r_[True, np.diff(path[:, 0]) > 0]
    pieces = ["", *(vocab.text([t]) for t in tokens)]
    return Alignment(matrix, path, path[entered, 1], pieces, probabilities, heads)


def words_of(network, vocab, segments, language, task, n_frames, offset, last_end, n_audio=None, window=0):
    """[[Word, ...] of each segment] of a window.  segments: (start, end, tokens); offset: seconds where the window
    begins; last_end: where the speech before it ended."""
    texts = [[t for t in tokens if t < vocab.eot] for _, _, tokens in segments]
    tokens = [t for text in texts for t in text]
    if not tokens:
        return [[] for _ in segments]
    a = alignment(network, vocab, tokens, language, task, n_frames, n_audio, window)
    found, at = [], 0
    for text, ids in vocab.words(tokens, language):
        found.append([float(a.starts[at]) * FRAME, float(a.starts[at + len(ids)]) * FRAME, text, ids,
                      float(a.probabilities[at:at + len(ids)].mean())])
        at += len(ids)
    lasting = [end - start for start, end, *_ in found if end > start]
    median = min(LONGEST_MEDIAN, float(np.median(lasting))) if lasting else 0.0
    _shorten_at_sentences(found, 2 * median)
    _join_signs(found)
    out, i = [], 0
    for (start, end, _), text in zip(segments, texts, strict=True):
        n, words = 0, []
        while i < len(found) and n < len(text):
            begin, stop, word, ids, p = found[i]
            if word:
                words.append([round(offset + begin, 2), round(offset + stop, 2), word, p])
            n, i = n + len(ids), i + 1
        _shorten_at_pauses(words, start, end, median, last_end)
        last_end = words[-1][1] if words else last_end
        out.append([Word(*w) for w in words])
    return out


def _shorten_at_sentences(found, longest):
    """Shorten a punctuation mark at the end of a sentence, or the word behind it, where it covers the silence between
    sentences."""
    for before, word in zip(found, found[1:], strict=False):
        if word[1] - word[0] > longest:
            if word[2] in SENTENCE_ENDS:
                word[1] = word[0] + longest
            elif before[2] in SENTENCE_ENDS:
                word[0] = word[1] - longest


def _join_signs(found):
    """Join opening punctuation with the word behind it, closing punctuation with the word before it."""
    j = len(found) - 1
    for i in range(len(found) - 2, -1, -1):
        sign, word = found[i], found[j]
        if sign[2].startswith(" ") and sign[2].strip() in OPENING:
            word[2], word[3], sign[2], sign[3] = sign[2] + word[2], sign[3] + word[3], "", []
        else:
            j = i
    i = 0
    for j in range(1, len(found)):
        word, sign = found[i], found[j]
        if not word[2].endswith(" ") and sign[2] in CLOSING:
            word[2], word[3], sign[2], sign[3] = word[2] + sign[2], word[3] + sign[3], "", []
        else:
            i = j


def _shorten_at_pauses(words, start, end, median, last_end):
    """Shorten the first words after a pause, and the last ones of a segment, to the usual length of a word."""
    if not words:
        return
    first, last, longest = words[0], words[-1], 2 * median
    if first[1] - last_end > 4 * median and (
            first[1] - first[0] > longest or len(words) > 1 and words[1][1] - first[0] > 2 * longest):
        if len(words) > 1 and words[1][1] - words[1][0] > longest:
            first[1] = words[1][0] = max(words[1][1] / 2, words[1][1] - longest)
        first[0] = max(0.0, first[1] - longest)
    if start < first[1] and start - 0.5 > first[0]:
        first[0] = max(0.0, min(first[1] - median, start))
    if end > last[0] and end + 0.5 < last[1]:
        last[1] = max(last[0] + median, end)
