"""Traits: what a type file (ops/types) adds to the table of types, so that kernels can compute with a type."""
import dataclasses
import functools
from collections.abc import Callable

from ggjit.ops.core.discovery import declared
from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.types import Type


@dataclasses.dataclass(frozen=True)
class Traits:
    """What kernels can do with a type.  All row functions take addresses and k, the row's element count.

    to_float(src, dst, k)       jitted: k elements at src -> float32 at dst
    from_float(src, dst, k)     jitted: float32 at src -> blocks at dst; byte-equal to what ggml's CPU kernels write
    quantize(src, dst, k)       jitted: as from_float where whole files are written (ggml_quantize_chunk searches longer
                                there for some types and rounds differently for Q8_0); None: from_float
    quantize_weighted(src, dst, k, weights)  jitted: the same with k float32 importances; None: they are ignored
    quantize_grid               (a GridQuantizer of ops/types/shared) instead of these three where codes name points
                                of a grid; ggml has no from_float for such types, so no op writes them
    np_to_float(raw)            NumPy twin: uint8 (..., row_nbytes) -> float32 (..., k)
    np_from_float(x)            NumPy twin: float32 (..., k) -> uint8 (..., row_nbytes); None: ggml checks it
    round_activations(src, dst, k)  jitted: float32 row -> float32 row as a product with this type sees it (rounded
                                through F16, Q8_0...; ggml's vec_dot_type); None: unchanged
    np_round_activations(x)     NumPy twin
    dot                         products of rows (ops/types/shared/dot.py)
    dot_f32                     the same with float32 activations as they are (GGML_PREC_F32); None: `dot` is that, or
                                there is none
    tile                        how blocks unpack, for packed integer tiles (ops/types/shared); None: float tiles serve
    """
    type: Type
    to_float: Callable | None = None
    from_float: Callable | None = None
    np_to_float: Callable | None = None
    np_from_float: Callable | None = None
    round_activations: Callable | None = None
    np_round_activations: Callable | None = None
    dot: object | None = None
    dot_f32: object | None = None
    tile: object | None = None
    quantize: Callable | None = None
    quantize_weighted: Callable | None = None
    quantize_grid: object | None = None


OWN = "own type "               # begins the module name of a user's type: kernels over it are kept in no file
_derived = []                   # functions whose cached results follow from the types there are


@functools.cache
def all_traits():
    """{Type: (Traits, module name)} of every type file in ggjit.ops.types, and of the types that users defined."""
    return {traits.type: (traits, module) for module, traits in declared("ggjit.ops.types", "TRAITS")}


def cached_for_types(function):
    """Decorator: functools.cache, until a type is added or removed."""
    cached = functools.cache(function)
    _derived.append(cached)
    return cached


def _forget():
    for cached in _derived:
        cached.cache_clear()


def add_traits(traits):
    """Make a user's type known to all ops."""
    all_traits()[traits.type] = traits, f"{OWN}{traits.type.name} {traits.type.id}"
    _forget()


def remove_traits(type):
    """Ops know it no more."""
    all_traits().pop(type, None)
    _forget()


def is_kept(modules):
    """May kernels over these modules be kept in a file?  Not where a user's functions are in them."""
    return not any(m.startswith(OWN) for m in modules)


def traits_of(type):
    """The Traits of `type`; NotSupported if no file serves it yet."""
    return _known(type)[0]


def module_of(type):
    """The module a kernel over `type` depends on (for its cache key)."""
    return _known(type)[1]


def _known(type):
    try:
        return all_traits()[type]
    except KeyError:
        if type.is_own:
            raise NotSupported(f"type {type!r} was removed, or defined again since: make the tensor anew with the type "
                               f"that gg.define_type returned last") from None
        raise NotSupported(f"type {type!r} can be read from files but has no kernels yet; "
                           f"types with kernels: {', '.join(repr(t) for t in all_traits())}") from None
