"""Writing IQ1, IQ2 and IQ3: ggml's bytes, neighbour tables, errors that stay in bounds."""
import hashlib

import numpy as np
import pytest
from helpers import oracle

import ggjit as gg
from ggjit.ops.core.errors import NotSupported, ParamError, ShapeError
from ggjit.ops.core.traits import traits_of
from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native import isa
from ggjit.ops.types.quantize import _run, _writer

# published bits per weight
BITS = {"IQ1_S": 1.5625, "IQ1_M": 1.75, "IQ2_XXS": 2.0625, "IQ2_XS": 2.3125, "IQ2_S": 2.5625, "IQ3_XXS": 3.0625,
        "IQ3_S": 3.4375}
WEIGHTED_ONLY = ("IQ1_S", "IQ2_XXS", "IQ2_XS")
CASES = [(name, weighted) for name in BITS for weighted in (True, False) if weighted or name not in WEIGHTED_ONLY]
# SHA-256 of the bytes the real ggml (xllamacpp) writes for samples(), importances(); its own tables take it seconds
GGML = {
    "IQ1_S True": "f4c552a8f6055ec0", "IQ1_M True": "58ede35f27703237", "IQ1_M False": "e681439fc36b9d47",
    "IQ2_XXS True": "fec8f18442da6597", "IQ2_XS True": "d882e8f165d5b65b", "IQ2_S True": "7e0485ab4587944d",
    "IQ2_S False": "9598277c6fad9f40", "IQ3_XXS True": "1978ee1aacb6ec58", "IQ3_XXS False": "a8c963100179f9da",
    "IQ3_S True": "aad08df6f02ea372", "IQ3_S False": "f9405e80d1acd5d1"}


def uniform(shape, seed):
    """-1 ... 1, the same bits everywhere: the upper bits of a linear congruence."""
    n = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed * 1_000_003)
    n = n * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    n ^= n >> np.uint64(29)
    n *= np.uint64(0xBF58476D1CE4E5B9)
    return ((n >> np.uint64(40)).astype(np.float64) / 2 ** 23 - 1).reshape(shape)


def samples():
    """Rows of many kinds: about normal, heavy-tailed, of one sign, equal, zeros, tiny, large, mostly zeros."""
    u = [uniform((24, 512), seed) for seed in range(4)]
    x = u[0] + u[1] + u[2] + u[3]
    x[4:8] /= u[0][4:8] * u[1][4:8] + 1e-3
    x[8], x[9], x[10], x[11], x[12] = abs(x[8]), -abs(x[9]), 0.75, -2, 0
    x[13] *= 1e-20
    x[14] *= 1e-9
    x[15] *= 1e-6
    x[16] *= 1e4
    x[17] *= 1e8
    x[18] = np.round(2 * x[18])
    x[19] *= abs(u[0][19]) < 0.5
    x[20, 5], x[20, 300] = 1000, -1000
    return x.astype(np.float32)


def importances():
    w = abs(uniform(512, 9)) + 0.01
    w[::7] = 0
    w[40:44] *= 1e6
    w[100:140] *= 1e-20
    return w.astype(np.float32)


def digest(raw):
    return hashlib.sha256(raw.tobytes()).hexdigest()[:16]


def digests():
    return {f"{name} {weighted}": digest(gg.quantize(name, samples(), importances() if weighted else None))
            for name, weighted in CASES}


def weights_for(name, k):
    return np.ones(k, np.float32) if name in WEIGHTED_ONLY else None


@pytest.mark.parametrize("name, weighted", CASES)
def test_bytes_are_those_recorded_from_ggml(name, weighted):
    assert digest(gg.quantize(name, samples(), importances() if weighted else None)) == GGML[f"{name} {weighted}"]


@pytest.mark.parametrize("name", ("IQ3_XXS", pytest.param("IQ3_S", marks=pytest.mark.slow)) + tuple(
    pytest.param(name, marks=pytest.mark.slow) for name in BITS if not name.startswith("IQ3")))
def test_bytes_are_ggmls(name):
    """The recorded digests are ggml's, and so are the bytes of rows drawn fresh, with importances of all sizes."""
    ggml, rng = oracle.connect("xllamacpp"), np.random.default_rng()
    x = rng.standard_normal((32, 512)) * np.exp(rng.uniform(0, 3, (32, 1)) * rng.standard_normal((32, 512)))
    for weighted in (True, False)[:1 if name in WEIGHTED_ONLY else 2]:
        want = ggml.quantize(name, samples(), importances() if weighted else None)
        assert digest(want) == GGML[f"{name} {weighted}"]
        for spread in (0.1, 5) if weighted else (0,):
            w = np.exp(spread * rng.standard_normal(512)).astype(np.float32) if weighted else None
            np.testing.assert_array_equal(gg.quantize(name, x, w), ggml.quantize(name, x.astype(np.float32), w))


def test_runs_of_zeros_do_not_move_their_neighbours():
    """ggml writes what follows 32 zeros of IQ3_S to the place of the zeros; here every run stays at its own."""
    x = uniform((8, 512), 3).astype(np.float32)
    x.reshape(8, -1, 32)[:, ::3] = 0
    got = gg.dequantize("IQ3_S", gg.quantize("IQ3_S", x), x.shape)
    want = gg.dequantize("IQ3_S", oracle.connect("xllamacpp").quantize("IQ3_S", x), x.shape)
    size = np.square(x).sum()
    assert np.square(got - x).sum() < 0.03 * size and np.square(want - x).sum() > size


@pytest.mark.slow
@pytest.mark.parametrize("name", isa.NAMES[isa.NAMES.index(isa.ISA) + 1:])
def test_bytes_on_other_instruction_sets(name, on_isa):
    done = on_isa(name, "import test_types_iq as t; print(t.isa.ISA, t.digests() == t.GGML)")
    assert done.stdout.split() == [name, "True"], done.stdout + done.stderr


# ---------------------------------------------------------------- without an oracle
@pytest.mark.parametrize("name", ("iq2_xxs", "iq2_s", "iq3_s", "iq1_m"))
def test_neighbours_are_the_points_at_the_smallest_distances(name):
    grid = traits_of(BY_NAME[name]).quantize_grid.grid
    index = grid.table[:grid.lists_offs].view(np.int32)
    lists = grid.table[grid.lists_offs:].view(np.uint16)
    np.testing.assert_array_equal(index[grid.words], np.arange(grid.n))
    digits = np.arange(grid.size) * grid.bits
    off = np.flatnonzero(index < 0)
    assert len(off) == grid.n_levels ** grid.size - grid.n
    for word in np.random.default_rng().choice(off, 100):
        code = word >> digits & (1 << grid.bits) - 1
        distance = np.square(grid.codes.T.astype(int) - code).sum(1)
        order = np.argsort(distance, kind="stable")
        want = grid.words[order[distance[order] <= np.unique(distance)[grid.n_distances - 1]]]
        entry = -1 - int(index[word])
        got = lists[16 * (entry >> 8):][:16 * (entry & 255)]
        np.testing.assert_array_equal(got[:len(want)], want)
        assert len(got) - len(want) < 16 and (got[len(want):] == want[-1]).all()


@pytest.mark.parametrize("name", BITS)
def test_error_is_near_what_the_bits_allow(name):
    """Normal values at b bits cannot be stored with NMSE below 4^-b; each type stays within 4.2 times that."""
    type = getattr(gg, name)
    assert type.nbytes * 8 / type.block == BITS[name]
    x = np.random.default_rng().standard_normal((16, 1024)).astype(np.float32)
    once = gg.dequantize(type, gg.quantize(type, x, weights_for(name, 1024)), x.shape)
    nmse = np.square(once - x).sum() / np.square(x).sum()
    assert 4 ** -BITS[name] < nmse < 4.2 * 4 ** -BITS[name]


@pytest.mark.parametrize("name", BITS)
def test_importances_choose_what_is_kept(name):
    x = np.random.default_rng().standard_normal((16, 512)).astype(np.float32)
    w = np.where(np.arange(512) % 4, 0.01, 1).astype(np.float32)
    plain, chosen = (gg.dequantize(name, gg.quantize(name, x, v), x.shape) for v in (1 + 0 * w, w))
    assert np.square(chosen - x)[:, ::4].sum() < 0.9 * np.square(plain - x)[:, ::4].sum()


def test_zeros_and_row_counts():
    for name in BITS:
        w = weights_for(name, 256)
        zeros = gg.quantize(name, np.zeros((3, 256)), w)
        assert not gg.dequantize(name, zeros, (3, 256)).any()
        assert gg.quantize(name, np.zeros((0, 256)), w).shape == (0, getattr(gg, name).nbytes)
        x = uniform((3, 2, 512), 5)
        w = weights_for(name, 512)
        np.testing.assert_array_equal(gg.quantize(name, x, w)[1, 1], gg.quantize(name, x[1, 1], w))


@pytest.mark.parametrize("name", BITS)
def test_errors_name_the_thing(name):
    w = np.ones(256, np.float32)
    if name in WEIGHTED_ONLY:
        with pytest.raises(NotSupported, match=f"{name}.*imatrix"):
            gg.quantize(name, np.ones(256))
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((2, 256))
        x[1, 7] = bad
        with pytest.raises(ParamError, match=r"finite.*\(1, 7\)"):
            gg.quantize(name, x, w)
    for bad in (np.nan, np.inf, -1):
        weights = w.copy()
        weights[9] = bad
        with pytest.raises(ParamError, match=r"imatrix\[9\]"):
            gg.quantize(name, np.ones(256), weights)
    with pytest.raises(ShapeError, match="multiple"):
        gg.quantize(name, np.ones(255), np.ones(255))
    with pytest.raises(ShapeError, match="imatrix"):
        gg.quantize(name, np.ones(512), w)
    assert gg.quantize(name, np.ones(256), w).any()


@pytest.mark.parametrize("name", BITS)
def test_no_value_leads_out_of_bounds(name):
    """The jitted code itself, past the checks: any bits as values and importances; sentinels around the output."""
    type, rng = getattr(gg, name), np.random.default_rng()
    table = traits_of(type).quantize_grid.grid.table

    def run(x, out, weights):
        _run(_writer(type, False), "quantize", type, 4, 256, x, out, weights, table)
    for _ in range(20):
        x = rng.integers(0, 1 << 32, (4, 256), dtype=np.uint32).view(np.float32)
        w = rng.integers(0, 1 << 32, 256, dtype=np.uint32).view(np.float32)
        x[1], x[2, ::3], w[::5], w[1::5] = np.nan, np.inf, np.nan, -1
        out = np.full(4 * type.nbytes + 128, 0xA5, np.uint8)
        run(x, out[64:-64], w)
        assert (out[:64] == 0xA5).all() and (out[-64:] == 0xA5).all()
        run(x, out[64:-64], 0)
        gg.dequantize(type, out[64:-64], (4, 256))          # every code it left is one that can be read


def test_tensors_take_these_types_and_copies_do_not():
    """As ggml: files are written by ggml_quantize_chunk; the CPU backend has no from_float for copies and set_rows."""
    x = uniform((2, 256), 6).astype(np.float32)
    ctx, backend = gg.Context(), gg.init_backend("CPU")
    t, rows = ctx.new_tensor(gg.IQ3_S, (256, 2)), gg.from_numpy(ctx, x)
    table = gg.from_numpy(ctx, x, type=gg.IQ2_S)
    gg.alloc_ctx_tensors(ctx, backend)
    t.set(x)
    np.testing.assert_array_equal(t.numpy(), gg.dequantize("IQ3_S", gg.quantize("IQ3_S", x), x.shape))
    np.testing.assert_array_equal(table.numpy(), gg.dequantize("IQ2_S", gg.quantize("IQ2_S", x), x.shape))
    with pytest.raises(gg.GgjitError, match="IQ3_S"):
        gg.compute(gg.cpy(rows, t), backend=backend)
    with pytest.raises(NotSupported, match="IQ1_S.*imatrix"):
        gg.from_numpy(ctx, x, type=gg.IQ1_S)
