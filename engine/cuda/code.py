"""From a kernel's Python function to something that can be launched.

    Launch.make()  ->  machine code, kept in the cache folder (ops/cuda/native/build.py)
                   ->  module of the device  ->  function

In the simulator the Python function itself takes the place of the machine code.
"""
from ggjit.cuda.driver import SIMULATED, driver


def functions(device, launches):
    """Function handles of `launches` on `device`; each kernel is compiled and loaded once."""
    return [_function(device, launch) for launch in launches]


def _function(device, launch):
    found = device.functions.get(launch.name)
    if found is None:
        image, symbol = _image(device, launch)
        device.use()
        module = driver().cuModuleLoadData(image)
        found = device.functions[launch.name] = driver().cuModuleGetFunction(module, symbol)
        device.modules.append(module)
    return found


def _image(device, launch):
    if SIMULATED:
        func = launch.make()
        func.__name__ = launch.name
        return func, b""
    from ggjit.ops.cuda.native.build import binary
    built = binary(launch, device.compute_capability)
    return built.cubin, built.symbol.encode()
