"""Ops that move elements: views, copies, gathers and scatters, padding, masks.

Read `view` (no kernel at all), then `copy` with its kernels in `copy_kernels`, and `get_rows` and `set_rows` (rows by
number).  `acc` writes into a window; `concat`, `repeat`, `pad`, `win_part` change shapes; `diag_mask` and `triangle`
blank parts out.
"""
