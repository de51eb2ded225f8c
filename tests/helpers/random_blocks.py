"""Quantised rows with random codes, and what they mean; columns as 8-bit codes."""
import contextlib

import gguf
import numpy as np

import ggjit as gg

# first and last byte of a block's float16 scales
SCALES = {"q2_K": (80, 84), "q3_K": (108, 110), "q6_K": (208, 210), "tq2_0": (64, 66), "mxfp4": (0, 0),
          "nvfp4": (0, 0), "iq1_m": (0, 0), "q4_1": (0, 4), "q5_1": (0, 4), "q4_K": (0, 4), "q5_K": (0, 4)}


def random_blocks(rng, type, n, k):
    """n rows of k values: random bytes, which reach bit patterns that quantisers never write; scales stay numbers."""
    raw = rng.integers(0, 256, (n, k // type.block, type.nbytes), np.uint8)
    first, end = SCALES.get(type.name, (0, 2))
    raw[..., first:end] = rng.uniform(-2, 2, (*raw.shape[:2], (end - first) // 2)).astype(np.float16).view(np.uint8)
    if type.name == "mxfp4":
        raw[..., 0] = rng.integers(118, 132, raw.shape[:2])
    if type.name == "iq1_m":
        raw[..., 55] = raw[..., 55] & 15 | 0x30         # the top bits of a float16 in pieces
    return raw


def decoded(raw, type):
    """By gguf's own decoders, by the CPU's where it has none for the type."""
    with contextlib.suppress(ValueError, NotImplementedError):
        return gguf.quants.dequantize(raw.reshape(len(raw), -1), gguf.GGMLQuantizationType(type.id))
    t = gg.Context().new_tensor(type, (raw.shape[1] * type.block, len(raw)))
    gg.alloc_ctx_tensors(t.ctx, gg.init_backend("CPU"))
    t.set_bytes(raw)
    return t.numpy()


def in_8_bits(x):
    """Rows of x as CUDA's products with quantised weights take them: codes -127 to 127, a scale for each 32 values."""
    blocks = np.asarray(x, np.float32).reshape(-1, 32)              # in float32 as there: which codes ties become
    scale = abs(blocks).max(1, keepdims=True) / np.float32(127)
    size = np.floor(abs(blocks / scale) + np.float32(0.5))
    return (np.copysign(size, blocks) * np.float64(scale)).reshape(x.shape)
