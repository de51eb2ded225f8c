"""Hugging Face folders as GGUF files: transformers' results, tensors to the byte, vocabularies, what cannot be done."""
import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from helpers.hf_folders import (
    ENCODERS,
    FF,
    GOLDENS,
    HEADS,
    IDS,
    NAMES,
    RANKS,
    D,
    config,
    jina_bert,
    renamed_llama,
    rwkv7,
    tensors,
    write,
)
from helpers.paths import TESTS_PATH
from helpers.requirements import shared
from helpers.sample import sampled

import ggjit as gg
from ggjit.models import convert_folder, load_model, save_safetensors
from ggjit.models.convert import convert as convert_module
from ggjit.models.convert.convert import INDEX
from ggjit.models.files.gguf import GGUFFile

RESULTS = json.loads(GOLDENS.read_text())
TEXTS = ["Once upon a time there was a girl named Lily, aged 12345.", "the quick brown fox jumps over the lazy dog"] * 9


def folder(tmp_path, name):
    return write(tmp_path / name, name, save_safetensors)


def convert(source, out, **options):
    """The file, made with float tensors and no vocabulary unless told."""
    convert_folder(source, out, **{"vocabulary": False, "progress": False, **options})
    return GGUFFile(out)


def results(path, encoder, **options):
    options = {"n_threads": 1, "reserve": False} | ({} if encoder else {"kv_type": "F32"}) | options
    with load_model(path, **options) as m:
        if m.pooling.kind == "rank":
            return m.rank_ids(IDS)
        return m.hidden(IDS) if encoder else m.logits(IDS)


def kind(case):
    """What is drawn from: encoders, layers with states, experts, others."""
    about = config(case[0])
    states = {"conv_kernel", "conv_L_cache", "mamba_d_conv", "linear_conv_kernel_dim"} & set(about)
    return ["encoder" if case[0] in ENCODERS else "states" if states else "experts" if {
        "num_experts_per_tok", "num_local_experts"} & set(about) else "dense"]


@pytest.mark.parametrize("name", sampled([(n,) for n in NAMES], kind))
def test_results_are_those_of_transformers(name, tmp_path, need):
    need("gguf", "names of keys and tensors")
    convert(folder(tmp_path, name), tmp_path / "m.gguf", type="F32")
    got = results(tmp_path / "m.gguf", name in ENCODERS | RANKS - {"qwen3_rank"})
    if name == "qwen3_rank":            # the probability of "yes" for a number that says how likely it is
        got = np.log(got[:1] / got[1:])
    np.testing.assert_allclose(got if name in RANKS else got[::3, :6], RESULTS[name][0] if name in RANKS else
                               RESULTS[name], rtol=2e-4, atol=2e-4)


def test_all_families_are_whole(tmp_path, need):
    """Every tensor and key of the new file is one that the network uses, with the shape it expects."""
    need("gguf", "names of keys and tensors")
    for name in NAMES:
        f = convert(folder(tmp_path, name), tmp_path / "m.gguf", type="F32", force=True)
        n = sum(x.size for x in tensors(name).values())
        # layers that only heads of other tasks use
        left_out = {"bert": 2 * D * D + 2 * D, "roberta": D * D + D}.get(name, 0)
        assert sum(t.nbytes // 4 for t in f.tensors.values()) >= n - left_out - D, name
        with load_model(tmp_path / "m.gguf", n_threads=1, reserve=False):
            pass


@pytest.mark.parametrize("name", ["exaone", "internlm2"])
def test_llama_under_other_names(name, tmp_path, need):
    need("gguf", "names of keys and tensors")
    convert(renamed_llama(tmp_path / name, name, save_safetensors), tmp_path / "m.gguf", type="F32")
    got = results(tmp_path / "m.gguf", False)
    np.testing.assert_allclose(got[::3, :6], RESULTS["llama_square"], rtol=2e-4, atol=2e-4)


def test_rwkv7(tmp_path, need):
    need("gguf", "names of keys and tensors")
    source, x = rwkv7(tmp_path / "rwkv7", save_safetensors)
    f = convert(source, tmp_path / "m.gguf", type="F32")

    def numbers(name):
        return np.frombuffer(f.tensor_bytes(name).tobytes(), np.float32)
    layer = "model.layers.1.attn."
    assert numbers("blk.1.time_mix_lerp_fused.weight").tolist() == np.concatenate(
        [x[layer + f"x_{k}"].reshape(-1) for k in "rwkvag"]).tolist()
    assert f.tensors["blk.1.time_mix_lerp_fused.weight"].ne == (D, 1, 1, 6)
    for new, old in (("a1", "a_lora.lora.0.weight"), ("v2", "v_lora.lora.2.weight"), ("w0", "w_lora.lora.2.bias"),
                     ("r_k", "r_k"), ("ln", "g_norm.weight"), ("receptance", "r_proj.weight")):
        assert numbers(f"blk.1.time_mix_{new}.weight").tolist() == x[layer + old].reshape(-1).tolist()
    assert numbers("blk.0.time_mix_v1.weight").tolist() == numbers("blk.0.time_mix_a1.weight").tolist()
    with load_model(tmp_path / "m.gguf", n_threads=1, reserve=False):
        pass


def test_jina_bert(tmp_path, need):
    need("gguf", "names of keys and tensors")
    source, x = jina_bert(tmp_path / "jina", save_safetensors)
    f = convert(source, tmp_path / "m.gguf", type="F32")
    gate, up = np.split(x["encoder.layer.1.mlp.gated_layers.weight"], 2)
    assert f.tensor_bytes("blk.1.ffn_gate.weight").tobytes() == gate.tobytes() and gate.shape == (FF, D)
    assert f.tensor_bytes("blk.1.ffn_up.weight").tobytes() == up.tobytes()
    with load_model(tmp_path / "m.gguf", n_threads=1, reserve=False):
        pass


@pytest.mark.slow
@pytest.mark.peer
def test_llamacpp_reads_them_alike(tmp_path, need):
    """Logits of the converted files, here and in llama.cpp, which reads GELU from a table of F16 values."""
    need("gguf", "names of keys and tensors")
    need("xllamacpp", "llama.cpp is the oracle")
    # there, deepseek_v2 without low rank has 27 layers, and gemma3n has 20 with keys, and embeddings of 256
    made = {n: folder(tmp_path, n) for n in NAMES if n not in ("deepseek_v2", "gemma3n_text", *RANKS)}
    made |= {n: renamed_llama(tmp_path / n, n, save_safetensors) for n in ("exaone", "internlm2")}
    made["rwkv7"], _ = rwkv7(tmp_path / "rwkv7", save_safetensors, d=64, d_head=32)
    made["jina"], _ = jina_bert(tmp_path / "jina", save_safetensors)
    encoders = ENCODERS | {"jina"}
    for name, source in made.items():
        convert(source, tmp_path / f"{name}.gguf", type="F32")
        got = results(tmp_path / f"{name}.gguf", name in encoders, **({} if name in encoders else {"flash": False}))
        np.save(tmp_path / f"{name}.npy", got)
    code = PEER.format(tools=str(shared("tools")), names=list(made), encoders=encoders, ids=IDS)
    env = os.environ | {"PYTHONPATH": TESTS_PATH}
    r = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, timeout=300, env=env)
    assert r.returncode == 0, r.stderr[-2000:]
    nmse = json.loads(r.stdout.splitlines()[-1])
    # gemma4's layers are scaled by small numbers here, so that GELU's table weighs more
    most = {"gemma4_text": 1e-3, "gemma4_moe": 1e-3}
    assert {name: x for name, x in nmse.items() if x > most.get(name, 1e-6)} == {} and len(nmse) == len(made)


PEER = """
import json, sys
sys.path.insert(0, {tools!r})
import numpy as np
from peer_llamacpp import LlamaLib
lib, out = LlamaLib(), {{}}
for name in {names!r}:
    m, want = lib.load(name + ".gguf"), np.load(name + ".npy")
    if name in {encoders!r}:
        c = m.context(n_ctx=64, flash=0, kv=0, embeddings=True, pooling=0)
        c.decode_embed({ids!r})
        got = np.ctypeslib.as_array(c.L.llama_get_embeddings(c.h), want.shape).copy()
    else:
        got = m.context(n_ctx=64, flash=0, kv=0).decode({ids!r}, all_logits=True)
    out[name] = float(((got - want) ** 2).sum() / (want ** 2).sum())
print(json.dumps(out))
"""


def test_tensors_and_keys(tmp_path, need):
    need("gguf", "names of keys and tensors")
    x = tensors("mixtral")
    f = convert(folder(tmp_path, "mixtral"), tmp_path / "Some-model.gguf", type="F16")
    q = x["model.layers.1.self_attn.q_proj.weight"].reshape(HEADS, 2, -1, D).swapaxes(1, 2).reshape(-1, D)
    assert f.tensor_bytes("blk.1.attn_q.weight").tobytes() == q.astype(np.float16).tobytes()
    downs = np.stack([x[f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight"] for i in range(4)])
    assert f.tensor_bytes("blk.0.ffn_down_exps.weight").tobytes() == downs.astype(np.float16).tobytes()
    types = {n: t.type.name for n, t in f.tensors.items()}
    assert types["blk.0.ffn_gate_inp.weight"] == types["output_norm.weight"] == "f32"
    assert types["output.weight"] == "f16"
    keys = list(f.metadata)
    assert keys[:4] == ["general.architecture", "general.type", "general.name", "general.size_label"]
    assert f.get("general.name") == "Mixtral" and f.get("general.file_type") == 1 and f.arch_get("expert_count") == 4
    assert f.get("tokenizer.ggml.model") == "no_vocab" and keys[-2] == "general.quantization_version"


def test_types(tmp_path, need):
    need("gguf", "names of keys and tensors")
    source, x = folder(tmp_path, "qwen3"), tensors("qwen3")["model.layers.0.mlp.up_proj.weight"]
    for kind in ("BF16", "Q8_0"):
        f = convert(source, tmp_path / f"{kind}.gguf", type=kind)
        assert f.tensor_bytes("blk.0.ffn_up.weight").tobytes() == gg.quantize(kind.lower(), x).tobytes()
    assert convert(source, tmp_path / "a.gguf").tensors["blk.0.ffn_up.weight"].type is gg.F16
    # the source's own type of 16 bits, parts in several files
    halves = {n: a for n, a in tensors("qwen3").items()}
    ctx = gg.Context()
    bf16 = {n: ctx.new_tensor("bf16", a.shape[::-1], n) for n, a in halves.items()}
    gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU:n_threads=1"))
    for n, t in bf16.items():
        t.set_bytes(gg.quantize("bf16", halves[n]).reshape(-1))
    (source / "model.safetensors").unlink()
    names = list(bf16)
    for i, part in enumerate((names[:5], names[5:])):
        save_safetensors(source / f"model-{i}.safetensors", {n: bf16[n] for n in part})
    f = convert(source, tmp_path / "b.gguf")
    assert f.tensors["blk.0.ffn_up.weight"].type is gg.BF16 and f.get("general.file_type") == 32
    assert f.tensor_bytes("blk.0.ffn_up.weight").tobytes() == gg.quantize("bf16", x).tobytes()
    index = {"weight_map": dict.fromkeys(names, "model-0.safetensors") | {"model.norm.weight": "model-2.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(gg.BadFile, match="model-2.safetensors: no such file, but .*index.json names it"):
        convert(source, tmp_path / "c.gguf")


@pytest.mark.parametrize(("name", "big"), [("llama", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight"),
                                           ("bloom", "transformer.h.0.self_attention.query_key_value.weight")])
def test_memory_is_that_of_a_piece(name, big, tmp_path, need, monkeypatch):
    """However large a tensor is: rows as they lie, or in the order of a view."""
    need("gguf", "names of keys and tensors")
    monkeypatch.setattr(convert_module, "PIECE", 1 << 14)
    monkeypatch.setattr(convert_module, "loader_rules", lambda path: None)     # one matrix is too large for the others
    source, x = folder(tmp_path, name), tensors(name)
    shape = (1 << 15, D) if "query" not in big else (96, 1 << 13)
    x[big] = np.resize(x[big], shape)
    save_safetensors(source / "model.safetensors", x)
    del x
    tracemalloc.start()
    try:
        f = convert(source, tmp_path / "m.gguf", type="F16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(t.nbytes for t in f.tensors.values()) >= 1 << 20 and peak < 1 << 19, peak


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/other.safetensors", "a/../../other.safetensors",
                                   "C:\\other.safetensors", "..\\other.safetensors", ""])
def test_shards_outside_the_folder_are_not_read(shard, tmp_path, need):
    need("gguf", "names of keys and tensors")
    source = folder(tmp_path, "llama")
    save_safetensors(tmp_path / "other.safetensors", tensors("llama"))
    index = {"weight_map": dict.fromkeys(tensors("llama"), shard)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(gg.BadFile, match="index.json: names the file .* which is not in its folder"):
        convert(source, tmp_path / "c.gguf")
    assert not (tmp_path / "c.gguf").exists()


@pytest.mark.parametrize("change", [
    lambda x: x.pop("model.layers.0.mlp.up_proj.weight"),
    lambda x: x.update({"model.norm.weight": np.ones(D + 32, np.float32)}),
    lambda x: x.update({"model.layers.0.mlp.up_proj.weight": np.ones((5, D), np.float32)})],
    ids=["missing", "norm", "up"])
def test_what_the_loader_refuses_is_not_written(change, tmp_path, need):
    need("gguf", "names of keys and tensors")
    source, x, out = folder(tmp_path, "llama"), tensors("llama"), tmp_path / "m.gguf"
    change(x)
    save_safetensors(source / "model.safetensors", x)
    out.write_bytes(b"before")
    with pytest.raises(gg.ModelError, match="cannot be loaded: .*; nothing was written"):
        convert(source, out, force=True)
    assert out.read_bytes() == b"before" and sorted(p.name for p in tmp_path.iterdir()) == ["llama", "m.gguf"]


# ---------------------------------------------------------------- vocabularies
def train(kind):
    """A small tokenizer of the tokenizers package."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    if kind == "wordpiece":
        t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        t.normalizer, t.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
        t.train_from_iterator(TEXTS, trainers.WordPieceTrainer(
            vocab_size=90, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False))
        return t
    if kind == "pieces":
        t = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        t.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, show_progress=False, special_tokens=[
            "<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]))
        return t
    digits = r"\p{N}{1,3}" if kind == "llama3" else r"\p{N}"
    t = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    pattern = (rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
               r"\s*[\r\n]+|\s+(?!\S)|\s+")
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    t.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=310, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_end|>"]))
    return t


def with_vocabulary(source, tokenizer, n_vocab, about):
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps(about))
    values = json.loads((source / "config.json").read_text()) | {"vocab_size": n_vocab}
    (source / "config.json").write_text(json.dumps(values))
    x = tensors(source.name)
    for name in x:
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "word_embeddings.weight")):
            x[name] = np.resize(x[name], (n_vocab, D))
    save_safetensors(source / "model.safetensors", x)


@pytest.mark.parametrize("kind, name, pre", [("qwen", "qwen3", "qwen2"), ("llama3", "llama3", "llama-bpe"),
                                             ("pieces", "llama", "default"), ("wordpiece", "bert", "bert-bge")])
def test_ids_are_those_of_the_source(kind, name, pre, tmp_path, need):
    need("gguf", "names of keys and tensors")
    need("tokenizers", "makes the vocabulary")
    tokenizer, source = train(kind), folder(tmp_path, name)
    with_vocabulary(source, tokenizer, 340, {"eos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
                    if pre in ("qwen2", "llama-bpe") else {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token":
                    "[SEP]", "pad_token": "[PAD]"} if kind == "wordpiece" else
                    {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"})
    f = convert(source, tmp_path / "m.gguf", vocabulary=True)
    assert f.get("tokenizer.ggml.pre") == pre and len(f.get("tokenizer.ggml.tokens")) == 340
    text = "Once upon a time, Lily jumps over 12345 lazy girls; ok"
    with load_model(tmp_path / "m.gguf", n_threads=1) as m:
        ids = m.tokenizer.encode(text, add_special=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    if kind == "qwen":
        assert f.get("tokenizer.chat_template") == "{{ messages }}" and f.get("tokenizer.ggml.eos_token_id") == 0
        assert f.get("tokenizer.ggml.token_type")[:2].tolist() == [3, 3] and not f.get("tokenizer.ggml.add_bos_token")


def piece(text, score, kind):
    raw = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(raw)]) + raw


def test_a_sentencepiece_model(tmp_path, need):
    need("gguf", "names of keys and tensors")
    source = folder(tmp_path, "gemma")
    model = piece(b"<unk>", 0, 2) + piece(b"<s>", 0, 3) + piece(b"<0x41>", 0, 6) + piece(b"ab", -1.5, 1)
    (source / "tokenizer.model").write_bytes(model + b"\x12\x02\x18\x01")           # and a field that is not read
    (source / "added_tokens.json").write_text(json.dumps({"\u2581\u2581": 5, "<start>": 6, "<pad>": 7}))
    f = convert(source, tmp_path / "m.gguf", vocabulary=True)
    assert list(f.get("tokenizer.ggml.tokens"))[:9] == ["<unk>", "<s>", "<0x41>", "ab", "[PAD4]", "  ", "<start>",
                                                        "<pad>", "[PAD8]"]
    assert f.get("tokenizer.ggml.token_type")[:9].tolist() == [2, 3, 6, 1, 5, 4, 4, 3, 5]
    assert f.get("tokenizer.ggml.scores")[:6].tolist() == [0, 0, 0, -1.5, -10000, -1000]
    assert f.get("tokenizer.ggml.add_space_prefix") is False
    (source / "tokenizer.model").write_bytes(model[:-3])
    with pytest.raises(gg.BadFile, match="tokenizer.model: damaged at byte"):
        convert(source, tmp_path / "n.gguf", vocabulary=True)


def test_a_unigram_model(tmp_path, need):
    need("gguf", "names of keys and tensors")
    source = folder(tmp_path, "t5")
    texts = [("<pad>", 0, 3), ("</s>", 0, 3), ("<unk>", 0, 2), ("\u2581", -2, 1), ("\u2581ab", -3, 1), ("a", -4, 1),
             ("b", -4, 1)]
    pieces = b"".join(piece(text.encode(), score, kind) for text, score, kind in texts)
    (source / "spiece.model").write_bytes(pieces + b"\x12\x02\x18\x01" + b"\x1a\x04\x18\x01\x20\x01")
    f = convert(source, tmp_path / "m.gguf", vocabulary=True)
    assert f.get("tokenizer.ggml.model") == "t5" and f.get("tokenizer.ggml.scores")[3:5].tolist() == [-2, -3]
    assert f.get("tokenizer.ggml.add_space_prefix") is True and f.get("tokenizer.ggml.remove_extra_whitespaces") is True
    with load_model(tmp_path / "m.gguf", n_threads=1, reserve=False) as m:
        assert m.tokenizer.encode("ab  ba", add_special=False) == [4, 3, 6, 5]


def test_a_vocabulary_of_rwkv(tmp_path, need):
    need("gguf", "names of keys and tensors")
    source, _ = rwkv7(tmp_path / "rwkv7", save_safetensors)
    (source / "rwkv_vocab_v20230424.txt").write_text("1 'a' 1\n2 ' b' 2\n3 b'\\xff' 1\n4 '\\n' 1\n5 'é' 2\n", "utf-8")
    f = convert(source, tmp_path / "m.gguf", vocabulary=True)
    assert list(f.get("tokenizer.ggml.tokens"))[:7] == ["<s>", "a", " b", "\\xff", "\\n", "\\xc3\\xa9", "[PAD6]"]
    with load_model(tmp_path / "m.gguf", n_threads=1, reserve=False) as m:
        assert m.tokenizer.encode("a b\né", add_special=False) == [1, 2, 4, 5]
    (source / "rwkv_vocab_v20230424.txt").write_text("1 'a\n", "utf-8")
    with pytest.raises(gg.BadFile, match="v20230424.txt, line 1: .*LENGTH is expected"):
        convert(source, tmp_path / "m.gguf", vocabulary=True, force=True)


# ---------------------------------------------------------------- what cannot be done
def changed(source, **values):
    (source / "config.json").write_text(json.dumps(config(source.name) | values))
    return source


@pytest.mark.parametrize(("name", "values", "message"), [
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "RoPE is left out of other layers than every fourth"),
    ("falcon", {"alibi": True}, "alibi is True"), ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "other layers"),
    ("cohere2", {"layer_types": ["sliding_attention"] * 4}, "three of four"),
    ("qwen3_next", {"full_attention_interval": 4}, "full attention on other layers than every 4th"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq is 2"), ("nemotron", {"hidden_act": "silu"}, "relu2"),
    ("nomic_bert", {"prenorm": True}, "prenorm is True")])
def test_what_a_network_here_does_not_compute(name, values, message, tmp_path, need):
    need("gguf", "names of keys and tensors")
    with pytest.raises(gg.NotSupported, match=message):
        convert(changed(folder(tmp_path, name), **values), tmp_path / "m.gguf")


def test_sizes_that_do_not_fit(tmp_path, need):
    need("gguf", "names of keys and tensors")
    with pytest.raises(gg.ModelError, match=r"query_key_value.bias' of shape .* does not fit config.json"):
        convert(changed(folder(tmp_path, "gpt_neox"), num_attention_heads=5), tmp_path / "m.gguf")


@pytest.mark.parametrize("change, options, error, message", [
    (lambda s: changed(s, architectures=["Qwen3ForCausalML"]), {}, gg.NotSupported,
     r"architecture 'Qwen3ForCausalML' cannot be converted \(did you mean Qwen3ForCausalLM\?\)"),
    (lambda s: changed(s, rope_scaling={"rope_type": "spiral"}), {}, gg.NotSupported, "RoPE scaling 'spiral'"),
    (lambda s: changed(s, quantization_config={"bits": 4}), {}, gg.NotSupported, "quantised already"),
    (lambda s: changed(s, hidden_act="gelu"), {}, gg.NotSupported, "hidden_act is 'gelu'; GGUF's qwen3 always"),
    (lambda s: changed(s, num_hidden_layers=[2]), {}, gg.ModelError, "config.json: a value is not what it .*list"),
    (lambda s: changed(s, num_hidden_layers=2**40), {}, gg.ModelError, "1099511627776 layers, but the folder has"),
    (lambda s: changed(s, architectures=3), {}, gg.ModelError, "config.json: a value is not what it .*int"),
    (lambda s: changed(s, max_position_embeddings=-1), {}, gg.ModelError, "it has to be .*: -1 for .*context_length"),
    (lambda s: changed(s, vocab_size=2**40), {}, gg.ModelError, "it has to be .*: 1099511627776 for .*vocab_size"),
    (lambda s: (s / "config.json").unlink(), {}, gg.BadFile, "config.json: no such file"),
    (lambda s: (s / "config.json").write_text("{"), {}, gg.BadFile, "config.json: not JSON"),
    (lambda s: (s / INDEX).write_text('{"weight_map": ["a"]}'), {}, gg.BadFile, "weight_map has to map names"),
    (lambda s: (s / INDEX).write_text('{"weight_map": {"a": 3}}'), {}, gg.BadFile, "weight_map has to map names"),
    (lambda s: shutil.copy(s / "model.safetensors", s / "again.safetensors"), {}, gg.ModelError,
     "is in another file of the folder too"),
    (lambda s: (s / "model.safetensors").unlink(), {}, gg.BadFile, "no .safetensors files"),
    (lambda s: None, {"vocabulary": True}, gg.ModelError, "neither tokenizer.json nor tokenizer.model; .*--no-vocab"),
    (lambda s: None, {"vocabulary": True, "pre": "qwen3"}, gg.ParamError, "no pre-tokenizer 'qwen3' .did you mean q"),
    (lambda s: None, {"type": "Q4_0"}, gg.ParamError, "type must be one of AUTO, F32"),
    (lambda s: save_safetensors(s / "more.safetensors", {"model.vision.weight": np.ones((2, 2), np.float32)}), {},
     gg.ModelError, "tensor 'model.vision.weight' has no place in a GGUF of architecture qwen3"),
    (lambda s: (s / "tokenizer.json").write_text('{"model": {"type": "WordLevel"}}'), {"vocabulary": True},
     gg.NotSupported, "a tokenizer of kind 'WordLevel'"),
    (lambda s: (s / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
                                                             "pre_tokenizer": {"type": "Whitespace"}})),
     {"vocabulary": True}, gg.NotSupported, r"cut in a way that is not known \(Whitespace\); .*--pre")])
def test_refusals(change, options, error, message, tmp_path, need):
    need("gguf", "names of keys and tensors")
    source = folder(tmp_path, "qwen3")
    change(source)
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "m.gguf", **options)
    assert not (tmp_path / "m.gguf").exists() and not list(tmp_path.glob("*.part"))


def test_broken_numbers_and_experts(tmp_path, need):
    need("gguf", "names of keys and tensors")
    source, x = folder(tmp_path, "qwen3_moe"), tensors("qwen3_moe")
    x["model.layers.0.self_attn.q_proj.weight"][0, 0] = 1e6
    save_safetensors(source / "model.safetensors", x)
    with pytest.raises(gg.BadFile, match=r"'model.layers.0.self_attn.q_proj.weight' as F16: .* take BF16 or F32"):
        convert(source, tmp_path / "m.gguf", type="F16")
    del x["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_safetensors(source / "model.safetensors", x)
    with pytest.raises(gg.ModelError, match="3 experts like 'model.layers.1.mlp.experts.0.up_proj.weight', "):
        convert(source, tmp_path / "m.gguf", type="BF16")
    with pytest.raises(gg.ModelError, match="4 experts like .* config.json says 1099511627776"):
        convert(changed(source, **dict.fromkeys(("num_experts", "num_local_experts"), 2**40)), tmp_path / "m.gguf",
                type="BF16")
    with pytest.raises(gg.NotSupported, match="norm_topk_prob is false"):
        convert(changed(folder(tmp_path, "qwen3_moe"), norm_topk_prob=False), tmp_path / "m.gguf")
