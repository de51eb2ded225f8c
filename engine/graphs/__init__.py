"""Graphs: which tensors are computed, in which order, where their results lie, and plans that compute them.

    graph, visit                        the graph; which tensors are in it, in ggml's order
    together                            products of one column next to each other
    layers, pickling, copying           layers found by names; graphs as bytes; on another backend
    requests, allocator                 graphs as numbers for the planners; memory for the results
    placed                              tensors and graphs as a scheduler's backends see them
    tensor_allocators                   tensors placed one at a time; a graph as ggml placed it in 2023
    graph_plan, plan_node, results      base of all plans; their kernels, by kind; what a run left in memory
    node_kinds                          nodes that get the same kernel
    plan_tensors, plan_places           the tensors of a plan as numbers; where they lie
    plan_cache                          plans kept for the next run
    backward                            gradients: nodes for what a loss changes by
"""
