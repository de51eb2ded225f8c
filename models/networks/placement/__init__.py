"""Where the weights and caches of a network lie.

    offload             layers on a GPU, the rest on the CPU
    device_map          layers over several devices
    tensor_split        every weight and cache cut between devices
    layout              weights that are repacked for faster products
"""
