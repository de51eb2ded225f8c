"""The interface between ggjit and the compilers of CUDA kernels; nothing outside this folder imports a compiler.

A kernel is a Python function of one int64, the address of its node's row; it calls functions of `core` alone.
An implementation provides

    functions   all of `contract`, as one module that `core` takes them from: what kernels are written in
    binary      binary(launch, cc) -> Binary: the machine code for a compute capability, kept in the cache folder
    refusals    NotSupported for a compute capability that its toolkit cannot serve, before anything is written

and promises that threads of a block run whole warps in one dimension, that shared memory belongs to the function that
asks for it, that equal sources give equal results, and that nothing of it needs a GPU or a driver.

    contract    the functions by name: parameters, results, meaning
    choice      which implementation serves this process
    core        its functions
    intrinsics, teams           numba-cuda's; of walkers (ops/cuda/native/walk.py)
    warpgroups                  numba-cuda's for compute capability 9.0
    mlir                        numba-cuda-mlir's
    alike                       what both spell alike
    frontend, build             function -> LTO-IR, by either of them -> cubin
    simulated, simulated_teams, simulated_warpgroups, simulator
                                no compiler: functions in Python, threads as greenlets, memory and races checked
    requests                    of the simulator: sectors and banks that warps ask memory for

tests/helpers/cuda_conformance.py holds all to the contract.  Streams, memory, launches and captures of CUDA graphs are
the driver's (engine/cuda/driver.py), and the same whatever compiles.
"""
