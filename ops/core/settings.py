"""GGJIT_CPU: which instruction set kernels are written for, as asked; ops/native/isa.py chooses.

The value is checked here, where no compiler has to be imported for it.
"""
import os

from ggjit.ops.core.errors import ParamError

ISAS = "avx512", "avx2", "generic"              # the best first


def asked_isa():
    """One of ISAS, or "" where nothing is asked for.  Errors: ParamError."""
    asked = os.environ.get("GGJIT_CPU", "").lower()
    if asked and asked not in ISAS:
        raise ParamError(f"GGJIT_CPU={asked!r}: expected one of {', '.join(ISAS)}")
    return asked
