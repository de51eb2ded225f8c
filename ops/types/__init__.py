"""Tensor types.  A file per type or family of types; it ends with `TRAITS = (Traits(...), ...)` (ops/core/traits.py).

Read `scalars`, then `q8_0` and `q4_0` (blocks of 32), `q4_1`, `iq4_nl`, `fp4` (other plain blocks), `q4_K`, `q2_K`,
`q6_K`, `q8_K` (super-blocks of 256), `ternary` and `iq` (codes that name points of a grid).  `shared` holds the parts
they are made of; `quantize` converts whole arrays, `validate` looks for NaN and infinities in their bytes.  `own` are
the types of users, which `own_trial` tries first.
"""
