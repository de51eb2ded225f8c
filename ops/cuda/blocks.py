"""All quantised types that kernels read, and how their values are unpacked; block_bits.py describes a block."""
from numpy import float32 as f32

from ggjit.ops.cuda.block_bits import BITS
from ggjit.ops.cuda.block_points import POINTS
from ggjit.ops.cuda.compiler.core import device

BLOCKS = {b.type: b for b in (*BITS, *POINTS)}


@device
def byte_of(word, i):
    """Byte i of a word, signed, as a float."""
    return f32(((word >> (8 * i) & 255) ^ 128) - 128)


@device
def put_word(put, dst, size, word, d, m):
    put(dst, d * byte_of(word, 0) + m)
    put(dst + size, d * byte_of(word, 1) + m)
    put(dst + 2 * size, d * byte_of(word, 2) + m)
    put(dst + 3 * size, d * byte_of(word, 3) + m)


def unpacker(type, put, size):
    """unpack(dst, block, u): the 32 values of unit u to their places in a row of float elements of `size` bytes.

    dst: where value 0 of the block goes.
    """
    b = BLOCKS[type]
    words, scale, at, four = b.words, b.scale, b.at, b.segments == 4

    @device
    def segment(dst, block, u, s, w0, w1):
        d, m = scale(block, u, s)
        p = dst + size * at(u, s)
        put_word(put, p, size, w0, d, m)
        put_word(put, p + 4 * size, size, w1, d, m)

    @device
    def unpack(dst, block, u):
        w = words(block, u)
        if four:
            segment(dst, block, u, 0, w[0], w[1])
            segment(dst, block, u, 1, w[2], w[3])
            segment(dst, block, u, 2, w[4], w[5])
            segment(dst, block, u, 3, w[6], w[7])
        else:
            segment(dst, block, u, 0, w[0], w[1])
            segment(dst + 8 * size, block, u, 0, w[2], w[3])
            segment(dst, block, u, 1, w[4], w[5])
            segment(dst + 8 * size, block, u, 1, w[6], w[7])
    return unpack
