"""ggjit: ggml's tensors, graphs, kernels, memory plans and backends as a Numba-JIT engine.

    import ggjit as gg
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.random.rand(3, 4).astype("f4"))
    gg.compute(gg.soft_max(a))

Folders, lowest first; each imports only itself and those before it:

    ggjit.ops       what is computed: types, op specs, kernels
    ggjit.alloc     where it lies: memory plans as numbers
    core            the tensor table, buffers, base classes of devices and backends
    tensors         tensor handles, contexts, operators, data in and out
    graphs          nodes in the order of computing, memory for them
    cpu             plans, kernel fusion, the thread pool
    profiling       where the time goes
    display         HTML and pictures in notebooks
    sched           one graph on several devices
    cuda            the CUDA device
    api             devices by name, compute, measure
    train           gradients, optimiser and data in a loop
    cluster         devices that are other processes and machines

Importing it reads settings and nothing else; Numba and the kernels come with the first name that is used (names).
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")

import gc as _gc
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from ggjit.core import config as _config  # checks GGJIT_DEBUG
from ggjit.ops.core import errors as _errors
from ggjit.ops.core import locks as _locks  # registers what a forked child has to do
from ggjit.ops.core import requirements as _requirements
from ggjit.ops.core import settings as _settings

__version__ = "0.2.0"
_requirements.check()
_settings.asked_isa(), _settings.asked_tuning()     # a wrong value is an error here, not in the middle of a program
_LATER = "train", "cluster"     # most programs do not train, on one machine
_OF_MODELS = "fit", "diff", "pareto"    # functions that take files; the layer above has them
_MODULES = {"ops", "alloc", "errors", "models", *_LATER}        # that belong to the API


def __getattr__(name):
    if name in _LATER:
        return _import_module(f"ggjit.{name}")
    if name in _OF_MODELS:
        return getattr(_import_module("ggjit.models"), name)
    if name == "__all__":
        return [n for n in __dir__() if not n.startswith("__") and n not in _LATER]
    if not name.startswith("__"):
        if "Tensor" not in globals():
            names = _all_names()
            globals().update({n: x for n, x in names.items() if not n.startswith("_")})     # at once, for other threads
        if name in globals():
            return globals()[name]
    hint = "" if name.startswith("_") else _import_module("ggjit.core.other_names").of_the_module(name, __dir__())
    raise _errors.NoSuchAttribute(f"module 'ggjit' has no attribute {name!r}{hint}")


def _all_names():
    """All names of the API.  Meanwhile the garbage collector looks at young objects alone: among all those of Numba it
    would find nothing, and take a quarter of the time."""
    young, middle, old = _gc.get_threshold()
    _gc.set_threshold(young, middle, 1 << 20)
    try:
        return vars(_import_module("ggjit.names"))
    finally:
        _gc.set_threshold(young, middle, old)


def __dir__():
    """The API for `gg.<TAB>`: no modules but those that belong to it, no private names."""
    _ = "Tensor" in globals() or __getattr__("Tensor")
    return sorted({*_LATER, *_OF_MODELS, *(n for n, x in globals().items() if n.startswith("__")
                              or not n.startswith("_") and (n in _MODULES or not isinstance(x, _ModuleType)))})
