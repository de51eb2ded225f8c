"""One device made of several: every tensor is cut between them (tensor parallelism; ggml's meta backend).

    split       what of a leaf or of a result each device has
    parts       memory: slices of a tensor on every device
    run         a graph on each device, sums and gathered results between them
    device      MetaDevice and its backend
"""
