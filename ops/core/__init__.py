"""The definition of an op, before any code runs: records, types, shape rules, errors, and how files of ops are found.

Read `record` (what kernels see), `types` and `traits`, then `spec` (all that is known of one op) and `fusion_pattern`
(runs of ops that one kernel computes). `shape`, `whole_numbers`, `errors`, `typed_errors` and `builders` serve the
builders of ops, `row_axes` says which rows of its sources a row of a result needs, `split` how what is cut between
devices goes through an op, `discovery` finds the files that declare something. Of the process: `requirements` (what
ggjit runs on), `settings` (what the environment asks), `machine` (processor, cores, memory), `host_memory` (arrays, or
a typed error), `address_space` (addresses that get memory as they are used), `weak` (weak references), `interrupts`
(Ctrl-C), `locks` (which survive a fork), `progress` (how far long work is). `printable` makes text safe for a terminal,
`json_text` reads JSON from outside,
`whole_file` writes files whole or not at all, `user_warnings` points at the user's line, `call_hints` serves calls as
NumPy and PyTorch have them.
"""
