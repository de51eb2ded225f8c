"""Finding devices: by name ("CPU", "CPU:n_threads=2"), by type, the best one.

A registry object has `.name`, `.devices()` and optionally `.proc_address(name)`.  Third parties call
`gg.registry.register(reg)` or offer one through the entry point group `ggjit.backends`; an entry point that fails to
load is reported in `gg.registry.errors` and never fatal.
"""
import importlib.metadata
import warnings

from ggjit.backend import TYPE_ACCEL, TYPE_CPU, TYPE_GPU
from ggjit.ops.errors import GgjitError, ParamError

API_VERSION = 1


class CPURegistry:
    """The one device every machine has."""
    name = "CPU"
    api_version = API_VERSION

    def devices(self):
        from ggjit.cpu import CPU
        return [CPU]


class Registry:
    """All registered devices."""

    def __init__(self):
        self._registries = [CPURegistry()]
        self.errors = []                # (entry point name, exception) of backends that did not load
        self._searched = False

    def register(self, reg):
        """Add a registry object; its api_version must be ours."""
        version = getattr(reg, "api_version", API_VERSION)
        if version != API_VERSION:
            raise ParamError(f"backend registry {reg.name!r} was made for API version {version}, this is {API_VERSION}")
        if reg not in self._registries:
            self._registries.append(reg)

    def _all(self):
        if not self._searched:
            self._searched = True
            for point in importlib.metadata.entry_points(group="ggjit.backends"):
                try:
                    self.register(point.load()())
                except Exception as e:              # a broken third party must not break us: reported, kept in errors
                    self.errors.append((point.name, e))
                    warnings.warn(f"backend {point.name!r} did not load: {e}", stacklevel=3)
        return self._registries

    def devices(self):
        return [d for reg in self._all() for d in reg.devices()]

    def device(self, name):
        """The device of that name, in any case."""
        for d in self.devices():
            if d.name.casefold() == name.casefold():
                return d
        if name.casefold().startswith("cuda"):
            raise ParamError(f"no device {name!r}: CUDA devices need an NVIDIA GPU and pip install 'ggjit[gpu]'")
        raise ParamError(f"no device {name!r}; there are {', '.join(d.name for d in self.devices())}")

    def by_type(self, type):
        """First device of "cpu", "gpu" or "accel", or None."""
        if type not in (TYPE_CPU, TYPE_GPU, TYPE_ACCEL):
            raise ParamError(f"device type {type!r}: expected cpu, gpu or accel")
        return next((d for d in self.devices() if d.type == type), None)

    def best(self):
        """A GPU where there is one, else the CPU."""
        return self.by_type(TYPE_GPU) or self.by_type(TYPE_CPU)

    def proc_address(self, name):
        """The first registry's extension function of that name, or None."""
        for reg in self._all():
            found = getattr(reg, "proc_address", lambda _: None)(name)
            if found is not None:
                return found
        return None


registry = Registry()


def init_backend(name="CPU", **options):
    """A backend: init_backend("CPU", n_threads=2), init_backend("CPU:n_threads=2"), "best".

    Errors: ParamError for an unknown device or parameter.
    """
    if not isinstance(name, str):
        raise ParamError(f"init_backend takes a device name such as 'CPU', got {name!r}")
    device_name, _, params = name.partition(":")
    device = registry.best() if device_name == "best" else registry.device(device_name)
    params = ",".join([p for p in (params, *(f"{k}={v}" for k, v in options.items())) if p])
    backend = device.init_backend(params)
    if backend is None:
        raise GgjitError(f"device {device.name} made no backend")
    return backend
