"""Types of a user: what they compute, and that functions which do wrong are told before anything is registered."""
import copy
import pickle
import re

import numpy as np
import pytest

import ggjit as gg
from ggjit.models import load_model, perplexity, quantize_gguf
from ggjit.models.networks.load import EMBEDDED
from ggjit.ops.core.types import OWN
from ggjit.ops.native.jit import CACHE

BLOCK, NBYTES = 32, 14                  # a float16, then 32 codes of three bits
TEXT = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want
of a wife. However little known the feelings or views of such a man may be on his first entering a
neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered
the rightful property of some one or other of their daughters. """ * 2


def to_float(block, x):
    d = gg.load_half(block, 0)
    for i in range(32):
        bit = 3 * i
        at = 2 + bit // 8
        word = int(block[at]) | int(block[min(at + 1, 13)]) << 8
        x[i] = d * ((word >> bit % 8 & 7) - 4)


def from_float(x, block):
    size, largest = 0.0, 0.0
    for i in range(32):
        if abs(x[i]) > size:
            size, largest = abs(x[i]), x[i]
    d = largest / -4
    gg.store_half(block, 0, d)
    for i in range(2, 14):
        block[i] = 0
    for i in range(32):
        q = min(7, max(0, int(x[i] / d + 4.5))) if d != 0 else 4
        bit = 3 * i
        at = 2 + bit // 8
        word = q << bit % 8
        block[at] |= word & 255
        if word > 255:
            block[at + 1] |= word >> 8


def dot(block, y):
    total = 0.0
    for i in range(32):
        bit = 3 * i
        at = 2 + bit // 8
        word = int(block[at]) | int(block[min(at + 1, 13)]) << 8
        total += ((word >> bit % 8 & 7) - 4) * y[i]
    return total * gg.load_half(block, 0)


def codes(b, p):
    """The same as vectors: 12 bytes are four words of 24 bits, each of eight codes."""
    from llvmlite import ir

    from ggjit.ops.native.lanes import i64
    from ggjit.ops.native.simd import const_ir, load_ir, shuffle_ir, vec_ir
    v = load_ir(b, b.add(p, i64(2)), vec_ir("i8", 12))
    zeros = ir.Constant(v.type, [0] * 12)
    words = b.bitcast(shuffle_ir(b, v, zeros, [x for g in range(4) for x in (3 * g, 3 * g + 1, 3 * g + 2, 12)]),
                      vec_ir("i32", 4))
    spread = shuffle_ir(b, words, words, [i // 8 for i in range(32)])
    bits = b.and_(b.lshr(spread, const_ir("i32", [3 * (i % 8) for i in range(32)])), const_ir("i32", [7] * 32))
    return [b.trunc(bits, vec_ir("i8", 32))]


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    for type in list(OWN.values()):
        gg.remove_type(type)


WAYS = {"unpacked": {}, "dot": {"dot": dot}, "lanes": {"lanes": gg.Lanes(codes, zero_point=4, max_code=7)}}


def define(name="three", **more):
    return gg.define_type(name, BLOCK, NBYTES, to_float, from_float, **more)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_compute_with_it(way):
    q = define(**WAYS[way])
    rng = np.random.default_rng(0)
    a = rng.standard_normal((70, 320)).astype(np.float32)
    raw = gg.quantize("THREE", a)
    assert raw.shape == (70, 10 * NBYTES) and repr(q) == "THREE" and q.is_own
    values, one = gg.dequantize(q, raw, a.shape), np.empty(32, np.float32)
    to_float(raw[3, :NBYTES], one)
    np.testing.assert_allclose(values[3, :32], one, rtol=1e-6)
    assert 0.1 < np.std(values - a) < 0.3
    w = gg.tensor(a, type="three")
    np.testing.assert_array_equal(w.numpy(), values)
    for n in (1, 5, 40):                                                # columns: dots and tiles
        x = rng.standard_normal((n, 320)).astype(np.float32)
        got = gg.compute(gg.mul_mat(w, gg.tensor(x)))
        want = x @ values.T
        assert ((got - want) ** 2).sum() < (5e-4 if way == "lanes" else 1e-10) * (want ** 2).sum(), n
    if way == "unpacked":
        np.testing.assert_array_equal(gg.compute(gg.cast(w, "F32")), values)
        np.testing.assert_array_equal(gg.compute(gg.cast(gg.tensor(a), "three")), values)
        ids = gg.tensor(np.array([4, 69, 4], np.int32))
        np.testing.assert_array_equal(gg.compute(gg.get_rows(w, ids)), values[[4, 69, 4]])


def test_a_model_of_it_and_no_file():
    q = define(dot=dot)
    with load_model(n_ctx=128) as m, m.quantize(q, keep="token_embd") as small:
        plain, coarse = (perplexity(n, TEXT, n_ctx=64, n_chunks=2, progress=False)["perplexity"] for n in (m, small))
        assert plain < coarse < 30 * plain
        assert small.weights["blk.0.ffn_up.weight"].type is q and m.weights["blk.0.ffn_up.weight"].type is not q
        assert small.weights["token_embd.weight"].type is m.weights["token_embd.weight"].type
        with pytest.raises(gg.ParamError, match="needs no importances"):
            m.quantize("IQ1_S")
        for keep in (b"attn", 5, None, ["attn", re.compile(b"ffn")]):
            with pytest.raises(gg.TypeMismatch, match="keep is a regular expression, or a list of them"):
                m.quantize("Q8_0", keep=keep)
        with pytest.raises(gg.ParamError, match="no matrix would become"):
            m.quantize("Q8_0", keep=re.compile("weight"))
    with pytest.raises(gg.ParamError, match="which no file holds; m.quantize"):
        quantize_gguf(EMBEDDED, "never.gguf", "Q8_0", tensor_types={"ffn_up": q}, requantize=True)
    assert not [k for k in CACHE.addresses if "three" in k[0] and not any("own type" in m for m in k[1])]


def test_removed_and_defined_again():
    q = define()
    w = gg.tensor(np.ones((2, 32)), type=q)
    assert copy.deepcopy(q) is q and pickle.loads(pickle.dumps(q)) is q
    again = define()                                                    # a cell that runs twice
    assert again is not q and again.id != q.id and list(OWN.values()) == [again]
    with pytest.raises(gg.NotSupported, match="THREE was removed, or defined again"):
        w.numpy()
    gg.remove_type("three")
    for call in (lambda: gg.quantize("three", np.ones(32)), lambda: gg.cast(w, "three")):
        with pytest.raises(gg.TypeMismatch, match="three"):
            call()
    with pytest.raises(gg.ParamError, match="not a type that this process defined; these are: none"):
        gg.remove_type(again)
    with pytest.raises(gg.NotSupported, match="define it here with gg.define_type"):
        pickle.loads(pickle.dumps(again))


def half_written(x, block):
    from_float(x, block)
    block[13] = block[13]


def unwritten(x, block):
    gg.store_half(block, 0, 1.0)
    for i in range(2, 13):
        block[i] = 0


def past(block, x):
    for i in range(33):
        x[i] = block[i % 14]


def source_written(block, x):
    to_float(block, x)
    block[0] = 7


def small_bytes(block, x):
    d = gg.load_half(block, 0)
    for i in range(32):
        x[i] = d * (((block[2 + i // 3] << 8) >> 8) - 4)


def other(block, x):
    for i in range(32):
        x[i] = (i * 7919) % 13 - 6


def raises(block, x):
    if block[0] == 3:
        raise ValueError("three")
    to_float(block, x)


def text(block, x):
    for i in range(32):
        x[i] = float(str(block[2]))


@pytest.mark.parametrize("bad,error,match", [
    ({"from_float": unwritten}, gg.GgjitError, r"from_float leaves 1 of 14 bytes unwritten, .* first at 13"),
    ({"to_float": past}, gg.GgjitError, r"to_float raised IndexError: .*test_own_types.py, line \d+: x\[i\] = block"),
    ({"to_float": source_written}, gg.GgjitError, "to_float writes into its first argument"),
    ({"to_float": other}, gg.ParamError, "does to_float read what from_float writes"),
    ({"to_float": raises}, gg.ParamError, "to_float raises or asserts"),
    ({"to_float": lambda block: 0}, gg.TypeMismatch, r"def to_float\(block, x\)"),
    ({"to_float": 7}, gg.TypeMismatch, "a Python function, got int"),
    ({"dot": lambda block, y: 1e9}, gg.ParamError, "dot of a block gives"),
    ({"dot": lambda block, y: None}, gg.TypeMismatch, "dot returns a number"),
    ({"name": "Q4_0"}, gg.ParamError, "lower-case"), ({"name": "q4_0"}, gg.ParamError, "a type of ggml"),
    ({"block": 24}, gg.ParamError, "blocks of 24 values in 14 bytes"), ({"nbytes": 0}, gg.ParamError, "in 0 bytes"),
    ({"lanes": codes}, gg.TypeMismatch, "lanes is a gg.Lanes"),
    ({"lanes": gg.Lanes(codes, zero_point=3)}, gg.ParamError, "its lanes, it gives other values")])
def test_functions_that_do_wrong(bad, error, match):
    call = {"name": "bad", "block": BLOCK, "nbytes": NBYTES, "to_float": to_float, "from_float": from_float} | bad
    with pytest.raises(error, match=match):
        gg.define_type(**call)
    assert not OWN
    with pytest.raises(gg.TypeMismatch):
        gg.quantize("bad", np.ones(32))


def test_what_numba_cannot_compile():
    with pytest.raises((gg.TypeMismatch, gg.ParamError), match="does not compile|does to_float read"):
        gg.define_type("bad", BLOCK, NBYTES, text, from_float)


def test_halves_are_float16():
    x = np.array([0, 1, -2.5, 1e-7, 65504, 1e6, np.inf], np.float32)
    for v in x:
        block = np.zeros(4, np.uint8)
        gg.store_half(block, 1, v)
        with np.errstate(over="ignore"):
            assert block[1:3].tobytes() == np.float16(v).tobytes()
        assert gg.load_half(block, 1) == block[1:3].view(np.float16)[0]
