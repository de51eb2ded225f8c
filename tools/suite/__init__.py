"""The case suite: ggml's own operator tests (test-backend-ops), generated and run against ggjit.

    cases/case.py   a case: op, parameters, a function that builds it, its threshold
    cases/inputs.py what the inputs hold, from a seeded generator
    cases/          the families: the same parameter grids as ggml's list
    runner.py       sentinels, poisoned outputs, our result against the float64 reference and the real ggml
    jobs.py         the same in several processes
    ggml.py         the real ggml by ctypes: the worker process
    oracle.py       its caller
    compare.py      error measures
    report.py       a row per class as it ends, the file a stopped run resumes from
    sample.py       a sample that tells much in little time
    perf.py         time per run beside the real ggml's; flops.py: arithmetic and bytes of a node
    float64.py      whole graphs in float64, and slopes by differences
    grad.py         gradients of the cases against those, and against ggml's
    ggml_cuda.py    what ggml's CUDA backend serves
    command.py      `ggjit ops test | perf | support | grad`
"""
