"""Every architecture against llama.cpp on the same small file; what is refused; what a call leaves behind."""

import numpy as np
import pytest
from helpers import arch_files, devices, tiny_model
from helpers.llamacpp import computed, loads
from helpers.requirements import shared
from helpers.sample import sampled

import ggjit as gg
from ggjit.models import load_gguf, load_model, save_gguf
from ggjit.models.blocks import feed_forward
from ggjit.models.blocks.hparams import HParams
from ggjit.models.families import experts
from ggjit.models.families.registry import DECODERS, DIFFUSERS, DRAFTERS, ENCODERS
from ggjit.models.networks.load import ARCHITECTURES
from ggjit.models.networks.texts.encoder import relative_buckets

FAMILIES = DECODERS | ENCODERS | DIFFUSERS
KINDS = {"layer_norm": "layer norm", "encoders": "encoder", "deepseek": "experts", "experts": "experts",
         "windowed_experts": "experts", "recurrent": "recurrent", "hybrid": "recurrent"}


def kind(name):
    """What is drawn from: the file of the architecture's description, some of them together."""
    arch = max((a for a in FAMILIES if name.startswith(a)), key=len, default="encoders")
    return KINDS.get(FAMILIES[arch].__module__.rpartition(".")[2] if arch in FAMILIES else arch, "rms norm")


# llama.cpp has no network for gptj, and chameleon-after's feed-forward reads attention's result there, not the sum
NAMES = sorted({*FAMILIES, *arch_files.VARIANTS} - {"gptj", "chameleon-after"})


@pytest.fixture
def written(tmp_path, need):
    """written(name): path of the file, llama.cpp's results."""
    def run(name):
        need("xllamacpp", "llama.cpp is the oracle")
        results = computed("arch_files", name, tmp_path, "results.npz")
        return tmp_path / "model.gguf", results
    return run


def gelu_of_ggml(x):
    """ggml's CPU code reads GELU from a table of F16 values at F16 places."""
    return gg.cast(gg.gelu(gg.cast(x, gg.F16)), gg.F32)


@pytest.fixture
def table(monkeypatch):
    """Networks compute GELU as ggml's CPU code does; whole(x): gate and up in one tensor."""
    def whole(x):
        n = x.ne[0] // 2
        gate, up = (gg.view_3d(x, n, *x.ne[1:3], *x.nb[1:3], j * n * x.nb[0]) for j in range(2))
        return gg.mul(gelu_of_ggml(gg.cont(gate)), up)
    monkeypatch.setitem(feed_forward.PLAIN, "gelu", gelu_of_ggml)
    monkeypatch.setitem(feed_forward.GATED, "geglu", (lambda a, b: gg.mul(gelu_of_ggml(a), b), whole))


def allowed(want, of_largest):
    """How far a result may be from llama.cpp's."""
    return max(4 * abs(want["whole"] - want["again"]).max(), of_largest * abs(want["whole"]).max())


@pytest.mark.peer
@pytest.mark.parametrize("name", sampled([(n,) for n in NAMES], lambda case: [kind(case[0])]))
def test_against_llamacpp(name, written, table):
    """As close as 4 times what llama.cpp differs from itself, 3e-4 of the largest number at least."""
    path, want = written(name)
    ids = want["ids"].tolist()
    with load_model(path, n_threads=1, reserve=False) as m:
        arch_files.prepared(m)
        hidden = m.hidden(ids)
        assert hidden.shape == (len(ids), m.n_embd) and np.isfinite(hidden).all()
        # BERT's own GELU is the exact one
        of_largest = 1e-3 if name in {"bert", *arch_files.FLASH} else 3e-4      # llama.cpp's flash attention rounds
        bound = allowed(want, of_largest)
        if m.file.arch in DIFFUSERS:
            assert abs(m.logits(ids) - want["whole"]).max() <= bound
            return
        if not m.CAUSAL:
            # with matrices behind the pooling, llama.cpp's hidden states have passed them
            assert abs(hidden - want["whole"]).max() <= bound or m.projections
            got, unit = m.embed_ids(ids), want["pooled"] / np.linalg.norm(want["pooled"])
            assert abs(np.linalg.norm(got) - 1) < 1e-5
            assert abs(got - unit).max() <= (3e-3 if name == "bert" else 1e-3) * abs(unit).max()
            return
    options = {"kv_type": "F32", "flash": name in arch_files.FLASH}
    with load_model(path, n_threads=1, n_ctx=max(64, len(ids)), n_batch=16, reserve=False, **options) as m:
        arch_files.prepared(m)
        whole = m.logits(ids)                           # in batches of 16, 16 and 8
        m.reset()
        single = np.stack([m.decode([i]) for i in ids])
    first, end = m.description.no_text              # of which llama.cpp hides the first row only
    assert (whole[:, first:end] == np.finfo(np.float32).min).all()
    whole, single, theirs, again = (np.delete(x, slice(first, end), 1) for x in (
        whole, single, want["whole"], want["again"]))
    bound = allowed({"whole": theirs, "again": again}, of_largest)
    assert abs(whole - theirs).max() <= bound
    assert abs(single - whole).max() <= bound


@pytest.mark.parametrize("name", ["lfm2"])
def test_an_interrupted_call_leaves_states_as_they_were(name, tmp_path, monkeypatch):
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", n_threads=1, n_ctx=64, n_batch=4, reserve=False) as m:
        m.decode([1, 2, 3])
        want = m.decode([4, 5, 6, 7, 8, 9, 10, 11, 12])
        m.reset()
        m.decode([1, 2, 3])
        whole, calls = m._fed_batch, []

        def fails(*args):
            calls.append(args)
            if len(calls) == 3:
                raise KeyboardInterrupt("here")
            return whole(*args)
        monkeypatch.setattr(m, "_fed_batch", fails)
        with pytest.raises(KeyboardInterrupt, match="here"):
            m.decode([40, 41, 42, 43, 44, 45, 46, 47, 48])
        monkeypatch.undo()
        np.testing.assert_array_equal(m.decode([4, 5, 6, 7, 8, 9, 10, 11, 12]), want)


@pytest.mark.parametrize("name", ["lfm2", "gemma4", "gemma3n"])
def test_layers_that_know_of_others_on_a_gpu(name, tmp_path):
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    results = []
    for options in ({}, {"backend": devices.Fake("A").init_backend(), "n_gpu_layers": 2}):
        with load_model(tmp_path / "m.gguf", n_threads=1, n_ctx=64, **options) as m:
            results.append([m.logits([1, 2, 3, 4]), m.decode([5]), m.hidden([1, 2])])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_hidden_states_give_the_logits(tmp_path):
    path, ids = tiny_model.write(tmp_path / "m.gguf"), [1, 2, 3, 4, 5]
    with load_model(path, n_threads=1, n_batch=2) as m:
        embd = load_gguf(path)[0]["token_embd.weight"].numpy()
        np.testing.assert_allclose(m.hidden(ids) @ embd.T, m.logits(ids), atol=1e-4)
        assert m.n_past == 5
        with pytest.raises(gg.IndexRangeError, match="token id 48"):
            m.hidden([48])


def test_unknown_architectures_are_told_the_known_ones(tmp_path):
    with pytest.raises(gg.ModelError, match="'gpt5' is not supported; supported: bert, .*llama.*deepseek2"):
        load_model(tiny_model.write(tmp_path / "m.gguf", arch="gpt5"))
    with pytest.raises(gg.ModelError, match="'qwen4exp' is not supported: llama.cpp's graph .* is no reference"):
        load_model(tiny_model.write(tmp_path / "m.gguf", arch="qwen4exp"))
    assert len(ARCHITECTURES) >= 30 and set(FAMILIES | DRAFTERS) | {"whisper", "moonshine"} == set(ARCHITECTURES)


@pytest.mark.parametrize(("arch", "metadata", "words"), [
    ("qwen3", {}, "attn_q_norm.weight' is missing"), ("gemma2", {}, "post_attention_norm.weight' is missing"),
    ("gemma", {"attention.sliding_window": 16}, "gemma.attention.sliding_window = 16"),
    ("granite", {"logit_scale": -2.0}, "granite.logit_scale = -2.0"), ("phi3", {}, "ffn_up.weight' has shape"),
    ("mamba", {}, "mamba.ssm.inner_size' is missing"),
    ("olmo2", {"attention.sliding_window": -1 % 2**32}, "window = 4"),
    ("deepseek2", {"attention.key_length": 16}, "attention.value_length' is missing"),
    ("gpt-oss", {}, "expert_feed_forward_length' is missing"), ("falcon", {}, "layer_norm_epsilon' is missing"),
    ("lfm2", {"shortconv.l_cache": 3}, "has shape|is missing"),
    ("smollm3", {"rope.dimension_count": 7}, "rope.dimension_count 7")])
def test_what_does_not_fit_is_refused(arch, metadata, words, tmp_path):
    with pytest.raises((gg.ModelError, gg.BadFile), match=words):
        load_model(tiny_model.write(tmp_path / "m.gguf", arch=arch, metadata=metadata))


@pytest.mark.parametrize("key,value", [("rope.freq_base_swa", 10.0), ("attention.temperature_scale", 0.3)])
def test_settings_of_other_architectures_are_refused(key, value, tmp_path):
    tensors, metadata = load_gguf(tiny_model.write(tmp_path / "m.gguf"))
    save_gguf(tmp_path / "n.gguf", tensors, {**metadata, f"llama.{key}": value})
    with pytest.raises(gg.ModelError, match=f"does not use llama.{key}"):
        load_model(tmp_path / "n.gguf")


@pytest.mark.parametrize(("name", "key", "value", "words"), [
    ("gemma4", "attention.shared_kv_layers", 6, "shared_kv_layers = 6, expected 0 to 5"),
    ("gemma4", "attention.shared_kv_layers", 3, "expected a window at layer 2, not at 3"),
    ("gemma4", "attention.head_count_kv", [2, 2, 1, 2, 1, 2, 2], "expected at layer 6 that of layer 4"),
    ("gemma3n", "altup.num_inputs", 5, "only 4 is served"), ("llama4", "attention.sliding_window", 99, "only 8192"),
    ("deci", "feed_forward_length", [96, 0, 128, 64, 0, 96], "at layer 1, which has attention"),
    ("deepseek2-ocr", "rope.freq_base", 5e5, "expected 10000"),
    ("exaone-moe", "attention.sliding_window", 0, "a positive number"),
    ("hunyuan_vl", "rope.dimension_sections", [4, 4, 4, 3], "four parts of 16 pairs"),
    ("nomic-bert-moe", "moe_every_n_layers", 1, "at least 2"), ("eurobert", "pooling_type", 4, "no head that ranks"),
    ("gemma-embedding-dense", "dense_2_feat_in", 65, "only 64 is served"),
    ("grok", "rope.scaling.yarn_beta_fast", -1.0, "a number above 0"),
    ("grovemoe", "experts_per_group", 3, "a divisor of the 8 experts"),
    ("nemotron_h_moe", "expert_group_count", 8, "leaves two or more to a group"),
    ("t5", "attention.relative_buckets_count", 1, "expected 2 to 255"),
    ("t5encoder", "attention.relative_buckets_count", 512, "expected 2 to 255"),
    ("laguna", "attention.head_count", 0, "head_count = .0.*a positive number for every layer"),
    ("openelm", "attention.head_count_kv", [4, 4, 0, 4], "head_count_kv = .4, 4, 0, 4., expected a positive number"),
    ("t5", "decoder_block_count", 2**31 - 1, "expected at most 65536"),
    ("rwkv6", "rescale_every_n_layers", -1, "a number at least 0"),
    ("kimi-k3", "kda.gate_lower_bound", 3.0, "a number below 0, or 0 for none"),
    ("kimi-k3", "activation.situ_linear_beta", float("nan"), "a number above"),
    ("deepseek32", "rope.scaling.yarn_log_multiplier", float("inf"), "a number above 1e-06"),
    ("gemma3n", "activation_sparsity_scale", [1.0, float("nan"), 1.0], "expected a number, or 3 of them")])
def test_what_makes_no_network_is_refused(name, key, value, words, tmp_path):
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    tensors, metadata = load_gguf(tmp_path / "m.gguf")
    arch = metadata["general.architecture"]
    save_gguf(tmp_path / "n.gguf", tensors, {**metadata, f"{arch}.{key}": value})
    with pytest.raises(gg.ModelError, match=words):
        load_model(tmp_path / "n.gguf", reserve=False)


class Stated:
    """A file of nothing but metadata."""
    path, arch, tensors = "m.gguf", "any", {}

    def __init__(self, **keys):
        self.keys = {"block_count": 4, "context_length": 64} | {k.replace("__", "."): v for k, v in keys.items()}

    def arch_get(self, key, default, kind=None):
        value = self.keys.get(key, default)
        if value is ...:
            raise gg.ModelError(f"'{self.arch}.{key}' is missing")
        return value


def test_what_a_file_leaves_out_is_what_llamacpp_takes():
    def scale(**keys):
        return HParams(Stated(**keys)).rope(0, 8).freq_scale
    assert scale(rope__scaling__factor=4.0) == scale(rope__scaling__factor=4.0, rope__scaling__type="linear") == 0.25
    assert scale() == scale(rope__scaling__factor=4.0, rope__scaling__type="none") == 1.0
    assert HParams(Stated()).windows(2, default=4096) == [4096, 0, 4096, 0]
    for keys in ({}, {"attention__sliding_window": 0}):
        with pytest.raises(gg.ModelError, match="attention.sliding_window"):
            HParams(Stated(**keys)).windows(2, default=...)


def test_a_token_sees_its_chunk(tmp_path, monkeypatch):
    """Where all layers have chunks and RoPE, a chunk is what it is alone."""
    monkeypatch.setattr(experts, "CHUNK", 16)
    arch_files.write(shared("tools"), "llama4", tmp_path / "m.gguf", layers=3)
    ids = np.random.default_rng(3).integers(0, 96, 40).tolist()
    for options in ({"n_batch": 7}, {"n_batch": 64}, {"n_batch": 16, "n_ctx": 41, "flash": False}):
        with load_model(tmp_path / "m.gguf", n_threads=1, **{"n_ctx": 64, "kv_type": "F32", **options}) as m:
            want = np.concatenate([m.logits(ids[at:at + 16]) for at in (0, 16, 32)])
            np.testing.assert_allclose(m.logits(ids), want, atol=1e-4)
            m.reset()
            single = np.stack([m.decode([i]) for i in ids])
            np.testing.assert_allclose(single, want, atol=1e-4)
            seen = m.cells.mask(16, 40) == 0
    assert (seen == [[j <= i and i // 16 == j // 16 for j in range(40)] for i in range(40)]).all()


def test_relative_buckets():
    """T5: near distances have buckets of their own, far ones share them, keys after the query have the upper half."""
    buckets = relative_buckets(np.array([0, 1, -1, -7, -8, -11, -12, 127, 128, 1000]), 32).tolist()
    assert buckets == [0, 17, 1, 7, 8, 8, 9, 31, 31, 31]


# llama.cpp's verdict on the same files, of one tensor missing and of all: it loads them, as each is optional by itself,
# and computes with what is there.  No converter writes such a model, so a missing one is a damaged file here.
LLAMACPP_LOADS = {("qwen2", "blk.0.attn_k.bias"): True, ("stablelm", "blk.0.attn_k.bias"): True,
                  ("glm4", "blk.0.attn_v.bias"): True, ("qwen2moe", "blk.0.attn_q.bias"): True,
                  ("phi3", "rope_factors_short.weight"): True, ("phi3", "rope_factors_long.weight"): True}


@pytest.mark.peer
@pytest.mark.parametrize(("name", "lost"), LLAMACPP_LOADS)
def test_llamacpps_verdict_on_tensors_that_are_missing(name, lost, tmp_path, need):
    need("xllamacpp", "llama.cpp is the oracle")
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    tensors, metadata = load_gguf(tmp_path / "m.gguf")
    save_gguf(tmp_path / "one.gguf", {n: t for n, t in tensors.items() if n != lost}, metadata)
    assert loads(tmp_path / "one.gguf") == LLAMACPP_LOADS[name, lost]


@pytest.mark.parametrize(("name", "lost"), [
    ("qwen2", "blk.0.attn_k.bias"), ("qwen2moe", "blk.0.attn_q.bias"), ("glm4", "blk.0.attn_v.bias"),
    ("stablelm", "blk.0.attn_k.bias"), ("phi3", "rope_factors_short.weight"), ("phi3", "rope_factors_long.weight")])
def test_one_of_tensors_that_belong_together_is_not_enough(name, lost, tmp_path):
    """Biases of queries, keys and values, factors of both context sizes: all or none."""
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    tensors, metadata = load_gguf(tmp_path / "m.gguf")
    kind = (".attn_q.bias", ".attn_k.bias", ".attn_v.bias") if "bias" in lost else ("rope_factors_",)
    assert lost in tensors
    save_gguf(tmp_path / "one.gguf", {n: t for n, t in tensors.items() if n != lost}, metadata)
    with pytest.raises(gg.ModelError, match=f"tensor '{lost}' is missing"):
        load_model(tmp_path / "one.gguf", n_ctx=16)
    none = {n: t for n, t in tensors.items() if not any(k in n for k in kind)}
    save_gguf(tmp_path / "none.gguf", none, metadata)
    with load_model(tmp_path / "none.gguf", n_ctx=16) as m:
        assert np.isfinite(m.logits([1, 2, 3])).all()
