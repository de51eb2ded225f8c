"""One device made of several: every tensor is cut between them (tensor parallelism; ggml's meta backend).

    split       what of a leaf or of a result each device has
    device      MetaDevice: memory of slices, a graph on each device, sums and gathered results between them
"""
