"""How many kernels are still to be compiled: a plan tells which it needs before it asks for the first."""
from ggjit.ops.native.cache_files import cache_dir
from ggjit.ops.native.jit import CACHE, sources_key

_ahead = []                     # (name, modules) of those that were not there


def announce(kernels):
    """kernels: (name, modules) of what is about to be asked for; those in the cache are not counted."""
    unknown = [k for k in dict.fromkeys(kernels) if k not in CACHE.addresses]
    if unknown:
        folder = cache_dir() / "kernels"
        _ahead[:] = [(name, modules) for name, modules in unknown
                     if not (folder / f"{name}-{sources_key(tuple(sorted(modules)))}.o").exists()]


def n_ahead():
    """Kernels that were announced and are not there yet, with the one being compiled."""
    return sum(k not in CACHE.addresses for k in _ahead)
