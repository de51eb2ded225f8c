"""A campaign: random cases of eight kinds, each tried in a child process, until one crashes, hangs or is wrong.

    runner.py       children, seeds, the table of outcomes; `python -m campaign.runner` from tests/
    files.py        GGUF files and kernel cache files, changed at random
    calls.py        builders and computes between guard pages
    sharing.py      threads on one graph, allocator, scheduler
    memory.py       the k-th request for memory is refused; a soak
    processes.py    Ctrl-C, fork and exit at random moments

A kind is a function case(rng): it returns, or raises a typed error, for a case that went well; everything else is a
find.  Case k of a kind is the same in every run: its generator is seeded with k.
"""
