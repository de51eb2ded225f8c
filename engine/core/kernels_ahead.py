"""Counts the kernels that are still to be compiled: a plan registers them before it asks for the first.

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
_after = threading.local()      # .kernels: function that lists the kernels needed after the plan; may be absent


def announce(kernels):
    """Note the kernels, (name, modules) each, that will be needed next; those in the cache are not counted."""
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
    """Context: after the plans made in it come plans that need the kernels of `kernels()`, which is called only if a
    kernel has to be compiled."""
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
