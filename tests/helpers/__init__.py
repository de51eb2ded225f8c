"""What several tests need; no test module imports another one.

    paths, requirements, processes, timing              folders, reference data, Python and `ggjit` processes, clocks
    cases                                               an op's test case between sentinel bytes, against float64
    sample                                              which cases of a long sweep run, by the seed of the run
    devices, placed                                     devices that look like accelerators; tensors with memory
    schedulers, streams, sched_graphs                   schedulers on such devices, and graphs for them
    tiny_model, tiny_moe                                small GGUF files
    oracle, alloc_oracle, sched_oracle, tokenizer_oracle    the real ggml and llama.cpp
"""
