"""What the files of CUDA kernels share.

    views       how a kernel reads its node;  sums: reductions over a block;  unrolled: bodies without a loop
    launch      what a maker returns: grid, block, scratch memory
    walk        one kernel that does all launches of a plan

Read `launch`, `views`, then `compiler/contract` for the functions kernels call.
"""
