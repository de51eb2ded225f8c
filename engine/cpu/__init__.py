"""The CPU device: a graph becomes a plan of kernels, which the thread pool runs.

Read `device`, then `cpu_plan` (kernels and addresses; base in engine/graphs), `fusion` (several nodes, one kernel) with
`fusion_walk` (what it does for every node), `phases` (where threads meet), `thread_pool` and `walk` (how threads go
through a plan). `ticks` is where profiled runs write the clock, `check` compares a plan with references, `repacked` is
the buffer type of weights in a layout of their own, `tuning` measures how many rows a product takes at once, `sharing`
how much work a node must be to be shared among threads. `thread_choice` takes threads out of a plan while they cost
more than they bring, `team` out of parts of a run.
"""
