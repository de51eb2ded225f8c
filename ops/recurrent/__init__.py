"""Ops with a state that runs along the tokens.

    state_rows                      one step of a linear recurrence on a row of state
    ssm_scan, gated_delta_net, wkv  recurrences on it: Mamba, delta rule, RWKV and gated linear attention
    ssm_conv                        the short convolution before a state-space layer
    dsv4_hc                         hyper-connections of DeepSeek V4

Read `state_rows`, `ssm_scan`.
"""
