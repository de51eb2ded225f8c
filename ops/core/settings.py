"""Environment variables that select kernels, checked here, where no compiler has to be imported.

    GGJIT_CPU       the instruction set or level they are written for; ops/native/isa.py chooses
    GGJIT_TUNE      how they read weights; ops/matmul/choices.py
    GGJIT_CUSTOM    unchecked: first runs of users' functions are not checked (ops/elementwise/custom_trial.py)
"""
import os

from ggjit.ops.core.errors import ParamError

ISAS = "avx512", "avx2", "neon", "generic"      # of each architecture the best first
LEVEL_NAMES = "avx512amx", "avx512bf16", "neon-v8.6", "neon-v8.4", "neon-v8.2"      # better ones of a set
TILE_ROWS = 1, 2, 4, 8


def custom_is_checked():
    """Are the first runs of users' functions checked?  GGJIT_CUSTOM=unchecked switches it off.  Errors: ParamError."""
    asked = os.environ.get("GGJIT_CUSTOM", "")
    if asked not in ("", "checked", "unchecked"):
        raise ParamError(f"GGJIT_CUSTOM={asked!r}: expected checked or unchecked")
    return asked != "unchecked"


def asked_isa():
    """One of ISAS or LEVEL_NAMES, or "" where nothing is asked for.  Errors: ParamError."""
    asked = os.environ.get("GGJIT_CPU", "").lower()
    if asked and asked not in ISAS + LEVEL_NAMES:
        raise ParamError(f"GGJIT_CPU={asked!r}: expected one of {', '.join(ISAS + LEVEL_NAMES)}")
    return asked


def asked_tuning():
    """One of TILE_ROWS, "off", or "" where nothing is asked for.  Errors: ParamError."""
    asked = os.environ.get("GGJIT_TUNE", "")
    if asked in ("", "off"):
        return asked
    if asked not in map(str, TILE_ROWS):
        raise ParamError(f"GGJIT_TUNE={asked!r}: expected off or one of {', '.join(map(str, TILE_ROWS))}")
    return int(asked)
