"""Planners of offsets: they place buffers with lifetimes and sizes as low as the time allows.  They know no graphs.

    sections    live bytes, maximal live sets, the bound
    greedy      first fit in fixed orders, and the free canonical descent
    search      canonical search: complete; crowded: the moments near the bound first
    tiling      search for problems whose sections are full
    repair      local search; draws: its random choices, and tiling's
    planners    `plan_offsets`: these by turns
    chunked     the same where buffers have a largest size

Read in this order.
"""
