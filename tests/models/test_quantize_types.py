"""The types of tensors when a model is quantised are llama.cpp's; bad types, patterns and shapes are refused."""
import functools
import json
import pathlib
import re
import types

import pytest
from helpers.quantize_goldens import MODELS, digest, metadata, tensors

import ggjit as gg
from ggjit.models.files.gguf import TensorInfo
from ggjit.models.files.mixtures import (
    FILE_TYPES,
    QuantizeParams,
    choose_types,
    file_type,
    needs_importances,
    tensor_type,
)
from ggjit.ops.core.types import BY_NAME, F32

GOLDENS = json.loads((pathlib.Path(__file__).parent / "quantize_goldens.json").read_text())


@functools.cache
def described(name):
    """(what choose_types needs of a file, its TensorInfos)"""
    keys = metadata(name)
    arch = keys["general.architecture"]
    file = types.SimpleNamespace(path=name, arch=arch, arch_get=lambda key, default=None, kind=None: keys.get(
        f"{arch}.{key}", default))
    return file, [TensorInfo(n, F32, ne, 0, 0) for n, ne in tensors(name).items()]


def chosen(name, mixture, has_importances=False, **choice):
    file, infos = described(name)
    return {n: t.name for n, t in choose_types(file, infos, mixture, QuantizeParams(**choice), has_importances).items()}


@pytest.mark.parametrize("name", MODELS)
def test_types_are_llamacpps(name):
    for mixture in FILE_TYPES:
        for with_importances in (False, True):
            golden = GOLDENS[f"{name}/{mixture}{'+imatrix' if with_importances else ''}"]
            try:
                got = chosen(name, mixture, with_importances)
                refused = not with_importances and any(needs_importances(n, BY_NAME[t], mixture)
                                                       for n, t in got.items() if t != "f32")
            except gg.ParamError:
                refused = True
            assert ("refused" if refused else digest(got)) == golden, (mixture, with_importances)


def test_options_come_before_the_mixture():
    got = chosen("plain", "Q4_K_M", tensor_types=((re.compile(r"blk\.1\.ffn"), BY_NAME["q8_0"]),
                                                  (re.compile("ffn_down"), BY_NAME["q5_K"])),
                 output=BY_NAME["f16"], embedding=BY_NAME["q2_K"])
    assert (got["blk.1.ffn_down.weight"], got["blk.2.ffn_down.weight"], got["output.weight"],
            got["token_embd.weight"]) == ("q8_0", "q5_K", "f16", "q2_K")
    assert set(chosen("plain", "Q4_K_M", pure=True).values()) == {"f32", "q4_K"}
    assert chosen("plain", "Q4_K_M", leave_output=True)["output.weight"] == "f32"
    assert chosen("rows of 288", "Q4_0", embedding=BY_NAME["q6_K"])["token_embd.weight"] == "q6_K"


def test_names_of_types():
    assert file_type("q4_k")[0] == "Q4_K_M" and file_type("Q8_0") == ("Q8_0", 7, gg.Q8_0)
    assert tensor_type("q4_k") is gg.Q4_K and tensor_type(gg.F16) is gg.F16
    with pytest.raises(gg.ParamError, match=r"no type 'Q4_K_N' of a file \(did you mean Q4_K_\w\?\)"):
        file_type("Q4_K_N")
    with pytest.raises(gg.ParamError, match=r"no tensor type 'q6_kk' \(did you mean q6_k\?\)"):
        tensor_type("q6_kk")


def test_rows_that_no_block_divides():
    with pytest.raises(gg.ParamError, match=r"rows of 200: tensor 'blk.0.ffn_down.weight': rows of 200 are not "):
        chosen("rows of 200", "Q1_0")
    assert chosen("rows of 200", "Q8_0")["blk.0.ffn_down.weight"] == "f16"
    assert chosen("rows of 200", "Q4_K_S")["blk.0.ffn_down.weight"] == "f16"
