"""How products read the weights of a type: the fastest measured way on this processor, or a rule's.

    kernels/reads-q4_0-KEY.json   {"tile": "1 no prefetch", "layout": "1 near",
                                   "seconds": {"1": 0.0213, "1 no prefetch": 0.0171, ..., "repacked 1 near": 0.0152}}

    tile        of one column: so many rows at once, and how weights are prefetched: as the type does it (nothing is
                said), not at all, near (512 bytes, first-level cache), ahead (6 KB, the same) or far (a tile, second)
    layout      null, or that matrices are worth the layout of ops/matmul/repack, and its tile: so many groups of
                rows at once for one column, prefetched into the second-level cache or, near, into the first

    kernels/amx-q4_0-KEY.json     {"amx": true, "seconds": {"amx": 0.0081, "vectors": 0.0195}}

    amx         whether products of many columns use the tiles of AMX, where the processor has them; until that was
                measured they do if GGJIT_CPU=avx512amx asks for it

ggjit.cpu.tuning measures (`ggjit warm-up MODEL` calls it, and `load_model` on a processor that no rule knows); this
file stores and reads the choice.  KEY is that of a kernel over the type: processor, instruction set, sources.  On
another machine or with another kernel the rule holds.  Only tiles that give the same bytes are compared, and a layout
is compared with the best of them: a choice changes speed, a layout also the order of sums, and so does AMX for BF16.  A
file is read once in a process (ops/native/measured.py).

    GGJIT_TUNE=off      the rule, whatever was measured; nothing is measured
    GGJIT_TUNE=1|2|4|8  that many rows, or as many as the type's tiles have at most

What processors do differently, and by how much: docs/measured.md, "How products read weights".
"""
import contextvars
import dataclasses
import functools
import math
from typing import NamedTuple

from ggjit.ops.core.settings import TILE_ROWS, asked_tuning
from ggjit.ops.core.traits import module_of, traits_of
from ggjit.ops.core.types import BF16, BY_NAME, F16, F32
from ggjit.ops.matmul.interleaved import FORMATS
from ggjit.ops.native import isa, measured, neon
from ggjit.ops.native.jit import sources_key
from ggjit.ops.native.simd import W
from ggjit.ops.types.shared.dot import NO_PREFETCH, OWN, PREFETCHES, prefetching

REPACKED = "repacked"
LEAST_GAIN = 1.02               # a measured choice is kept where it is faster than the rule by this factor


class RowTile(NamedTuple):
    """Rows of weights that a tile of one column takes, and how it asks for the next ones (ops/types/shared/dot.py).

    The layout's: groups of rows (repack/codes.py)."""
    rows: int
    prefetch: str = OWN

    def __str__(self):
        return f"{self.rows}" if self.prefetch == OWN else f"{self.rows} {self.prefetch}"


ONE_ROW, PLAIN, NEAR, AHEAD, FOUR, FOUR_PLAIN = (
    RowTile(1), RowTile(1, NO_PREFETCH), RowTile(1, "near"), RowTile(1, "ahead"), RowTile(4), RowTile(4, NO_PREFETCH))


@dataclasses.dataclass(frozen=True)
class Rule:
    """The fastest tiles on a kind of processor.

    blocks      the tile of quantised types
    tiles       {type: its tile} of those that have another; floats not named: as many rows as their tiles have
    layout      the layout's tile
    repacked    types whose layout is faster
    columns     of the widest tile of the layout, AVX-512: of blocks of 32, of super-blocks
    in_turn     whether such a tile multiplies one column after the other (repack/lane_tile.py)
    direct      columns of a product of super-blocks up to which these tiles are faster than the integer tile
    pairs       columns of a tile over two groups of rows, which serves more columns than one tile as above; None: none
    narrow      {type of super-blocks: (columns of the widest tile, columns of a product up to which such tiles are
                used)}, AVX-512, where these are fewer
    dots        {type: columns up to which AVX-512 multiplies as dots of rows}, where that is more than elsewhere
    stretches   columns of F32 products that AVX-512 multiplies by stretches of k (mul_mat_stretch.py)
    """
    blocks: RowTile
    tiles: dict
    layout: RowTile
    repacked: tuple
    columns: tuple = (12, 8)
    in_turn: bool = False
    direct: int = 32
    pairs: int | None = None
    narrow: dict = dataclasses.field(default_factory=dict)
    dots: dict = dataclasses.field(default_factory=dict)
    stretches: tuple = ()


Q2_K, Q4_K, Q5_K, Q6_K, MXFP4 = (BY_NAME[name] for name in ("q2_K", "q4_K", "q5_K", "q6_K", "mxfp4"))
ZEN = Rule(PLAIN, {F16: PLAIN, BF16: PLAIN, F32: ONE_ROW}, FOUR, tuple(FORMATS))
ZEN5 = Rule(ONE_ROW, {F16: AHEAD, **dict.fromkeys((BF16, F32, Q4_K, Q5_K, Q6_K, MXFP4), PLAIN)}, NEAR, tuple(FORMATS),
            (16, 16), True, 80, 6, {**dict.fromkeys((Q2_K, Q4_K), (6, 16)), **dict.fromkeys((Q5_K, Q6_K), (8, 12))},
            {F16: 48}, (*range(9, 14), *range(17, 25)))
INTEL = Rule(ONE_ROW, {}, FOUR, tuple(t for t in FORMATS if t is not Q6_K))
NEON = Rule(PLAIN, {F16: FOUR_PLAIN if neon.HAS_FMLAL else PLAIN, BF16: PLAIN, F32: ONE_ROW}, FOUR, tuple(FORMATS),
            direct=8, pairs=4)
RULES = {"znver5": ZEN5, "znver": ZEN, **dict.fromkeys((
    "skylake-avx512", "cascadelake", "cooperlake", "icelake", "rocketlake", "sapphirerapids", "emeraldrapids",
    "graniterapids"), INTEL)}


def _rule_of(processor):
    return next((r for name, r in RULES.items() if processor.startswith(name)), None)


RULE = _rule_of(isa.PROCESSOR)                  # None: no rule is known; UNKNOWN is used until tiles were measured
UNKNOWN = NEON if isa.ISA == "neon" else INTEL
SETTING = asked_tuning()
_forced = contextvars.ContextVar("tile", default=None)
_amx = contextvars.ContextVar("amx", default=None)
_apart = contextvars.ContextVar("columns apart", default=False)


@dataclasses.dataclass(frozen=True)
class Choice:
    """tile: the fastest; layout: the layout's tile where that is faster still, else None.  seconds: {name: of one pass
    over the same weights}, a tile's name or layout_name's."""
    tile: RowTile
    layout: RowTile | None
    seconds: dict

    @property
    def gain(self):
        """Seconds of the tile of one row over the chosen one's."""
        return self.seconds[str(ONE_ROW)] / self.seconds[str(self.tile)]

    @property
    def layout_gain(self):
        """Seconds of the chosen tile over the layout's fastest; None where that was not measured."""
        layouts = [s for name, s in self.seconds.items() if name.startswith(REPACKED)]
        return self.seconds[str(self.tile)] / min(layouts) if layouts else None


def candidates(type):
    """Tiles the type may have.  Eight rows of blocks, or of AVX2, have too few registers."""
    rows = TILE_ROWS if isa.ISA == "avx512" and not type.quantized else TILE_ROWS[:3]
    dot = traits_of(type).dot
    others = [how for how in PREFETCHES if prefetching(dot, how) != prefetching(dot, OWN)]
    plain = [FOUR_PLAIN] * (isa.ISA == "neon" and not type.quantized)
    return (ONE_ROW, *(RowTile(1, how) for how in others), *plain, *map(RowTile, rows[1:]))


def layout_candidates(type):
    """Tiles the layout of the type may have.  Sixteen parts are too long a loop for several groups; eight are on NEON,
    whose 32 registers of 16 bytes hold one group's scales, mins and codes."""
    if type is F32:
        return (ONE_ROW,)
    long = type in FORMATS and FORMATS[type].n_parts > (4 if isa.ISA == "neon" else 8)
    return (ONE_ROW, NEAR) if long else (ONE_ROW, NEAR, FOUR, RowTile(4, "near"))


def layout_name(tile):
    """The name of a layout's tile among a type's candidates."""
    return f"{REPACKED} {tile}"


def rule(type):
    """The tile of one column by the processor's rule, used where nothing was measured."""
    rule = RULE or UNKNOWN
    return rule.tiles.get(type) or (rule.blocks if type.quantized else candidates(type)[-1])


def layout_rule(type):
    """The layout's tile by the processor's rule, used where nothing was measured."""
    tile = (RULE or UNKNOWN).layout
    return tile if tile in layout_candidates(type) else ONE_ROW if type is F32 else tile._replace(rows=1)


def tile(type):
    """The tile of one column over weights of the type."""
    forced = _forced.get() or SETTING
    if forced == "off":
        return rule(type)
    if forced:
        return forced if isinstance(forced, RowTile) else RowTile(min(forced, candidates(type)[-1].rows))
    found = kept(type)
    return found.tile if found else rule(type)


def layout_tile(type):
    """The tile of products with repacked weights of the type."""
    forced, found = _forced.get(), None if SETTING else kept(type)
    if forced in layout_candidates(type):
        return forced
    return found.layout if found and found.layout else layout_rule(type)


def dot_columns(type):
    """Columns up to which the processor's rule multiplies weights of the type as dots of rows; 0: it says nothing."""
    return (RULE or UNKNOWN).dots.get(type, 0) if isa.ISA == "avx512" else 0


def by_stretches(n):
    """Does the processor's rule multiply F32 with n columns by stretches of k?"""
    return isa.ISA == "avx512" and n in (RULE or UNKNOWN).stretches


def pays_repacked(type):
    """Are matrices of the type faster in their layout?"""
    found = None if SETTING else kept(type)
    return found.layout is not None if found else type in (RULE or UNKNOWN).repacked


def forced(tile):
    """Context in which this thread chooses kernels with that tile, or that many rows."""
    return measured.forced(_forced, tile)


def has_amx(type):
    """Are there tiles of AMX for weights of the type?"""
    return isa.AMX and (type is BF16 or traits_of(type).tile is not None)


def by_amx(type, n):
    """Do products of n columns with weights of the type use AMX?"""
    if n < W or not has_amx(type):
        return False
    if _amx.get() is not None:
        return _amx.get()
    found = None if SETTING else kept_amx(type)
    return isa.AMX_ASKED if found is None else found


def forced_amx(use):
    """Context in which this thread chooses kernels with AMX, or without."""
    return measured.forced(_amx, use)


def columns_apart():
    """Context in which this thread chooses kernels that give each column of a product, and each query of an attention,
    the bits that it gets alone.  For batches of several texts; products of many columns are slower."""
    return measured.forced(_apart, True)


def are_apart():
    """Is this thread inside `columns_apart`?"""
    return _apart.get()


# ---------------------------------------------------------------- files
def _file(type):
    key = sources_key(("ggjit.ops.matmul.mul_mat", "ggjit.ops.matmul.repack.layouts", module_of(type)))
    return measured.MeasuredFile("kernels", f"reads-{type.name}", key, functools.partial(_choice, type))


def _choice(type, found):
    """The Choice that the file's JSON says.  Errors: ValueError and others where it says none."""
    tiles, layouts = ({str(t): t for t in some(type)} for some in (candidates, layout_candidates))
    choice = Choice(tiles[found["tile"]], None if found["layout"] is None else layouts[found["layout"]],
                    {str(n): float(s) for n, s in found["seconds"].items()})
    needed = {str(ONE_ROW), str(choice.tile), *([layout_name(choice.layout)] if choice.layout else ())}
    if not needed <= choice.seconds.keys() <= {*tiles, *map(layout_name, layouts.values())}:
        raise ValueError(f"seconds of {', '.join(choice.seconds)}, which do not fit the choice")
    if not all(0 < s < math.inf for s in choice.seconds.values()):
        raise ValueError("seconds must be positive and finite")
    return choice


@functools.cache
def kept(type):
    """The Choice measured on this machine, or None."""
    return None if type.is_own else _file(type).read()


def keep(type, choice):
    """Write the file; False where that cannot be done, and nothing has changed."""
    layout = choice.layout and str(choice.layout)
    done = _file(type).write({"tile": str(choice.tile), "layout": layout, "seconds": choice.seconds})
    if done:
        kept.cache_clear()
    return done


def _amx_file(type):
    key = sources_key(("ggjit.ops.matmul.mul_mat", module_of(type)))
    return measured.MeasuredFile("kernels", f"amx-{type.name}", key, _amx_choice)


def _amx_choice(found):
    if type(found["amx"]) is not bool or found["seconds"].keys() != {"amx", "vectors"}:
        raise ValueError("expected a choice and the seconds of amx and vectors")
    return found["amx"]


@functools.cache
def kept_amx(type):
    """Whether AMX was measured to be right and faster on this machine, or None."""
    return None if type.is_own else _amx_file(type).read()


def keep_amx(type, use, seconds):
    """Write the file; False where that cannot be done, and nothing has changed.  seconds: {"amx", "vectors"}."""
    done = _amx_file(type).write({"amx": use, "seconds": seconds})
    if done:
        kept_amx.cache_clear()
    return done


def note_busy(type, why):
    """Note that a busy machine spoilt the measurement of the type; the rule, or an earlier result, is used."""
    _file(type).note_busy(why)


def busy_seconds(type):
    """Seconds since a measurement was spoilt; infinite if none was since the last kept one."""
    return _file(type).busy_seconds()
