"""Optimisers: their settings, the state that a parameter needs, and the node that makes a step."""
import dataclasses
import numbers
from collections.abc import Callable

import numpy as np

from ggjit.ops.core.errors import ParamError
from ggjit.ops.training.opt_step import opt_step_adamw, opt_step_sgd

MAX_F32 = float(np.finfo(np.float32).max)


def rate(lr, step):
    """The learning rate of a step, counted from 1: a number, or what the schedule `lr(step)` returns."""
    value = lr(step) if callable(lr) else lr
    if not _in(value, MAX_F32):
        raise ParamError(f"the learning rate of step {step} must be a number, not negative and finite in float32, got "
                         f"{value!r}")
    return float(value)


def _in(value, end):
    """Is it a number in [0, end)?"""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= value < end


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with weight decay apart from the gradient; two moments a parameter.

        gg.train.AdamW(lr=lambda step: 1e-3 * min(1, step / 100))

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  w = w (1 - lr wd) - lr m' / (sqrt(v') + eps), with m'
    and v' the moments over 1 - beta^step.  lr: a number or a schedule, called with the step from 1.
    Source: ggml_opt_step_adamw; arXiv 1711.05101.
    """
    lr: float | Callable = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    n_settings, n_states = 7, 2

    def __post_init__(self):
        if not (_in(self.beta1, 1) and _in(self.beta2, 1) and _in(self.eps, MAX_F32)
                and _in(self.weight_decay, MAX_F32)):
            raise ParamError(f"{self}: betas are in [0, 1), eps and weight_decay are finite and not negative")

    def settings(self, step):
        """The seven numbers of opt_step_adamw for step 1, 2, ..."""
        return np.array([rate(self.lr, step), self.beta1, self.beta2, self.eps, self.weight_decay,
                         1 / (1 - self.beta1 ** step), 1 / (1 - self.beta2 ** step)], np.float32)

    def step(self, w, g, states, settings):
        """The node that changes w."""
        return opt_step_adamw(w, g, *states, settings)


@dataclasses.dataclass(frozen=True)
class SGD:
    """Gradient descent with weight decay: w = w (1 - lr wd) - lr g.  lr: a number or a schedule, as in AdamW.

        gg.train.SGD(lr=0.1)

    Source: ggml_opt_step_sgd.
    """
    lr: float | Callable = 1e-2
    weight_decay: float = 0.0

    n_settings, n_states = 2, 0

    def __post_init__(self):
        if not _in(self.weight_decay, MAX_F32):
            raise ParamError(f"{self}: weight_decay is finite and not negative")

    def settings(self, step):
        """The two numbers of opt_step_sgd."""
        return np.array([rate(self.lr, step), self.weight_decay], np.float32)

    def step(self, w, g, states, settings):
        """The node that changes w."""
        return opt_step_sgd(w, g, settings)
