"""How IQ2 and IQ3 are written: what each type searches for (ops/types/shared/quant_grid_search.py), and its bytes
(iq.py).

The bytes are ggml's, but for IQ3_S where 32 values of a run are zeros and others of the 256 are not: there ggml (0.26)
does not move on and writes the following runs to the place before, so that what is read back is not what was written
(NMSE above 1).  Here every run stays at its place.
"""
from numba import types

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.jit import exact
from ggjit.ops.native.mem import ld_i32, ld_u8, st_i16, st_i32
from ggjit.ops.types.shared.iq_grids import GRIDS
from ggjit.ops.types.shared.quant_grid import Grid, GridQuantizer
from ggjit.ops.types.shared.quant_grid_search import ALL, ANY, CODES, POINTS, SIGNS, Search, make_quantise
from ggjit.ops.types.shared.quant_search import put


# ---------------------------------------------------------------- packing
@exact
def _point(s, i):
    return types.int64(ld_i32(s + POINTS + 4 * i))


@exact
def _byte(p, i):
    return types.int64(ld_u8(p + i))


@exact
def _upper_bits(s, n, bits, to):
    """The bits above eight of n points, `bits` each."""
    per = 8 // bits
    for j in range(n // per):
        upper = types.int64(0)
        for i in range(per):
            upper |= _point(s, per * j + i) >> 8 << bits * i
        put(to, j, upper)


@exact
def _seven_signs(s, to, step):
    """A word a group: four times seven signs, four bits of scale."""
    for g in range(8):
        word = _byte(s + CODES, g) << 28
        for i in range(4):
            word |= _byte(s + SIGNS, 4 * g + i) << 7 * i
        st_i32(to + step * g, types.int32(word))


@exact
def _nibbles(s, n, to):
    """n scales, two a byte."""
    for j in range(n // 2):
        put(to, j, _byte(s + CODES, 2 * j) | _byte(s + CODES, 2 * j + 1) << 4)


@exact
def _iq2_xxs(s, to):
    _seven_signs(s, to + 6, 8)
    for i in range(32):
        put(to + 2 + 8 * (i // 4), i % 4, _point(s, i))


@exact
def _iq2_xs(s, to):
    for i in range(32):
        st_i16(to + 2 + 2 * i, types.int16(_point(s, i) | _byte(s + SIGNS, i) << 9))
    _nibbles(s, 16, to + 66)


@exact
def _iq2_s(s, to):
    for i in range(32):
        put(to + 2, i, _point(s, i))
        put(to + 34, i, _byte(s + SIGNS, i))
    _upper_bits(s, 32, 2, to + 66)
    _nibbles(s, 16, to + 74)


@exact
def _iq3_xxs(s, to):
    for i in range(64):
        put(to + 2, i, _point(s, i))
    _seven_signs(s, to + 66, 4)


@exact
def _iq3_s(s, to):
    for i in range(64):
        put(to + 2, i, _point(s, i))
    _upper_bits(s, 64, 1, to + 66)
    for i in range(32):
        put(to + 74, i, _byte(s + SIGNS, i))
    _nibbles(s, 8, to + 106)


# ---------------------------------------------------------------- the types
SMALLEST = 2.0 ** -149                  # the smallest float32 above 0


def _writer(name, pack, n_distances, needs_importances=False, **search):
    search = Search(Grid(GRIDS[name], n_distances), **search)
    return GridQuantizer(search.grid, make_quantise(search, BY_NAME[name].nbytes, pack), needs_importances)


WRITERS = {
    "iq2_xxs": _writer("iq2_xxs", _iq2_xxs, 2, True, run=32, n_steps=6, step=0.1, tiny=1e-15, spread=1, even=True,
                       fit=True, again=ALL),
    "iq2_xs": _writer("iq2_xs", _iq2_xs, 2, True, run=16, n_steps=9, step=0.1, tiny=1e-15, spread=1, even=True),
    "iq2_s": _writer("iq2_s", _iq2_s, 1, run=16, n_steps=9, step=0.1, tiny=1e-8, base=0.25, fudge=0.9875),
    "iq3_xxs": _writer("iq3_xxs", _iq3_xxs, 2, run=32, n_steps=15, step=0.2, tiny=1e-8, fudge=1.0125, even=True),
    "iq3_s": _writer("iq3_s", _iq3_s, 3, run=32, n_steps=9, step=0.2, tiny=SMALLEST, fudge=1.033, again=ANY)}
