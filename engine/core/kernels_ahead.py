"""How many kernels are still to be compiled: a plan tells which it needs before it asks for the first.

What will be planned after it may be known, too: a prompt is followed by single tokens.

    with followed_by(kernels_of_a_token):
        make the prompt's plan                  # the count has both
"""
import contextlib
import threading

from ggjit.ops.core.traits import is_kept
from ggjit.ops.native.cache_files import cache_dir
from ggjit.ops.native.jit import CACHE, sources_key
from ggjit.ops.native.kernel_pack import SHIPPED

_ahead = []                     # (name, modules) of kernels that are not in the cache yet
_after = threading.local()      # .kernels: function: (name, modules) of what is asked for after the plan, or absent


def announce(kernels):
    """kernels: (name, modules) of what is about to be asked for; those in the cache are not counted."""
    now = missing(kernels)
    if now:
        later = getattr(_after, "kernels", None)
        _ahead[:] = dict.fromkeys([*now, *missing(later() if later else ())])


def missing(kernels):
    """The kernels that are neither in this process nor in the cache's folder nor shipped."""
    folder = cache_dir() / "kernels"
    files = {(name, modules): f"{name}-{sources_key(tuple(sorted(modules)))}.o" if is_kept(modules) else None
             for name, modules in dict.fromkeys(kernels) if (name, modules) not in CACHE.addresses}
    return [k for k, file in files.items() if file is None
            or not (folder / file).exists() and file not in SHIPPED.names]


@contextlib.contextmanager
def followed_by(kernels):
    """Plans made in the block are followed by others that need what `kernels()` gives; asked if one has to compile."""
    before = getattr(_after, "kernels", None)
    _after.kernels = kernels
    try:
        yield
    finally:
        _after.kernels = before


def n_ahead(name):
    """Kernels that were announced and are not there yet, with the one being compiled, `name`; 0 where that was not
    announced: then the others are of a plan that was given up."""
    left = [k for k in _ahead if k not in CACHE.addresses]
    return len(left) if any(k[0] == name for k in left) else 0
