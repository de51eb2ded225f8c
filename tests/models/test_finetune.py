"""Training of adapters: the loss as a graph, what is trained, memory, interruptions, and what is refused."""
import hashlib
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import arch_files, tiny_model, tiny_moe

import ggjit as gg
from ggjit.models import finetune, load_model
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.files.save import CannotWrite
from ggjit.models.networks import finetune as finetuning
from ggjit.models.networks.finetune import LEAST_STEPS, Finetuning, _texts, read_ids
from ggjit.models.networks.load import EMBEDDED
from ggjit.models.networks.parts.training import TokenLoss
from ggjit.tools.command.common import nbytes
from ggjit.tools.command.helpers import scaled
from ggjit.tools.command.main import main

IDS = np.tile(np.arange(40), 9)
N = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("finetune") / "m.gguf", type="Q4_0",
                            metadata={"vocab_size": tiny_model.VOCAB})


def train(model, out, data=IDS, **options):
    return finetune(model, data, out, **{"n_ctx": N, "rank": 4, "lr": 1e-2, "targets": ["attn_q", "ffn_down"],
                                        "n_threads": 1, "progress": False, **options})


def mean_loss(model, **options):
    """Of the ids after each, from logits."""
    with load_model(model, n_threads=1, **options) as m:
        x = m.logits(IDS[:N]).astype(np.float64)
    return float((np.log(np.exp(x).sum(-1)) - x[np.arange(N), IDS[1:N + 1]]).mean())


def test_the_loss_is_that_of_the_logits_in_chunks_of_any_size(model):
    found = []
    with load_model(model, n_threads=1, kv_type="F32", flash=False) as m:
        for chunk in (N, 5):
            part = TokenLoss(m, N, chunk)
            tokens, targets = part.rows(IDS)
            gg.alloc_ctx_tensors(part.ctx, m.backend)
            part.tokens.set(tokens[:1])
            part.targets.set(targets[:1])
            found.append(float(gg.compute(part.loss)[0]))
    assert found == pytest.approx([mean_loss(model, kv_type="F32", flash=False)] * 2, rel=2e-4)


def test_an_adapter_learns_beside_weights_that_stay(model, tmp_path):
    before, seen = hashlib.sha256(model.read_bytes()).digest(), []
    h = train(model, tmp_path / "a.gguf", epochs=2, on_plan=seen.append)
    assert len(h.steps) == 2 * (len(IDS) // N) == seen[0].n_steps and h.steps[-1] < 0.5 * h.steps[0]
    assert hashlib.sha256(model.read_bytes()).digest() == before
    assert mean_loss(model, lora=[(tmp_path / "a.gguf", 1.0)]) < 0.5 * mean_loss(model)
    file = GGUFFile(tmp_path / "a.gguf")
    assert file.metadata["adapter.lora.alpha"] == 8 and len(file.tensors) == 2 * 2 * tiny_model.LAYERS
    assert seen[0].n_params == sum(np.prod(t.ne) for t in file.tensors.values())


def test_a_short_text_is_cut_into_four_rows(tmp_path):
    """With the defaults: it is neither refused nor read once."""
    seen = []

    class Planned(Exception):
        pass

    def stop(job):
        seen.append(job.n_steps)
        raise Planned
    text = "My cat is called Orlando. He sleeps on the piano. " * 3
    for options, n in (({}, LEAST_STEPS), ({"steps": 9}, 9), ({"epochs": 2}, 8)):
        with pytest.raises(Planned):
            finetune(None, text, tmp_path / "cat.gguf", on_plan=stop, progress=False, targets=["attn_q"], **options)
        assert seen[-1] == n


def test_memory_is_kept_and_changes_no_bit(model, tmp_path):
    free = train(model, tmp_path / "a.gguf", steps=3)
    seen = []
    with pytest.raises(gg.BudgetError, match="too little: the weights take .* use memory=[0-9]+ or more") as e:
        train(model, tmp_path / "b.gguf", memory=1 << 20)
    assert not (tmp_path / "b.gguf").exists()
    limit = e.value.minimum
    tight = train(model, tmp_path / "b.gguf", steps=3, memory=limit, on_plan=seen.append)
    assert seen[0].peak <= limit and tight.steps == free.steps
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_every_limit_below_the_least_is_refused_with_it_and_every_larger_one_is_kept(model, monkeypatch):
    monkeypatch.setattr(finetuning, "resident_nbytes", lambda: 1 << 20)     # as if nothing else changed the process
    for name in ("PLANS_NBYTES", "AGAIN_NBYTES", "SLACK_NBYTES"):
        monkeypatch.setattr(finetuning, name, 0)

    def peak(limit):
        job = Finetuning(model, IDS, 4, None, ["attn_q", "ffn_down"], N, limit, None, 1, 1e-2, 1, 0, 1, None, None)
        job.close()
        return job.peak

    def least(limit):
        with pytest.raises(gg.BudgetError, match=f"use memory={named} or more" if named else None) as e:
            peak(limit)
        return e.value.minimum
    named, free = 0, peak(None)
    named = least(1)
    assert named < 0.95 * free
    assert {least(limit) for limit in (1 << 10, named // 2, named - 1000, named - 1)} == {named}
    for limit in (named, named + 1, *range(named, free, (free - named) // 5), free):
        assert peak(limit) <= limit


def test_interrupted_the_adapter_of_the_last_step_is_written_and_training_goes_on(model, tmp_path):
    whole, part, steps = tmp_path / "whole.gguf", tmp_path / "part.gguf", tmp_path / "train.st"
    train(model, whole, epochs=2, steps=30)

    def stop(history):
        if len(history.steps) == 25:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train(model, part, epochs=2, steps=30, checkpoint=steps, callback=stop)
    train(model, tmp_path / "same.gguf", epochs=2, steps=25)
    assert part.read_bytes() == (tmp_path / "same.gguf").read_bytes()
    h = train(model, part, epochs=2, steps=30, checkpoint=steps)
    assert part.read_bytes() == whole.read_bytes() and len(h.steps) == 30
    kept = steps.read_bytes(), part.read_bytes()
    with pytest.raises(gg.ShapeError, match="has shape|of other parameters"):
        train(model, part, epochs=2, checkpoint=steps, rank=2)
    other = tiny_model.write(tmp_path / "other.gguf", type="Q4_0", seed=1, metadata={"vocab_size": tiny_model.VOCAB})
    for options, words in ((dict(alpha=3), "alpha=8, now 3"), (dict(data=IDS[::-1]), "data=[0-9]+, now"),
                           (dict(model=other), "model=[0-9]+, now"), (dict(seed=1), "seed=0, now 1")):
        with pytest.raises(gg.ParamError, match=f"is of another training: {words}.*; use another file"):
            train(**{"model": model, "out": part, "epochs": 2, "checkpoint": steps} | options)
    assert (steps.read_bytes(), part.read_bytes()) == kept


CHILD = """
import os, signal, sys
from ggjit.tools.command.main import main
from ggjit.train import training
from ggjit.train.training import Training
sys.modules["ggjit.train.fit"].SAVE_SECONDS, step = 0, Training.step
def killed_inside(self, number):
    if number == 4:
        os.kill(os.getpid(), int(sys.argv[1]))
    step(self, number)
Training.step = killed_inside
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 130), ("SIGKILL", -9)])
def test_a_command_that_is_ended_by_a_signal_goes_on_with_the_same_bits(name, code, tmp_path):
    """Inside step 4.  SIGINT and SIGTERM wait for its end; after SIGKILL the checkpoint of step 3 is there."""
    (tmp_path / "text.txt").write_text("The cat sat on the mat, and the dog sat beside the cat. " * 9)

    def command(out, *more):
        return ["finetune", "--data", str(tmp_path / "text.txt"), "-o", str(tmp_path / out), "--n-ctx", "16", "--rank",
                "2", "--targets", "attn_q", "--lr", "0.01", "-t", "1", *more]
    args = "--steps", "6", "--checkpoint", str(tmp_path / "steps")
    r = subprocess.run([sys.executable, "-c", CHILD, str(int(getattr(signal, name))), *command("a.gguf", *args)],
                       text=True, capture_output=True, timeout=300)
    assert r.returncode == code, r.stderr
    if name != "SIGKILL":
        assert main(command("four.gguf", "--steps", "4")) == 0
        assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "four.gguf").read_bytes()
    assert main(command("a.gguf", *args)) == main(command("whole.gguf", "--steps", "6")) == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def mixture(folder, type, own_output=True):
    more = {"output.weight": (tiny_model.VOCAB, tiny_model.DIM)} if own_output else {}
    return tiny_moe.write(folder / f"{type}{own_output}.gguf", type=type, more=more)


@pytest.mark.parametrize("targets", [["ffn_gate_inp"], ["ffn_gate_exps"], ["ffn_up_exps", "ffn_down_exps"], ["output"],
                                     ["token_embd"]], ids="-".join)
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_experts_routers_output_and_embedding_learn(targets, type, tmp_path):
    path, out = mixture(tmp_path, type), tmp_path / "a.gguf"
    options = dict(kv_type="F32", flash=False)
    h = finetune(path, IDS[:N + 1], out, rank=4, lr=3e-3, targets=targets, n_ctx=N, epochs=12, n_threads=1,
                 progress=False)
    assert h.steps[0] == pytest.approx(mean_loss(path, **options), rel=5e-3)
    assert h.steps[-1] < 0.98 * h.steps[0]
    assert mean_loss(path, lora=[(out, 1.0)], **options) < 0.98 * h.steps[0]
    named = {n.removesuffix(".lora_a").removesuffix(".lora_b") for n in GGUFFile(out).tensors}
    assert {n.split(".")[-2] for n in named} == set(targets)


@pytest.mark.parametrize("target", ["token_embd", "output", "attn_norm", "output_norm", "ffn_gate", ""])
def test_targets_without_a_matrix_of_their_own_are_named(target, tmp_path):
    """token_embd of this model also makes the logits."""
    with pytest.raises(gg.ParamError, match=f"no adapter goes beside '{target}'; in .* beside attn_q, .*ffn_up_exps"):
        train(mixture(tmp_path, "F32", own_output=False), tmp_path / "a.gguf", targets=["attn_q", target])
    assert not (tmp_path / "a.gguf").exists()


def test_an_adapter_that_is_not_finite_is_not_written(model, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"of before")
    with pytest.raises(gg.train.NotFinite, match="step"):
        train(model, tmp_path / "a.gguf", lr=1e38, force=True)
    assert (tmp_path / "a.gguf").read_bytes() == b"of before"


@pytest.mark.parametrize("text, n", [("1500000000", 1_500_000_000), ("1.5G", 1_500_000_000), ("1.5e9", 1_500_000_000),
                                     ("2MiB", 2 << 20), (".5k", 500)])
def test_numbers_of_bytes(text, n):
    assert nbytes(text) == n


def test_what_lora_takes_on_the_command_line():
    assert scaled(["a", "b=0.5", "c=d", "e=f=2"]) == [("a", 1.0), ("b", 0.5), ("c=d", 1.0), ("e=f", 2.0)]


@pytest.mark.parametrize("text, name, words", [
    (b"ab\xff", "a.txt", "at byte 2; text in UTF-8"), (b"", "a.txt", "has no text"),
    (b'{"text": "a"}\n{"text": ', "a.jsonl", "line 2: .* every line is a JSON object"),
    (b'["a"]', "a.jsonl", 'line 1: an object with a string "text"'), (None, "a.txt", "No such file")])
def test_data_that_cannot_be_read(tmp_path, text, name, words):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(gg.BadFile, match=words):
        read_ids(tmp_path / name, None)


def test_only_line_feeds_end_a_line_of_json(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"text": "a\u2028b"}\r\n{"text": "c\x85d"}\n'.encode())
    assert _texts(tmp_path / "a.jsonl") == ["a\u2028b", "c\x85d"]


def test_no_file_that_is_read_is_replaced(model, tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "a.gguf"
    text.write_text("mine")
    (tmp_path / "link.gguf").symlink_to(model)
    for options, words in ((dict(out=model), "the adapter .out. and the model"),
                           (dict(out=tmp_path / "link.gguf"), "the adapter .out. and the model"),
                           (dict(data=text, out=text), "the adapter .out. and the data"),
                           (dict(checkpoint=out), "the adapter .out. and the checkpoint"),
                           (dict(data=text, checkpoint=text), "the checkpoint and the data"),
                           (dict(out=tmp_path), "is a folder; name a file in it")):
        with pytest.raises(gg.ParamError, match=words):
            finetune(**{"model": model, "data": IDS, "out": out, "n_ctx": N, **options})
    (tmp_path / "steps").write_bytes(b"")
    for options in (dict(out=out), dict(out=out, checkpoint=tmp_path / "steps")):       # no adapter, checkpoint or not
        out.write_bytes(b"notes")
        with pytest.raises(CannotWrite, match="a.gguf exists already; .*--force"):
            finetune(**{"model": model, "data": IDS, "n_ctx": N, **options})
        assert out.read_bytes() == b"notes"
    assert text.read_text() == "mine" and GGUFFile(model).get("general.type", None) is None


@pytest.mark.parametrize("options, error, words", [
    (dict(rank=0), gg.ParamError, "rank must be an integer from 1"),
    (dict(targets="attn_q"), gg.TypeMismatch, "targets is a list of names"),
    (dict(seed=-1), gg.ParamError, "seed must be an integer from 0"),
    (dict(seed="a"), gg.ParamError, "seed must be"), (dict(model=3), gg.TypeMismatch, "model is a path, got int"),
    (dict(checkpoint=3), gg.TypeMismatch, "checkpoint is a path"),
    (dict(callback=3), gg.TypeMismatch, "callback is a function"), (dict(on_plan=3), gg.TypeMismatch, "on_plan is a f"),
    (dict(targets=["w"]), gg.ParamError, "beside 'w'; in .* beside attn_q"),
    (dict(batch=99), gg.ParamError, "do not fill a batch"), (dict(steps=0), gg.ParamError, "steps must be"),
    (dict(data=IDS[:9]), gg.ParamError, "fewer than a row"),
    (dict(data=[1, 99]), gg.IndexRangeError, "outside the voc"),
    (dict(data="no-text.txt"), gg.BadFile, "check the path"),
    (dict(out="/no such folder/a"), gg.ParamError, "no folder"),
    (dict(memory="1G"), gg.ParamError, "memory must be an integer"), (dict(n_cxt=4), gg.TypeMismatch, "n_cxt")])
def test_refused(model, tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        finetune(**{"model": model, "data": IDS, "out": tmp_path / "a.gguf", "n_ctx": N, "targets": ["attn_q"],
                    **options})
    assert not (tmp_path / "a.gguf").exists()


def test_attention_that_works_on_a_cache_only_is_refused(model, monkeypatch):
    with load_model(model) as m:
        monkeypatch.setattr(type(m.description.blocks[0].mixer), "cached", True, raising=False)
        with pytest.raises(gg.NotSupported, match="attention of the llama network works on a cache"):
            TokenLoss(m, N)


@pytest.mark.parametrize("arch", ["mamba", "t5encoder-relu"])
def test_networks_without_attention_of_their_own_names(arch, tmp_path, shared):
    arch_files.write(shared("tools"), arch, tmp_path / "m.gguf")
    with pytest.raises(gg.NotSupported, match="has no matrix attn_q, .*; networks of attention layers can be trained"):
        finetune(tmp_path / "m.gguf", IDS, tmp_path / "a.gguf")


def test_no_tokenizer(model, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    with pytest.raises(gg.ModelError, match="no vocabulary"):
        finetune(model, tmp_path / "a.jsonl", tmp_path / "a.gguf")


def test_a_short_text_is_read_often_enough_to_show(model, tmp_path):
    text = "The cat sat on the mat. " * 12
    h = finetune(EMBEDDED, text, tmp_path / "a.gguf", n_ctx=32, lr=5e-3, n_threads=1, progress=False, sample="The cat")
    assert 40 <= len(h.steps) < 80 and h.steps[-1] < h.steps[0] / 2
    assert h.before != h.after and "sat on the mat" in h.after
    page = h._repr_html_()
    assert "before: The cat" in page and "sat on the mat" in page and "<img alt=" in page
    with load_model(EMBEDDED, n_threads=1, n_ctx=64, lora=[(tmp_path / "a.gguf", 1.0)]) as m:
        assert "sat on the mat" in m.generate("The cat", 24).text
    assert len(finetune(EMBEDDED, text, tmp_path / "b.gguf", n_ctx=32, steps=2, n_threads=1, progress=False).steps) == 2
