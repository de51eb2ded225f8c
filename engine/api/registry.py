"""Finding devices: by name ("CPU", "CPU:n_threads=2"), by type, the best one.

A registry object has `.name`, `.devices()` and optionally `.proc_address(name)` and `.api_version`.  Third parties
call `gg.registry.register(reg)` or offer one through the entry point group `ggjit.backends` (the Python form of
ggml_backend_load); an entry point or registry that fails is reported in `gg.registry.errors` and never fatal.
"""
import importlib
import importlib.metadata
import sys

from ggjit.api.null_device import NULL
from ggjit.core.arguments import expect
from ggjit.core.backend import DEVICE_TYPES, TYPE_CPU, TYPE_GPU, TYPE_IGPU, Device
from ggjit.core.config import debug
from ggjit.cpu.device import CPU, PROC_ADDRESSES
from ggjit.ops.core.errors import GgjitError, ParamError, TypeMismatch
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.user_warnings import warn

API_VERSION = 1
ENTRY_POINTS = "ggjit.backends"


def _cuda_devices():
    """CUDA0, CUDA1, ...: none where the extra, the driver or a GPU is missing."""
    from ggjit.cuda.device import usable_devices
    return usable_devices()


class BuiltIn:
    """The registry object of devices that come with ggjit."""
    api_version = API_VERSION

    def __init__(self, name, devices, proc_addresses=()):
        self.name, self.devices, self._proc_addresses = name, devices, dict(proc_addresses)

    def proc_address(self, name):
        return self._proc_addresses.get(name)


_BUILT_IN = (BuiltIn("CUDA", _cuda_devices), BuiltIn("CPU", lambda: [CPU], PROC_ADDRESSES),
             BuiltIn("NULL", lambda: [NULL]))
CPU.reg, NULL.reg = _BUILT_IN[1:]


class Registry:
    """All registered devices, in the order they were registered; CUDA, CPU and NULL come last."""

    def __init__(self):
        self._registries = []
        self.errors = []                # (name, exception) of backends that did not load or list their devices
        self._searched = False
        self._lock = ForkLock()

    def register(self, reg):
        """Add a registry object of this api_version.  Registering it again does nothing."""
        name = getattr(reg, "name", None)       # read once, so that its name here cannot change
        if not isinstance(name, str) or not callable(getattr(reg, "devices", None)):
            raise TypeMismatch(f"a backend registry has .name (a string) and .devices(), got {reg!r}")
        version = getattr(reg, "api_version", API_VERSION)
        if version != API_VERSION:
            raise ParamError(f"backend registry {name!r} was made for API version {version}, this is {API_VERSION}")
        with self._lock:
            if any(r is reg for _, r in self._registries):
                return
            self._registries.append((name, reg))
        if "registry" in debug:
            names = ", ".join(d.name for d in self._guard(name, lambda: list(reg.devices())) or ())
            print(f"registered backend {name}: devices {names or 'none'}", file=sys.stderr)

    def unregister(self, reg):
        """Take a registry out; its devices and backends that are in use live on."""
        with self._lock:
            self._registries = [(n, r) for n, r in self._registries if r is not reg]

    def load(self, module):
        """Import a module and register what its `ggjit_backend()` returns (ggml_backend_load).  Errors come out."""
        absolute = expect(module, str, "load") and not module.startswith(".")
        make = getattr(importlib.import_module(module), "ggjit_backend", None) if absolute else None
        if make is None:
            raise ParamError(f"load: {module!r} is not a module with a function ggjit_backend()")
        reg = make()
        self.register(reg)
        return reg

    def _all(self):
        """[(name, registry object)]"""
        with self._lock:
            if not self._searched:
                self._searched = True           # before loading: a backend may ask for devices while it loads
                for point in self._guard(ENTRY_POINTS, lambda: list(importlib.metadata.entry_points(
                        group=ENTRY_POINTS))) or ():
                    self._guard(point.name, lambda point=point: self.register(point.load()()))
            return [*self._registries, *((r.name, r) for r in _BUILT_IN)]

    def _guard(self, name, call):
        """call(), or None with its error kept in `errors` and warned about once: third-party code must not stop ggjit.

        SystemExit too: scripts may exit when they are imported.
        """
        try:
            return call()
        except (Exception, SystemExit) as e:
            if not any(n == name and repr(e) == repr(old) for n, old in self.errors):
                self.errors.append((name, e))
                warn(f"backend {name!r} does not work: {e!r}")
            return None

    def registries(self):
        """All registry objects."""
        return [r for _, r in self._all()]

    def registry(self, name):
        """The registry of that name in any case, or None."""
        wanted = expect(name, str, "registry").casefold()
        return next((r for n, r in self._all() if n.casefold() == wanted), None)

    def _found(self, without=None):
        """[(name, type, device)] of all devices; those that raise are reported and left out."""
        found = []
        for name, reg in self._all():
            if name == without:
                continue
            for d in self._guard(name, lambda reg=reg: list(reg.devices())) or ():
                found.append(self._guard(name, lambda d=d, reg=reg: _facts(d, reg)))
        return [f for f in found if f is not None]

    def devices(self):
        """All devices; a registry or device that raises is reported and left out."""
        return [d for _, _, d in self._found()]

    def props(self):
        """The props of all devices; one that raises is reported and left out."""
        found = [self._guard(name, lambda d=d: d.props) for name, _, d in self._found()]
        return [p for p in found if p is not None]

    def device(self, name):
        """The device of that name, in any case."""
        cuda = expect(name, str, "device").casefold().startswith("cuda")
        found = self._found(without=None if cuda else "CUDA")       # looking for GPUs takes a while
        for n, _, d in found:
            if n.casefold() == name.casefold():
                return d
        if cuda:
            from ggjit.cuda.device import no_device
            raise no_device(name)
        raise ParamError(f"no device {name!r}; there are {', '.join(n for n, _, _ in found)}")

    def by_type(self, type):
        """First device of "cpu", "gpu", "igpu", "accel" or "null", or None."""
        if type not in DEVICE_TYPES:
            raise ParamError(f"device type {type!r}: expected {', '.join(DEVICE_TYPES)}")
        return next((d for _, t, d in self._found() if t == type), None)

    def best(self):
        """A GPU where there is one, then an integrated GPU, then the CPU."""
        return self.by_type(TYPE_GPU) or self.by_type(TYPE_IGPU) or self.by_type(TYPE_CPU)

    def proc_address(self, name):
        """The first registry's extension function of that name, or None."""
        for reg_name, reg in self._all():
            found = self._guard(reg_name, lambda reg=reg: getattr(reg, "proc_address", lambda _: None)(name))
            if found is not None:
                return found
        return None


def _facts(device, reg):
    """(name, type, device) of a device; sets its `registry`.  Errors: TypeMismatch if it cannot be listed."""
    name, kind = device.name, device.type
    if not isinstance(name, str) or kind not in DEVICE_TYPES:
        raise TypeMismatch(f"a device has .name (a string) and .type ({', '.join(DEVICE_TYPES)}), got {name!r} and "
                           f"{kind!r}")
    if isinstance(device, Device):
        device.reg = reg
    return name, kind, device


registry = Registry()


def init_backend(name="CPU", **options):
    """A new backend of the device `name`; "best": of a GPU where there is one, else of the CPU.

        cpu = gg.init_backend("CPU", n_threads=2)
        cpu = gg.init_backend("CPU:n_threads=2")            # the same

    The name ends at the first colon, the rest are parameters.  Errors: ParamError for an unknown device or parameter.
    Source: ggml_backend_init_by_name, ggml_backend_init_best.
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
