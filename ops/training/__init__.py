"""Gradients of other ops, the loss and the optimiser steps.

Read `gradients` (silu, rms_norm, softmax), then `cross_entropy` and `opt_step`; `get_rows_back` and `repeat_back` add
up what their forward ops spread out.
"""
