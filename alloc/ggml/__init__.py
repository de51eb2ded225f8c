"""ggml's allocators, offset for offset.

    graph_record  what all passes over one graph share; localize: filled from the tensor table
    alias         which tensors share memory, as events over allocations
    free_list     ggml's best-fit list; placement: the events run through it, and tensors get their places;
                  best_fit: the same offsets, found quickly
    problem       checks a graph and runs the passes over it: ggml's own plan
    bump          places for one tensor at a time

Read in this order.  The folder legacy/ is ggml as of November 2023: only the package's top imports it.
"""
