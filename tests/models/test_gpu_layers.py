"""n_gpu_layers: a model's last layers on a GPU, the rest on the CPU.  The GPUs here are test devices that compute with
the CPU's kernels in memory of their own, so every logit has to be equal to the last bit; the simulated CUDA device has
its test in cuda_graphs.py."""
import re

import numpy as np
import pytest
from helpers import arch_files, devices, tiny_model
from helpers.requirements import shared
from helpers.tiny_moe import write as write_moe

import ggjit as gg
from ggjit.models import load_model
from ggjit.ops.core.record import OP

IDS, MORE = [3, 17, 40, 31, 5], [[31], [8, 9]]
LAYERS = tiny_model.LAYERS
ALL = LAYERS + 1                # with the output matrix


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny.gguf", shapes=OUTPUT)


OUTPUT = {"output.weight": (tiny_model.VOCAB, tiny_model.DIM)}


def run(path, **options):
    """Logits of a text and of two continuations."""
    with load_model(path, n_threads=1, **options) as m:
        return [m.logits(IDS), *(m.decode(ids, all_logits=True) for ids in MORE)]


def same(path, device, **options):
    """The model split over `device` gives what the CPU alone gives."""
    plain = {k: v for k, v in options.items() if k not in ("n_gpu_layers", "cpu_moe", "override_tensor")}
    got, want = run(path, backend=device.init_backend(), **options), run(path, **plain)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    devices.check_guards(device)
    return device


def on_gpu(m):
    """Names of the weights that do not lie in host memory."""
    return {name for name, t in m.weights._leaves.items() if not t.buffer.buft.is_host()}


@pytest.mark.parametrize("n", [0, 1, LAYERS, ALL, 99, -1])
def test_every_split_gives_the_cpus_logits(path, n):
    assert same(path, devices.Fake("A"), n_gpu_layers=n).used == 0          # all of it was given back


@pytest.mark.parametrize("n,patterns,there", [
    (-1, {"ffn_(up|down)": "CPU"}, lambda name: not re.search("ffn_(up|down)|token_embd", name)),
    (0, {r"blk\.1\.attn": "A"}, lambda name: name.startswith("blk.1.attn")),
    (0, {r"attn_q": "CPU", r"attn_": "A"}, lambda name: "attn_" in name and "attn_q" not in name)],
    ids=["back", "there", "the first that fits"])
def test_patterns_place_tensors_before_all_other_rules(path, n, patterns, there):
    gpu = same(path, devices.Fake("A"), n_gpu_layers=n, override_tensor=patterns)
    with load_model(path, backend=gpu.init_backend(), n_gpu_layers=n, override_tensor=patterns) as m:
        assert on_gpu(m) == {name for name in m.weights._leaves if there(name)} != set()


def test_patterns_that_place_nothing(path):
    gpu = devices.Fake("A").init_backend()
    with pytest.warns(UserWarning, match="'expz' is in no tensor's name and has no effect; `ggjit info FILE`"):
        load_model(path, backend=gpu, n_gpu_layers=1, override_tensor={"expz": "CPU"}).free()
    for options, words in (({"n_gpu_layers": 1, "override_tensor": {"ffn": "B"}}, "no device 'B'.*there are CPU, A"),
                           ({"n_gpu_layers": 1, "override_tensor": {"[": "CPU"}}, "is not a pattern of names"),
                           ({"n_gpu_layers": 1, "override_tensor": ["ffn=CPU"]}, "takes {pattern: device}, got list")):
        with pytest.raises(gg.GgjitError, match=words):
            load_model(path, backend=gpu, **options)
    with pytest.raises(gg.ParamError, match=r"say with n_gpu_layers \(-ngl\) how many"):
        load_model(path, override_tensor={"ffn": "A"})
    with pytest.raises(gg.ParamError, match="is not a pattern of names"):
        load_model(path, override_tensor={"[": "CPU"})
    with load_model(path) as plain, load_model(path, override_tensor={"ffn": "CPU"}) as m:
        assert m.memory().terms["weights"] == plain.memory().terms["weights"], "all lies on the CPU anyway"


@pytest.mark.parametrize("options", [{"delay": 1e-4}, {"ops": {OP.MUL_MAT, OP.ADD, OP.SET_ROWS}}, {"max_size": 1 << 15},
                                     {"offload": lambda t: t.op == OP.MUL_MAT}], ids=lambda o: " ".join(o))
def test_devices_that_are_slow_picky_or_eager(path, options):
    """An asynchronous one, one with few ops, one with small buffers, one that wants the CPU's products too."""
    same(path, devices.Fake("A", **options), n_gpu_layers=1)


@pytest.fixture
def quantized(tmp_path):
    """Q8_0, with heads of 32."""
    return tiny_model.write(tmp_path / "m.gguf", type="Q8_0", metadata={"attention.head_count": 2},
                            shapes={f"blk.{i}.attn_{n}.weight": (tiny_model.DIM, tiny_model.DIM)
                                    for i in range(LAYERS) for n in "kv"})


@pytest.mark.parametrize("options", [dict(flash=False), dict(kv_type="Q8_0", n_ctx=32)], ids=str)
def test_with_other_options(quantized, options):
    same(quantized, devices.Fake("A"), n_gpu_layers=1, **options)


def test_only_the_cpus_layers_are_repacked(quantized):
    """Repacked products add up in another order, so the GPU's layers differ from the CPU's in the last bits."""
    gpu = devices.Fake("A").init_backend()
    for a, b in zip(run(quantized, backend=gpu, n_gpu_layers=1, repack=True), run(quantized), strict=True):
        assert np.square(a - b, dtype=np.float64).sum() <= 1e-10 * np.square(b, dtype=np.float64).sum()
    with load_model(quantized, backend=gpu, n_gpu_layers=1, repack=True) as m:
        assert [w["attn_q"][0].buffer.buft.name for w in m.layers] == ["CPU_REPACK", "A"]


@pytest.mark.parametrize("n,layers,output", [(0, (), False), (1, (1,), False), (LAYERS, (0, 1), False),
                                             (ALL, (0, 1), True), (-1, (0, 1), True)])
def test_weights_and_cache_of_a_layer_lie_together(path, n, layers, output):
    with load_model(path, backend=devices.Fake("A").init_backend(), n_gpu_layers=n) as m:
        found = on_gpu(m)
        want = {name for name in m.weights._leaves if any(name.startswith(f"blk.{i}.") for i in layers)}
        assert found == want | ({"output.weight", "output_norm.weight"} if output else set())
        assert [not k.buffer.buft.is_host() for k, _ in m.cache] == [i in layers for i in range(LAYERS)]
        assert [k.buffer is v.buffer for k, v in m.cache] == [True] * LAYERS


def test_a_tied_output_matrix_is_copied(tmp_path):
    tied = tiny_model.write(tmp_path / "tied.gguf")
    same(tied, devices.Fake("A"), n_gpu_layers=ALL)
    with load_model(tied, backend=devices.Fake("A").init_backend(), n_gpu_layers=ALL) as m:
        assert m.embd.buffer.buft.is_host() and not m.out.buffer.buft.is_host()
        assert m.out.bytes() == m.embd.bytes()


def test_explain_tells_who_computes_what(path):
    with load_model(path, backend=devices.Fake("A").init_backend(), n_gpu_layers=1) as m:
        m.logits(IDS)
        rows = m.scheduler.explain().rows
        products = {r["name"]: r["backend"] for r in rows if r["op"] == "MUL_MAT"}
        assert {name: b for name, b in products.items() if re.search(r"-1$", name)} == dict.fromkeys(
            [f"{n}-1" for n in ("Qcur", "Kcur", "Vcur", "attn_out", "ffn_gate", "ffn_up", "ffn_out")], "A")
        assert {b for name, b in products.items() if not name.endswith("-1")} == {"CPU"}
        assert len(m.scheduler.splits) == 3             # the CPU's layer, the GPU's, the output
        assert "A" in str(m.scheduler.explain()) and "A, CPU" in repr(m)
        assert m.compute_nbytes == sum(m.scheduler.buffer_size(b) for b in m.scheduler.backends) > 0
    with load_model(path) as m:
        assert m.scheduler is None


def test_plans_of_all_shapes_share_the_reserved_memory(path):
    device = devices.Fake("A")
    with load_model(path, backend=device.init_backend(), n_threads=1, n_gpu_layers=-1) as m:
        held = device.used, m.compute_nbytes
        for n in (5, 1, 3):
            m.logits(IDS[:n])
        m.decode(MORE[0])
        assert len(m._steps) == 3 and (device.used, m.compute_nbytes) == held


def test_experts_stay_on_the_host_when_asked(tmp_path):
    model = write_moe(tmp_path / "moe.gguf")
    same(model, devices.Fake("A"), n_gpu_layers=-1, cpu_moe=True)
    same(model, devices.Fake("A", offload=lambda t: t.op == OP.MUL_MAT_ID), n_gpu_layers=1, cpu_moe=True)
    for cpu_moe in (False, True):
        with load_model(model, backend=devices.Fake("A").init_backend(), n_gpu_layers=1, cpu_moe=cpu_moe) as m:
            found = on_gpu(m)
            assert ("blk.1.ffn_up_exps.weight" in found) != cpu_moe
            assert {"blk.1.ffn_gate_inp.weight", "blk.1.attn_q.weight"} <= found
            assert not any(name.startswith("blk.0.") for name in found)


def test_layers_of_an_encoder_and_of_a_decoder(tmp_path):
    arch_files.write(shared("tools"), "t5", tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", backend=devices.Fake("A").init_backend(), n_gpu_layers=-1) as m:
        assert {"enc.blk.0.attn_q.weight", "dec.blk.0.attn_q.weight", "dec.blk.1.cross_attn_k.weight"} <= on_gpu(m)


def test_threads_are_the_cpus(path):
    cpu = gg.init_backend("CPU:n_threads=1")
    for backend in (devices.Fake("A").init_backend(), "CPU", cpu):
        with load_model(path, backend=backend, n_threads=2, n_gpu_layers=0) as m:
            assert m.backend.n_threads == 2 and m.backend.device.name == "CPU"
            assert (m.scheduler is None) == (backend in ("CPU", cpu))


@pytest.mark.parametrize("n", [-2, 1.5, "3", True, None.__class__], ids=str)
def test_bad_numbers_of_layers(path, n):
    with pytest.raises(gg.ParamError, match="n_gpu_layers must be an integer from -1"):
        load_model(path, n_gpu_layers=n)


def test_experts_without_gpu_layers(path):
    with pytest.raises(gg.ParamError, match="n_gpu_layers"):
        load_model(path, cpu_moe=True)


def test_without_a_gpu_the_remedy_is_named(path):
    if gg.registry.by_type("gpu") or gg.registry.by_type("igpu"):
        pytest.skip("this machine has a GPU")
    for options in (dict(n_gpu_layers=1), dict(backend="CUDA0", n_gpu_layers=1), dict(backend="CUDA0")):
        with pytest.raises(gg.ParamError, match=r"CUDA0.*pip install 'ggjit\[gpu\]'"):
            load_model(path, **options)
    with load_model(path, n_gpu_layers=0) as m:
        assert m.scheduler is None


def test_layers_that_do_not_fit(path):
    device = devices.Fake("A", memory=1 << 16)
    with pytest.raises(gg.OutOfMemory, match="A"):
        load_model(path, backend=device.init_backend(), n_gpu_layers=-1)
    assert device.used == 0
    with load_model(path, n_threads=1) as m:
        assert np.isfinite(m.logits(IDS)).all()


def test_command_line(path, tmp_path, capsys):
    from ggjit.tools.command.main import main
    if not gg.registry.by_type("gpu"):
        assert main(["bench", str(path), "-p", "4", "-n", "0", "-r", "1", "-ngl", "1"]) == 2
        assert "pip install 'ggjit[gpu]'" in capsys.readouterr().err
    assert main(["bench", str(path), "-p", "4", "-n", "0", "-r", "1", "--n-gpu-layers", "0"]) == 0
    assert "pp4" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="^2$"):
        main(["bench", str(path), "-ngl", "-3"])
    assert "-1 for all" in capsys.readouterr().err
