"""The functions that every compiler must provide, by name: parameters -> result.

Types: a address, an int64 in bytes; i int32 (int64 where numbers of threads are meant); l int64; f float32; b bool;
fN, iN: a tuple of N.  Loads and stores take addresses at multiples of their own size, vectors at multiples of 16.
"""
import re

MEMORY = """
    ld_f32(a) -> f      st_f32(a, f)        float32                     in global memory: tensors
    ld_f16(a) -> f      st_f16(a, f)        float16, nearest even
    ld_bf16(a) -> f     st_bf16(a, f)       bfloat16, nearest even, NaN made quiet
    ld_i64(a) -> l      st_i64(a, l)
    ld_i32(a) -> i      st_i32(a, i)
    ld_i16(a) -> i      st_i16(a, i)        sign kept; the low bits are stored
    ld_i8(a) -> i       st_i8(a, i)
    ld_u16(a) -> i                          zeros above
    ld_u8(a) -> i
    ld_i32_2(a) -> i                        four bytes at a multiple of two
    ld_i32x4(a) -> i4   ld_f32x4(a) -> f4   16 bytes at once
    st_i64_any(a, l)                        several threads may write: the value of one of them stays
    ldc_i64(a) -> l     ldc_i32(a) -> i     ldc_f32(a) -> f             what no kernel writes while this one runs
    lds_f32(a) -> f     sts_f32(a, f)       in shared memory
    lds_i32(a) -> i     sts_i32(a, i)
    lds_i64(a) -> l     sts_i64(a, l)
    lds_f16(a) -> f     lds_u16(a) -> i
    lds_u8(a) -> i      lds_i8(a) -> i
    lds_i32_2(a) -> i                       at a multiple of two
    lds_i32x4(a) -> i4  sts_i32x4(a, i4)
    copy_16(a, a, l)                        16 bytes to shared from global memory while the thread goes on; zeros behind
                                            the first so many
    copies_end()                            the copies since the last end are a group; see copies_but
    ldmatrix_t(a) -> i4                     of the warp: four matrices of 8 x 8 halves, transposed (PTX ISA: .trans)
"""
THREADS = """
    thread() -> l       n_threads() -> l    number in the block, threads of the block
    block() -> l        n_blocks() -> l     the same of blocks, in x
    block_y() -> l      block_z() -> l
    sync()                                  all threads of the block are here, what they wrote is seen by all
    shfl(f, i) -> f                         the value of a lane of the warp; also of int32
    shfl_xor(f, i) -> f                     of lane `this ^ i`
    ballot(b) -> l                          bit i: lane i's
    warp_sum(f) -> f    warp_max(f) -> f    over the warp, in every lane; lane i with i ^ 16, i ^ 8, ... i ^ 1
"""
BITS = """
    f32_bits(f) -> i    bits_f32(i) -> f
    low_f16(i) -> f     high_f16(i) -> f    halves of a word
    low_bf16(i) -> f    high_bf16(i) -> f
    round_f16(f) -> f                       to half precision and back
    pack_f16(f, f) -> i                     low half, high half
    pack_bf16(f, f) -> i
    to_i32(f) -> i                          toward zero, saturating, NaN gives 0
    permute(i, i, i) -> i                   byte k: byte `c >> 4 k & 7` of the eight of a and b
    popcount(l) -> l
"""
ARITHMETIC = """
    dp4a(i, i, i) -> i                      c + four products of signed bytes
    fma_f16(i, i, i) -> i                   a b + c of two float16 each
    mma_f16(i, i, i, i, i, i, f, f, f, f) -> f4         a, b, c of m16n8k16 as the PTX ISA lays out their fragments
    mma_bf16(i, i, i, i, i, i, f, f, f, f) -> f4
    mma_i8(i, i, i) -> i4                   m16n8k16 of signed bytes, sums from 0
    exp(f) -> f         expm1(f) -> f       log(f) -> f         log1p(f) -> f       sqrt(f) -> f
    sin(f) -> f         cos(f) -> f         tanh(f) -> f        erf(f) -> f         erfc(f) -> f
    power(f, f) -> f    fabs(f) -> f        floor(f) -> f       ceil(f) -> f        trunc(f) -> f
    round_away(f) -> f                      halves away from 0
    fmin(f, f) -> f     fmax(f, f) -> f     the number where the other is NaN
"""
# of walkers (ops/cuda/native/walk.py); numba-cuda-mlir has none of them
WALKING = """
    team() -> l                             in a body: number of this thread's team in the block
    enter(l, l, l, l, l, a, l)              the team acts as block (x, y, z) of n in x from here on; shared memory of a
                                            team in bytes, the row, number of the block
    entered_row() -> a  entered_block() -> l            the last two
    whole_block() -> l  whole_blocks() -> l             number of the block that the team is part of, and of how many
    arrive(a)                               this block has done its part; the address of a counter
    await_all(a, l)                         so many arrivals since the launch began
    leave(a, l)                             the last of so many arrivals clears the counter
    prefetch(a)                             a line of 128 bytes into the second-level cache
"""
# of warpgroups (warpgroups.py), for compute capability 9.0; numba-cuda-mlir has none of them
WARPGROUPS = """
    fence_shared()                          what this thread wrote to shared memory is seen by products of warpgroups
                                            behind the next barrier
"""
# outside kernels, while one is made: device(f) a function that kernels call, shared(nbytes) -> a function that gives
# the address of that much shared memory, a multiple of 16, or of `aligned`, which numba-cuda-mlir has not;
# table(int32 array) -> a function of an index that gives its values; copies_but(n) -> a function that waits until all
# groups of this thread's copies but the last n are in shared memory; inside, local.array(n, type name) is memory of one
# thread, n known when compiled.  Of warpgroups wgmma(n, bf16) -> a function that multiplies (warpgroups.py)
MAKERS = "device shared table copies_but local".split()
WARPGROUP_MAKERS = "wgmma",


def functions(texts=(MEMORY, THREADS, BITS, ARITHMETIC)):
    """{name: (number of parameters, result or None)}"""
    found = {}
    for text in texts:
        for name, parameters, _, result in re.findall(r"(\w+)\(([^)]*)\)( -> (\w+))?", text):
            found[name] = len(parameters.split(",")) if parameters else 0, result or None
    return found
