"""Profiles of runs, and the limits of the machine.

Read in this order:

    profile             the `with gg.profile()` block, its tables and traces
    nodes               bytes, operations and times of the nodes of a plan
    machine_limits      memory bandwidth and float32 peak, measured
    plot                threads and layers over time
"""
