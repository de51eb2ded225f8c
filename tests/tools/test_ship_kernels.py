"""`python -m ggjit.tools.ship_kernels`: which kernels a wheel carries, and for which levels they can be made."""
import pytest

from ggjit.ops.core.types import BY_NAME
from ggjit.ops.matmul.repack.layouts import LAYOUTS
from ggjit.tools import ship_kernels


def test_common_models_are_in(tmp_path, monkeypatch):
    few = {"WEIGHTS": ("Q4_0",), "COMMON": ("Q4_0",), "HEADS": (64,), "MANY": (1, 64), "TYPES": ()}
    for name, values in few.items():
        monkeypatch.setattr(ship_kernels, name, values)
    names = {name for name, _, _ in ship_kernels.kernels_of_models(tmp_path)}
    assert {"rope-0-f32", "rows-add-rms_norm-mul", "get_rows-q4_0-f32", "set_rows-f32-f16-i64"} <= names
    for begin in ("mul_mat-dot-q4_0", "flash_attn-decode4", "flash_attn-prefill"):
        assert any(name.startswith(begin) for name in names), begin
    assert any("repacked-q4_0" in name for name in names) == (BY_NAME["q4_0"] in LAYOUTS)


def test_attention_is_in_for_every_group_of_heads():
    names = {name for name, _, _ in ship_kernels.kernels_of_attention()}
    assert {f"flash_attn-decode{n}-f32-f16-f16-{d}-{d}" for n in range(1, 9) for d in (64, 128)} <= names


def test_a_level_that_the_processor_lacks_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        ship_kernels.main(["avx1024"])
    assert "avx1024: this processor makes" in capsys.readouterr().err
