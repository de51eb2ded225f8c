"""What every other folder of the engine builds on: the tensor table, buffers, the interfaces of backends.

Read in this order:

    table, row_sizes, versions      a tensor is a row of one table; its bytes; how often its data were written
    buffer, host_buffer             a buffer type makes buffers; those in host memory
    placing, compute_buffers        leaves placed in new buffers; buffers that grow with the graphs computed in them
    backend, events                 base classes of devices and their streams; points in a stream to wait for
    graph_slots                     nodes that say where they lie, for backends that ask them
    run_lock, pending               errors instead of deadlocks; asynchronous work that may still write
    arguments, slots                checks of what callers pass, and of what third-party devices return
    config, lifetime, html_repr     settings; handles and clean-up; how objects look in notebooks
    kernels_ahead, content_key      how many kernels are still to be compiled; what bytes are known by
    other_names                     names of NumPy and PyTorch, and what stands for them here
    process_memory                  what the process holds, as the system counts it
    fixed                           attributes and lists that stay as they were made
"""
