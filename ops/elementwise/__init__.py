"""Ops that compute every element on its own.

Read `elementwise` (the one body of d = f(x)), then the tables of functions over it, `unary` and `constants`; `binary`
(two sources, one repeated) and `glu` (gated units); `add_id`, `arange`, `timestep`.  `custom` runs functions of the
caller: `custom_jit` compiles the kernel around an @njit one, `custom_trial` checks first runs, `custom_bounds` makes
bounds-checked copies.
"""
