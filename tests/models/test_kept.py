"""What layers keep of a text: saved and loaded, for several texts at once; and every tensor of a file matters."""
import shutil

import numpy as np
import pytest
from helpers import arch_experts, arch_files, arch_hybrids
from helpers.requirements import shared
from helpers.sample import sampled

from ggjit.models import load_model
from ggjit.models.files.gguf import GGUFFile
from ggjit.ops.core.types import I32

NAMES = [(name,) for name in sorted({**arch_hybrids.MORE, **arch_experts.MORE})]
ONE_TEXT = "t5", "glm5-next", "deepseek4"       # tests/models/test_t5.py
# tensors that nothing reads, by the ends of their names
UNREAD = {"arwkv7": ("blk.0.time_mix_v0.weight", "blk.0.time_mix_v1.weight", "blk.0.time_mix_v2.weight"),
          "kimi-k3": ("blk.0.attn_res_score.weight",), "t5": ("cross_attn_rel_b.weight",),
          # keys of 128 tokens, of which a text of 24 has none
          "deepseek4": tuple(f"blk.2.attn_compressor_{n}.weight" for n in ("kv", "gate", "ape", "norm"))}
IDS = np.random.default_rng(3).integers(0, 96, 24).tolist()


def family(case):
    return [case[0] in arch_hybrids.MORE]


@pytest.fixture
def loaded(tmp_path):
    def run(name, file="m.gguf", **options):
        path = tmp_path / file
        if not path.exists():
            arch_files.write(shared("tools"), name, path)
        return arch_files.prepared(load_model(path, **{"n_threads": 1, "n_ctx": 64, "n_batch": 8, "kv_type": "F32",
                                                       "flash": False, "reserve": False, **options}))
    return run


@pytest.mark.parametrize("name", sampled(NAMES, family))
def test_a_saved_text_goes_on_where_it_was(name, loaded):
    with loaded(name) as m:
        m.decode(IDS[:20])
        state, want = m.save_state(), m.decode(IDS[20:])
    with loaded(name) as m:
        m.load_state(state)
        np.testing.assert_array_equal(m.decode(IDS[20:]), want)


@pytest.mark.parametrize("name", sampled([case for case in NAMES if not case[0].startswith(ONE_TEXT)], family))
def test_texts_at_once_do_not_know_each_other(name, loaded):
    parts = [IDS[:5], IDS[7:19], IDS[3:9]]
    with loaded(name) as m:
        alone = []
        for part in parts:
            m.reset()
            m.decode(part)
            alone.append(np.stack([m.decode([i]) for i in (1, 2, 3)]))
        m.hand_over(object())
        texts = [m.cells.open(20) for _ in parts]
        for text, part in zip(texts, parts, strict=True):
            m.feed([(text, np.array(part, np.int32))])
        got = np.stack([m.feed([(text, np.array([i], np.int32)) for text in texts]) for i in (1, 2, 3)], 1)
    for a, b in zip(got, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3 * abs(b).max())


@pytest.mark.parametrize("name", sampled(NAMES, family))
def test_every_tensor_changes_the_result(name, loaded, tmp_path):
    with loaded(name) as m:
        want = m.logits(IDS)
    rng, same = np.random.default_rng(0), []
    unread = next((ends for arch, ends in UNREAD.items() if name.startswith(arch)), ())
    for tensor, info in GGUFFile(tmp_path / "m.gguf").tensors.items():
        guesses = name.endswith("-nextn") and tensor.startswith("blk.3.")
        if tensor.endswith(unread) or guesses:
            continue
        shutil.copy(tmp_path / "m.gguf", tmp_path / "other.gguf")
        raw = np.memmap(tmp_path / "other.gguf", np.uint8, "r+")
        values = raw[info.offs:info.offs + info.nbytes].view(np.int32 if info.type is I32 else np.float32)
        if info.type is I32:                # numbers of experts, those of another token
            values[:] = np.roll(values, 5)
        else:
            values += (3.0 if "exp_probs_b" in tensor else 0.5) * rng.standard_normal(values.shape, np.float32)
        raw.flush()
        del raw
        with loaded(name, "other.gguf") as m:
            if not abs(m.logits(IDS) - want).max() > 1e-5 * abs(want).max():
                same.append(tensor)
    assert not same
