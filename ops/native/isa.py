"""Which instruction set the kernels are written for: chosen once, from the host or by GGJIT_CPU.

An instruction the target lacks makes LLVM abort the process, so the choice is made before anything is compiled and is
part of every cache key.  Numba's own NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are honoured: with a CPU name alone LLVM
keeps the host's features, so both are read and both are set when a set is forced.

The processor whose pipeline LLVM schedules for is a second choice.  With its models of AMD's processors the register
tiles of float32 and float16 spill accumulators (half the speed at 64 columns on a Zen 4); with a model of Intel's they
do not, so that model is named, with the features of the processor at hand.
"""
import os

import numba
from llvmlite import binding as llvm
from numba.core.codegen import get_host_cpu_features

from ggjit.ops.core.errors import ParamError

NAMES = ("avx512", "avx2", "generic")
_BEYOND_AVX2 = ("avx512", "avx10", "amx", "avxvnni", "avxifma", "avxneconvert", "evex512", "vaes", "vpclmulqdq", "gfni")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")


def _effective_features():
    if numba.config.CPU_FEATURES is not None:
        return {f[1:] for f in numba.config.CPU_FEATURES.split(",") if f.startswith("+")}
    return {name for name, on in llvm.get_host_cpu_features().items() if on}


def _forget(features, prefixes):
    """Make LLVM forget host features by naming them with a minus (a CPU name alone keeps them)."""
    off = sorted(f for f in features if f.startswith(prefixes))
    on = sorted(features - set(off))
    numba.config.CPU_FEATURES = ",".join([f"+{f}" for f in on] + [f"-{f}" for f in off])


def _choose():
    features = _effective_features()
    if all(f in features for f in _AVX512):
        best = "avx512"
    elif all(f in features for f in ("avx2", "fma", "f16c")):
        best = "avx2"
    else:
        best = "generic"
    asked = os.environ.get("GGJIT_CPU", "").lower()
    if not asked or asked == best:
        return best
    if asked not in NAMES:
        raise ParamError(f"GGJIT_CPU={asked!r}: expected one of {', '.join(NAMES)}")
    if NAMES.index(asked) < NAMES.index(best):
        raise ParamError(f"GGJIT_CPU={asked}: this processor supports {best} at most; unset GGJIT_CPU")
    if asked == "avx2":
        numba.config.CPU_NAME = numba.config.CPU_NAME or "haswell"
        _forget(features, _BEYOND_AVX2)
    return asked


def _schedule_as(model):
    """Name another processor to LLVM; the features stay, also those that the model would bring or take."""
    if numba.config.CPU_FEATURES is None:
        numba.config.CPU_FEATURES = get_host_cpu_features()
    numba.config.CPU_NAME = model


PROCESSOR = numba.config.CPU_NAME or llvm.get_host_cpu_name()           # what runs the kernels, in LLVM's words
ISA = _choose()
SCHEDULED_AS = numba.config.CPU_NAME or PROCESSOR                       # what LLVM is told
if PROCESSOR.startswith("znver") and ISA in (models := {"avx512": "icelake-server", "avx2": "haswell"}):
    SCHEDULED_AS = models[ISA]
    _schedule_as(SCHEDULED_AS)
FEATURES = frozenset(_effective_features())
W = {"avx512": 16, "avx2": 8, "generic": 8 if "avx" in FEATURES else 4}[ISA]    # f32 lanes of a vector
X86 = any(f.startswith("sse") for f in FEATURES)
BF16_DOT = ISA == "avx512" and "avx512bf16" in FEATURES


_SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "USING_SVML")    # NUMBA_*


def target():
    """Instruction set and processor, in words."""
    return f"{ISA} {PROCESSOR}" + f" as {SCHEDULED_AS}" * (SCHEDULED_AS != PROCESSOR)


def cpu_key():
    """What the compiled code depends on besides its sources."""
    settings = " ".join(f"{name}={getattr(numba.config, name)}" for name in _SETTINGS)
    return f"{target()} {','.join(sorted(FEATURES))} {settings}"
