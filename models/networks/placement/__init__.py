"""The placement of a network's weights and caches on devices.

    offload             layers on a GPU, the rest on the CPU
    device_map          layers over several devices
    tensor_split        every weight and cache cut between devices
    layout              weights that are repacked for faster products
"""
