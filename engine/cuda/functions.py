"""Compiles and loads Python functions as CUDA kernels and walkers, once for a device."""
import ctypes

from ggjit.cuda.driver import driver
from ggjit.ops.cuda.compiler.choice import SIMULATED


def argument_of(address):
    """(address of cuLaunchKernel's list of pointers for one int64 argument, memory to keep alive)."""
    value = ctypes.c_int64(address)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    return ctypes.addressof(pointers), pointers, value


def function_of(device, launch):
    """The function handle of `launch` on `device`; each kernel is compiled and loaded once."""
    found = device.functions.get(launch.name)
    if found is None:
        found = device.functions[launch.name] = _loaded(device, launch.name, *_image(device, launch))
    return found


def _image(device, launch):
    if SIMULATED:               # the Python function itself takes the place of the machine code
        return launch.make(), b""
    from ggjit.ops.cuda.compiler.build import binary
    built = binary(launch, device.compute_capability)
    return built.cubin, built.symbol.encode()


def walker_of(device, walker):
    """(function handle of a Walker, bytes of shared memory of a team of each body, bytes of a thread's spills)."""
    found = device.functions.get(walker.name)
    if found is None:
        image, symbol, *facts = _walker_image(device, walker)
        found = device.functions[walker.name] = _loaded(device, walker.name, image, symbol), *facts
    return found


def _walker_image(device, walker):
    if SIMULATED:
        from ggjit.ops.cuda.compiler.simulated_teams import as_body
        return walker.make([as_body(*body) for body in walker.bodies()]), b"", (0,) * len(walker.launches), 0
    from ggjit.ops.cuda.compiler.build import walker_binary
    built = walker_binary(walker, device.compute_capability)
    return built.cubin, built.symbol.encode(), built.pieces, built.spill_nbytes


def _loaded(device, name, image, symbol):
    if SIMULATED:
        image.__name__ = name
    device.use()
    module = driver().cuModuleLoadData(image)
    device.modules.append(module)
    return driver().cuModuleGetFunction(module, symbol)
