"""ggml's allocators as of November 2023, for plans and programs of that time.

    alias_2023          which tensors share memory
    tensor_alloc        places for one tensor at a time, with free
    graph_alloc_2023    graphs, planned from the state that those places are in

Read in this order.  Nothing here is used by the planners of today, and a test holds that.
"""
