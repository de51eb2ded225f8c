"""Orders of execution that need less memory, and recomputation of results to save memory.

    memory_order       legal orders, and beam search for one with few live bytes
    exact_order        the best one, proved by search; order_bound: what any order needs
    order_variants     others with as few live bytes
    schedules          nodes that run again: bytes alive at each event
    recompute          the cheapest schedule within a number of bytes (recompute_plans finds them, recompute_bound
                       proves what they cost at least)

Read in this order.
"""
