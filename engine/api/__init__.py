"""The top of the engine: devices by name, and the calls that do all steps at once.

Read in this order:

    registry            the devices of this process, third-party ones too; init_backend("CPU", n_threads=2)
    null_device         the device that plans and computes nothing
    compute             gg.compute(y): allocate, plan, run, read
    rematerialize       gg.rematerialize(graph, budget): less memory for more operations
    remat_nodes         a graph as the numbers for it; remat_graph: graphs of schedules of them
    cut                 the largest nodes for some rows at a time
    measure_memory      gg.measure(graph): the memory it will take; what_if: and would take otherwise
    explore             gg.explore(graph): plan and run in an interactive page
    examples            two lines for every op builder
"""
