"""Rows of a decode tile, per type: the rule's, or what was measured to be faster on this machine.

    kernels/tile_rows-q4_0-KEY.json     {"rows": 4, "seconds": {"1": 0.0213, "2": 0.0189, "4": 0.0171}}

ggjit.cpu.tuning measures (`ggjit warm-up MODEL` calls it); this file stores and reads the choice.  KEY is that of a
kernel over the type: processor, instruction set, sources.  On another machine or with another kernel the rule holds.
Only tiles that gave the same bytes are compared, so a choice changes speed and no result.  A file is read once in a
process; one that is damaged counts as absent, and the next warm-up writes it anew.

    GGJIT_TUNE=off      the rule, whatever was measured; nothing is measured
    GGJIT_TUNE=1|2|4|8  that many rows, or as many as the type's tiles have at most

Rows of a tile are streams from memory.  An Intel Xeon reads eight at once faster than one, whose prefetching ends with
every page: float weights of 1 GB, rows of 2048, one thread, share of what a plain loop over eight streams read in the
same seconds (12.9 to 13.2 GB/s, without asking ahead of it):

    rows        1       2       4       8
    F32      0.80    0.89    0.95    1.03
    F16      0.77    0.95    1.04    1.05
    BF16     0.82    0.90    0.98    1.03

An AMD Zen 4 reads one faster than two or four.
"""
import contextlib
import contextvars
import dataclasses
import functools
import json
import os

from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.traits import module_of
from ggjit.ops.core.whole_file import write_whole
from ggjit.ops.native import isa
from ggjit.ops.native.cache_files import cache_dir
from ggjit.ops.native.jit import sources_key

ROWS = 1, 2, 4, 8
ONE_STREAM = isa.PROCESSOR.startswith("znver")
_forced = contextvars.ContextVar("rows", default=None)


def _setting():
    value = os.environ.get("GGJIT_TUNE", "")
    if value in ("", "off"):
        return value
    if value not in map(str, ROWS):
        raise ParamError(f"GGJIT_TUNE={value!r}: expected off or one of {', '.join(map(str, ROWS))}")
    return int(value)


SETTING = _setting()


@dataclasses.dataclass(frozen=True)
class Choice:
    """rows: chosen; seconds: {rows: of one product} of all tiles with the same bytes."""
    rows: int
    seconds: dict

    @property
    def gain(self):
        """Seconds of the tile of one row over the chosen one's."""
        return self.seconds[ROWS[0]] / self.seconds[self.rows]


def candidates(type):
    """Rows that tiles of the type may have.  Eight rows of blocks, or of AVX2, have too few registers."""
    return ROWS if isa.ISA == "avx512" and not type.quantized else ROWS[:3]


def rule(type):
    """Rows where nothing was measured."""
    return ROWS[0] if type.quantized or ONE_STREAM else candidates(type)[-1]


def rows(type):
    """Rows of a that a tile of one column takes."""
    forced = _forced.get() or SETTING
    if forced:
        return rule(type) if forced == "off" else min(forced, candidates(type)[-1])
    found = kept(type)
    return found.rows if found else rule(type)


@contextlib.contextmanager
def forced(n_rows):
    """Inside the block this thread chooses kernels with tiles of n_rows."""
    token = _forced.set(n_rows)
    try:
        yield
    finally:
        _forced.reset(token)


# ---------------------------------------------------------------- files
def _path(type):
    key = sources_key(("ggjit.ops.matmul.mul_mat", module_of(type)))
    return cache_dir() / "kernels" / f"tile_rows-{type.name}-{key}.json"


@functools.cache
def kept(type):
    """The Choice measured on this machine, or None."""
    path = _path(type)
    try:
        found = json.loads(path.read_text("utf-8"))
        choice = Choice(int(found["rows"]), {int(n): float(s) for n, s in found["seconds"].items()})
    except Exception:           # a damaged file counts as absent
        return None
    good = {ROWS[0], choice.rows} <= choice.seconds.keys() <= set(candidates(type)) and min(choice.seconds.values()) > 0
    return choice if good else None


def keep(type, choice):
    """Write the file; False where that cannot be done, and nothing has changed."""
    path = _path(type)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(choice)), mode=0o600, devices=False)
    except OSError:
        return False
    kept.cache_clear()
    return True
