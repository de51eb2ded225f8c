"""What every other folder of the engine stands on: the tensor table, buffers, the interfaces of backends.

    config, arguments, slots        settings; checks of what callers pass and of what devices return
    table, versions                 a tensor is a row of one table; how often its data were written
    buffer, compute_buffers, placing        memory, and tensors placed in it
    backend, events                 what a device, its streams and its events look like
    run_lock, pending               one computation at a time; asynchronous work that still writes
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
