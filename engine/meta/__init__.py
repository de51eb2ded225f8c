"""One device made of several: every tensor is cut between them (tensor parallelism; ggml's meta backend).

    split       how a tensor is cut, and what follows for the results of each op
    device      MetaDevice: memory of slices, a graph on each device, sums and gathered results between them
"""
