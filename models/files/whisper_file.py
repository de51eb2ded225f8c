"""Whisper in whisper.cpp's file form: a bounded reader that presents a file as if it were our GGUF.

    u32 0x67676d6c | 11 int32: HPARAMS | n_mels, n_bins, F32 filters | n_tokens, then (u32 length, bytes) of each
    then, up to the end: n_dims, n_name, type | ne, n_dims of them | name | values, unaligned      (all little endian)

Every count is compared with what is left of the file before it is used.  Values stay in the mapped file.

    GGUF of architecture "whisper": the same tensors under OpenAI's names, and

    whisper.block_count  .decoder_block_count  .embedding_length  .attention.head_count  .context_length  .vocab_size
    whisper.encoder.context_length  .encoder.mel_count  .encoder.mel_filters (F32, n_mels x 201)  .alignment_heads
    tokenizer.ggml.tokens: texts without the special tokens, bytes as GPT-2 writes them
"""
import math
import struct
from array import array
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from ggjit.models.core.byte_chars import CHAR_OF_BYTE
from ggjit.models.files.bin_cursor import BinCursor
from ggjit.models.files.gguf import (
    DEFAULT_ALIGNMENT,
    MAX_DIMS,
    MAX_ENTRIES,
    MAX_NAME_NBYTES,
    GGUFFile,
    TensorInfo,
)
from ggjit.models.files.save import encoded
from ggjit.ops.core.types import TYPE_INFO

GGML_MAGIC = 0x67676D6C
HPARAMS = ("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer", "n_text_ctx", "n_text_state",
           "n_text_head", "n_text_layer", "n_mels", "ftype")
N_BINS = 201                    # of a spectrum of 400 samples
MAX_MELS, MAX_TOKENS, MAX_TOKEN_NBYTES = 1024, 1 << 20, 1 << 16
QUANTIZATION_STEP = 1000        # ftype is the type's number plus this for each version of the quantised blocks
CONV_BIASES = ("encoder.conv1.bias", "encoder.conv2.bias")

# (layer, head) pairs whose attention follows the sound, by (layers of encoder and decoder, width, vocabulary).
# Source: whisper.cpp g_aheads_*, OpenAI's model list
_ALIGNMENT_HEADS = {
    (4, 4, 384, 51864): ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)),
    (4, 4, 384, 51865): ((2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)),
    (6, 6, 512, 51864): ((3, 3), (4, 7), (5, 1), (5, 5), (5, 7)),
    (6, 6, 512, 51865): ((3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6)),
    (12, 12, 768, 51864): ((6, 6), (7, 0), (7, 3), (7, 8), (8, 2), (8, 5), (8, 7), (9, 0), (9, 4), (9, 8), (9, 10),
                           (10, 0), (10, 1), (10, 2), (10, 3), (10, 6), (10, 11), (11, 2), (11, 4)),
    (12, 12, 768, 51865): ((5, 3), (5, 9), (8, 0), (8, 4), (8, 7), (8, 8), (9, 0), (9, 7), (9, 9), (10, 5)),
    (24, 24, 1024, 51864): ((11, 4), (14, 1), (14, 12), (14, 14), (15, 4), (16, 0), (16, 4), (16, 9), (17, 12),
                            (17, 14), (18, 7), (18, 10), (18, 15), (20, 0), (20, 3), (20, 9), (20, 14), (21, 12)),
    (24, 24, 1024, 51865): ((13, 15), (15, 4), (15, 15), (16, 1), (20, 0), (23, 4)),
    (32, 32, 1280, 51866): ((7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1),
                            (25, 6)),
    (32, 4, 1280, 51866): ((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14)),
}


def known_alignment_heads(n_encoder, n_decoder, width, n_vocab):
    """int32 [layer, head, layer, head, ...] of a published model; empty for other models."""
    pairs = _ALIGNMENT_HEADS.get((n_encoder, n_decoder, width, n_vocab), ())
    return np.array(pairs, np.int32).reshape(-1)


def open_model(path):
    """The GGUFFile of a path, whichever of the two forms it has."""
    try:
        with open(path, "rb") as f:
            start = f.read(4)
    except (OSError, ValueError):
        return GGUFFile(path)               # raises the error that says what is wrong
    return WhisperFile(path) if start == struct.pack("<I", GGML_MAGIC) else GGUFFile(path)


class WhisperFile(GGUFFile):
    """A .bin, mapped and checked; `.tensors`, `.metadata` and the rest as a GGUFFile's.  Errors: BadFile."""

    def __init__(self, path):
        self._open(path)

    def _load(self, data, source):
        self.path, self._data, self.read_keys = source, data, set()
        self.version, self.alignment = 0, DEFAULT_ALIGNMENT
        c = BinCursor(memoryview(data), source, "Whisper model")
        if c.ints(1, "the magic number")[0] != GGML_MAGIC:
            c.fail(f"the file does not start with {GGML_MAGIC:#x}")
        h = dict(zip(HPARAMS, c.ints(len(HPARAMS), "the sizes"), strict=True))
        wrong = next((n for n in HPARAMS[:-1] if h[n] < 1), None)
        if wrong:
            c.fail(f"{wrong} is {h[wrong]}")
        if h["n_audio_state"] != h["n_text_state"] or h["n_audio_head"] != h["n_text_head"]:
            c.fail(f"encoder and decoder differ: widths {h['n_audio_state']} and {h['n_text_state']}, heads "
                   f"{h['n_audio_head']} and {h['n_text_head']}")
        filters = self._filters(c, h)
        tokens = TokenBytes(c, h["n_vocab"])
        self.data_offs = c.pos
        self.tensors = MappingProxyType(_tensors(c))
        heads = known_alignment_heads(h["n_audio_layer"], h["n_text_layer"], h["n_text_state"], h["n_vocab"])
        self.metadata = MappingProxyType({
            "general.architecture": "whisper", "general.file_type": h["ftype"] % QUANTIZATION_STEP,
            "general.quantization_version": 2,
            "whisper.block_count": h["n_audio_layer"], "whisper.decoder_block_count": h["n_text_layer"],
            "whisper.embedding_length": h["n_text_state"], "whisper.attention.head_count": h["n_text_head"],
            "whisper.context_length": h["n_text_ctx"], "whisper.vocab_size": h["n_vocab"],
            "whisper.encoder.context_length": h["n_audio_ctx"], "whisper.encoder.mel_count": h["n_mels"],
            "whisper.encoder.mel_filters": filters, "whisper.alignment_heads": heads,
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens})

    @staticmethod
    def _filters(c, h):
        n_mels, n_bins = c.ints(2, "the size of the mel filters")
        if n_mels != h["n_mels"] or n_bins != N_BINS or n_mels > MAX_MELS:
            c.fail(f"mel filters of {n_mels} x {n_bins}, expected {h['n_mels']} x {N_BINS}")
        at = c.take(4 * n_mels * n_bins, "the mel filters")
        filters = np.frombuffer(c.data, "<f4", n_mels * n_bins, at)
        if not np.isfinite(filters).all():
            c.fail("the mel filters hold values that are not numbers")
        return filters

    def raw_value(self, key):
        """The value's bytes as a GGUF file of the same content would have them."""
        kind, raw = encoded(self.metadata[key], key)
        return struct.pack("<I", kind) + raw


class TokenBytes(Sequence):
    """The texts of a .bin's tokens, as GPT-2 writes bytes; `raw(i)`: the bytes themselves."""

    def __init__(self, c, n_vocab):
        n, = c.ints(1, "the number of tokens")
        if not 0 <= n <= min(n_vocab, MAX_TOKENS):
            c.fail(f"{n} tokens, the vocabulary has {n_vocab}")
        self._data, self._starts = c.data, array("q")
        for i in range(n):
            at = c.take(4, f"the length of token {i}")
            nbytes, = struct.unpack_from("<I", c.data, at)
            if nbytes > MAX_TOKEN_NBYTES:
                c.fail(f"token {i} has {nbytes} bytes")
            c.take(nbytes, f"token {i}")
            self._starts.append(at + 4)
        self._starts.append(c.pos + 4)

    def __len__(self):
        return len(self._starts) - 1

    def raw(self, i):
        """The bytes of token i."""
        return bytes(self._data[self._starts[i]:self._starts[i + 1] - 4])

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return "".join(map(CHAR_OF_BYTE.__getitem__, self.raw(range(len(self))[i])))


def _tensors(c):
    """{name: TensorInfo} up to the end of the file."""
    out = {}
    while c.pos < len(c.data):
        where = f"tensor {len(out)} at {c.pos}"
        n_dims, n_name, type_id = c.ints(3, where)
        if not 1 <= n_dims <= MAX_DIMS or not 1 <= n_name <= MAX_NAME_NBYTES or type_id not in TYPE_INFO:
            c.fail(f"{where}: {n_dims} dimensions, a name of {n_name} bytes, type {type_id}")
        kind, ne = TYPE_INFO[type_id], c.ints(n_dims, where)
        at = c.take(n_name, f"the name of {where}")
        try:
            name = bytes(c.data[at:c.pos]).decode()
        except UnicodeDecodeError:
            c.fail(f"the name of {where} is not UTF-8")
        if min(ne) < 1 or ne[0] % kind.block or name in out or len(out) == MAX_ENTRIES:
            c.fail(f"tensor {name!r} of {kind!r} has shape {list(ne)}, or is there twice")
        nbytes = math.prod(ne) // kind.block * kind.nbytes
        if name in CONV_BIASES and n_dims == 1:
            ne = (1, *ne)
        out[name] = TensorInfo(name, kind, ne, c.take(nbytes, f"tensor {name!r} {list(ne)}"), nbytes)
    return out
