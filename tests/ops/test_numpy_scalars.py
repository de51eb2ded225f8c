"""NumPy's scalars as arguments of builders count as Python's numbers: narrow ones would wrap around."""
import numpy as np
import pytest

import ggjit as gg
from ggjit.ops.core.types import F32, I32

A = {"matrix": (F32, (200, 200)), "images": (F32, (9, 9, 300)), "heads": (F32, (256, 4, 3)), "ids": (I32, (3,)),
     "taps": (F32, (3, 3, 3, 600)), "volume": (F32, (9, 9, 9, 400)), "ids4": (I32, (12,))}
CALLS = {
    "pool_1d": lambda t, n: gg.pool_1d(t("matrix"), 1, n(150), n(1), n(70)),
    "pool_2d": lambda t, n: gg.pool_2d(t("matrix"), 1, n(200), n(200), 1, 1, n(150), n(150)),
    "group_norm": lambda t, n: gg.group_norm(t("images"), n(200), 1e-5),
    "rope": lambda t, n: gg.rope(t("heads"), t("ids"), n(200), 0),
    "rope_multi": lambda t, n: gg.rope_multi(t("heads"), t("ids4"), None, n(200), [n(80), n(60), n(60), n(40)], 8, 0,
                                             1e4, 1.0, 0.0, 1.0, 32.0, 1.0),
    "conv_3d": lambda t, n: gg.conv_3d(t("taps"), t("volume"), n(200), 1, 1, 1, 0, 0, 0, 1, 1, 1),
    "view_2d": lambda t, n: gg.view_2d(t("matrix"), n(50), n(200), n(240), n(200)),
}


@pytest.mark.parametrize("call", CALLS)
def test_narrow_integers_do_not_wrap(call):
    ctx = gg.Context()

    def tensor(name):
        return ctx.new_tensor(*A[name])
    want, got = CALLS[call](tensor, int), CALLS[call](tensor, np.uint8)
    assert got.ne == want.ne and got.nb == want.nb and list(got.op_params) == list(want.op_params)


def test_numpy_floats_and_bools():
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (8, 8))
    for want, got in ((gg.scale(a, 0.5), gg.scale(a, np.float16(0.5))), (gg.argsort(a, 1), gg.argsort(a, np.int8(1))),
                      (gg.glu(a, 2, True), gg.glu(a, np.uint8(2), np.True_))):
        assert list(got.op_params) == list(want.op_params) and got.ne == want.ne


def test_an_array_stays_what_it_is():
    """from_numpy and quantize take arrays, also those of no dimension, in their own type."""
    assert gg.from_numpy(gg.Context(), np.float32(3)).type is gg.F32


@pytest.mark.parametrize("call", [lambda a: gg.abs(gg.Tensor), lambda a: gg.add(a, gg.Tensor),
                                  lambda a: gg.view_4d(a, gg.Tensor, 1, 1, 1, 4, 4, 4, 0)])
def test_the_class_instead_of_a_tensor_is_named(call):
    with pytest.raises(gg.GgjitError, match="Tensor"):
        call(gg.Context().new_tensor(gg.F32, (9,)))
