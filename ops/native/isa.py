"""Which instruction set the kernels are written for: chosen once, from the host or by GGJIT_CPU.

An instruction the target lacks makes LLVM abort the process, so the choice is made before anything is compiled and is
part of every cache key.

Kernels are made for a level, not for one processor: they use what every processor of it has and nothing else, so that
machine code made on one runs on all, from a cache or a kernel pack (ggjit.ops.native.kernel_pack).

    level        features                                                          processors
    avx512amx    those below, amx-tile, amx-int8, amx-bf16                         Xeons from Sapphire Rapids on
    avx512bf16   those below, bf16, gfni, ifma, vbmi, vbmi2, bitalg, vpopcntdq     Sapphire Rapids, Zen 4 and later
    avx512       x86-64-v4, vnni, prfchw                                           Cascade Lake, Ice Lake
    avx2         x86-64-v3                                                         Haswell, Zen and later
    neon-v8.6    those below, i8mm, bf16                                           Neoverse V1 and V2, Apple M2
    neon-v8.4    those below, fp16fml                                              Apple M1
    neon-v8.2    those below, dotprod, fullfp16, lse, rcpc                         Neoverse N1, Cortex-A76
    neon         armv8-a                                                           Cortex-A72

Tiles of AMX need a permission, which Linux gives a process (machine.tiles_refused); without it the level is the one
below.  Where no level fits (another architecture, a virtual machine that hides features) they use what is there.

The processor whose pipeline LLVM schedules for is fixed by the level, too.  With LLVM's models of AMD's processors the
register tiles of float32 and float16 spill accumulators (half the speed at 64 columns on Zen 4 and Zen 5); with a model
of Intel's they do not.

Numba's NUMBA_CPU_FEATURES says what the processor has, NUMBA_CPU_NAME which one it is; with a name, code is scheduled
for that one.
"""
import numba
from llvmlite import binding as llvm

from ggjit.ops.core import machine
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.settings import ISAS, LEVEL_NAMES, asked_isa

_V3 = frozenset("64bit cmov cx8 fxsr mmx sse sse2 cx16 sahf popcnt sse3 ssse3 sse4.1 sse4.2 crc32 avx avx2 bmi bmi2 "
                "f16c fma lzcnt movbe xsave".split())
# LLVM 18 to 21 need this feature named for vectors of 512 bits
_WIDE = {"evex512"} & set(llvm.get_host_cpu_features())
_V4 = _V3 | _WIDE | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni", "prfchw"}
_NEON = frozenset({"neon", "fp-armv8"})
_V82 = _NEON | {"dotprod", "fullfp16", "lse", "rcpc"}
_V86 = _V82 | {"fp16fml", "i8mm", "bf16"}
_BF16 = _V4 | {"avx512bf16", "avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vpopcntdq", "gfni"}
_TILES = frozenset({"amx-tile", "amx-int8", "amx-bf16"})
# What kernels use, the best first: packs are made for each
LEVELS = {"avx512amx": _BF16 | _TILES, "avx512bf16": _BF16, "avx512": _V4, "avx2": _V3,
          "neon-v8.6": _V86, "neon-v8.4": _V82 | {"fp16fml"}, "neon-v8.2": _V82, "neon": _NEON}
_NEEDED = {"avx512": _WIDE | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"},
           "avx2": {"avx2", "fma", "f16c"}, "neon": _NEON}
# processors whose instruction timing LLVM uses
MODELS = {"avx512amx": "sapphirerapids", "avx512bf16": "sapphirerapids", "avx512": "icelake-server", "avx2": "haswell",
          "neon-v8.6": "neoverse-v2", "neon-v8.4": "apple-m1", "neon-v8.2": "neoverse-n1", "neon": "cortex-a72"}
ARM64 = llvm.get_process_triple().startswith(("aarch64", "arm64"))
NAMES = tuple(name for name in ISAS if name == "generic" or (name == "neon") == ARM64)      # of this architecture
# features that a processor's name in MODELS implies; each is switched on or off explicitly
_NAMED_BY_MODELS = _V86 | {"sve"} if ARM64 else frozenset()


def features_text(on):
    """The features `on` and no others, in the words of NUMBA_CPU_FEATURES: a processor's name alone brings more."""
    known = _NAMED_BY_MODELS.union(llvm.get_host_cpu_features())
    return ",".join([f"+{f}" for f in sorted(on)] + [f"-{f}" for f in sorted(known) if f not in on])


def _told_features():
    """What the processor has, by LLVM or by NUMBA_CPU_FEATURES."""
    if numba.config.CPU_FEATURES is not None:
        return frozenset(f[1:] for f in numba.config.CPU_FEATURES.split(",") if f.startswith("+"))
    found = frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)
    return found | _NEON | machine.arm_features() if ARM64 else found


def _why_no_tiles(features):
    """Why AMX is not used on a processor that has it, else ""."""
    has_tiles = features >= _TILES and bool(llvm.get_host_cpu_features().get("amx-tile"))
    return machine.tiles_refused() if has_tiles and asked_isa() in ("", "avx512", "avx512amx") else ""


def _choose(features):
    best = next((name for name, needed in _NEEDED.items() if needed <= features), "generic")
    asked = asked_isa()
    wanted = next((name for name in ISAS if asked.startswith(name)), best)
    if wanted not in NAMES[NAMES.index(best):]:
        raise ParamError(f"GGJIT_CPU={asked}: this processor supports {best} at most; unset GGJIT_CPU")
    return wanted


def _level(isa, features):
    """(name, features that kernels use)."""
    of_isa = {name: level for name, level in LEVELS.items() if name.startswith(isa)}
    able, asked = [name for name, level in of_isa.items() if level <= features], asked_isa()
    if asked in LEVEL_NAMES and asked not in able:
        why = f" ({WHY_NO_TILES})" if WHY_NO_TILES else ""
        raise ParamError(f"GGJIT_CPU={asked}: this processor supports {[*able, isa][0]} at most{why}; unset GGJIT_CPU")
    name = asked if asked in LEVEL_NAMES else next(iter(able), None)
    if name:
        return name, LEVELS[name]
    return f"{isa}, this processor's own", features & frozenset().union(*of_isa.values()) if of_isa else features


# the processor that runs the kernels, by LLVM's name
PROCESSOR = numba.config.CPU_NAME or llvm.get_host_cpu_name()
WHY_NO_TILES = _why_no_tiles(_told_features())          # "" where it has none, or they are used
# its features, of which kernels use FEATURES
HOST_FEATURES = _told_features() - (_TILES if WHY_NO_TILES else frozenset())
ISA = _choose(HOST_FEATURES)
LEVEL, FEATURES = _level(ISA, HOST_FEATURES)
AMX_ASKED = asked_isa() == "avx512amx"         # used before it was measured
_MODEL = MODELS.get(LEVEL) or MODELS.get(ISA, PROCESSOR)
# the processor that LLVM schedules instructions for
SCHEDULED_AS = _MODEL if PROCESSOR.startswith("znver") else numba.config.CPU_NAME or _MODEL
W = {"avx512": 16, "avx2": 8, "neon": 4, "generic": 8 if "avx" in FEATURES else 4}[ISA]    # f32 lanes of a vector
X86 = any(f.startswith("sse") for f in FEATURES)
X86_LEVEL = ISA in ("avx512", "avx2")                       # kernels may hold x86's own instructions
BF16_DOT = (ISA == "avx512" and "avx512bf16" in FEATURES) or (ISA == "neon" and "bf16" in FEATURES)
# processors of these levels have a fast string instruction ("fsrm" in /proc/cpuinfo), which libc's memcpy may use
FAST_STRINGS = X86 and _BF16 <= FEATURES
AMX = _TILES <= FEATURES                                # products of tiles (ops/native/amx.py)

# settings of Numba (NUMBA_...) that change the code
_SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "USING_SVML")


def target():
    """Instruction set and processor, in words."""
    return f"{ISA} {PROCESSOR}" + f" as {SCHEDULED_AS}" * (SCHEDULED_AS != PROCESSOR)


def code_key():
    """Everything that machine code depends on besides its sources and the versions of the compilers."""
    settings = " ".join(f"{name}={getattr(numba.config, name)}" for name in _SETTINGS)
    return f"{ISA} {SCHEDULED_AS} {','.join(sorted(FEATURES))} {settings} {llvm.get_process_triple()}"
