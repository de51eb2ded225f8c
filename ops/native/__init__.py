"""Python functions as machine code: the compiler and its cache, vectors, memory, threads.

Read `jit` (compiled code by address, kept on disk) and `compiler`; then what kernels are written in: `mem` (loads and
stores), `simd` (vectors), `lanes` (lanes of several vectors), `neon` (products on ARM), `amx` (tiles), `mathfun` (exp,
log, tanh); then `node` (what a kernel knows of its tensors and threads), `row_loops` (the loop of nearly every kernel),
`row_affinity` (which thread takes which rows), `waiting` (how threads wait on each system), `records` (arguments by
name, at one address), `jobs` (kernels outside plans) and `forks` (processes that fork while others compile).  `isa`
says what the processor has, `measured` keeps what was fastest on it, `cache_files` are the files of both, `kernel_pack`
many kernels in one; `numba_report` shortens what Numba says of a function of a user.
"""
