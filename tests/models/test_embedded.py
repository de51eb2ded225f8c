"""The model that comes with the package, and the script that trains it."""
import json
import struct
import zlib

import numpy as np
import pytest

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.networks.load import EMBEDDED
from ggjit.tools import embedded_model
from ggjit.tools.command.main import main

TEXT = "It was a truth that Emma could not deny; and yet, said she, \"I will not\" - for £5.\n"


@pytest.fixture(scope="module")
def austen():
    with load_model(n_threads=1) as m:
        yield m


def test_it_is_small_and_english_is_likelier_than_shuffled_english(austen):
    assert EMBEDDED.stat().st_size <= 1_500_000
    ids = austen.tokenize(TEXT)
    assert austen.tokenizer.decode(ids) == TEXT and austen.file.get("general.license") == "mit"

    def loss(ids):
        x = austen.logits(ids)[:-1].astype(np.float64)
        return (np.log(np.exp(x).sum(-1)) - x[np.arange(len(x)), ids[1:]]).mean()
    mixed = np.random.default_rng(0).permutation(ids)
    assert loss(np.array(ids)) < 5 < 6.5 < loss(mixed)


def test_it_needs_no_file_on_the_command_line(austen, capsys):
    assert main(["generate", "-p", "Emma was", "-n", "8", "--temp", "0", "-t", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "".join(austen.generate("Emma was", n_predict=8, temp=0))


def test_it_is_fine_tuned_from_the_command_line(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXT * 3)
    line = f"finetune --data {tmp_path}/a.txt -o {tmp_path}/a.gguf -c 16 --targets attn_q --steps 2 -t 1".split()
    assert main([*line, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["steps"] == len(said["loss"]) == 2 and said["peak"] > 1 << 20 and (tmp_path / "a.gguf").exists()
    assert main([*line, "--force", "--memory", "1M"]) == 1 and "or more, a shorter context" in capsys.readouterr().err


def r_data(lines):
    """What R writes for a vector of lines, compressed."""
    raw = b"X\n" + struct.pack(">iii", 3, 0x40201, 0x30500) + struct.pack(">i", 5) + b"UTF-8"
    raw += struct.pack(">ii", 16, len(lines))
    for line in lines:
        text = line.encode()
        raw += struct.pack(">ii", 0x8009, len(text)) + text
    return struct.pack(">I", len(raw)) + zlib.compress(raw)


def test_texts(tmp_path):
    (tmp_path / "a.rdb").write_bytes(r_data(["EMMA", "", "She was--he", "said--_not_ £5."]) + r_data(["x"]))
    texts = [embedded_model.paragraphs(t) for t in embedded_model.read_texts(tmp_path / "a.rdb")]
    assert texts == ["EMMA\nShe was - he said - not £5.", "x"]


def test_the_tokenizer_knows_every_byte_and_the_rate_rises_and_falls():
    tokens, merges = embedded_model.train_tokenizer([TEXT * 3])
    assert tokens[-1] == embedded_model.END and len(set(tokens)) == len(tokens) == 257 + len(merges)
    rate = embedded_model.rate(1000)
    assert rate(1) < rate(100) > rate(500) > rate(1000) > 0


def test_leaves_become_parameters(tmp_path):
    about = embedded_model.metadata(*embedded_model.train_tokenizer([TEXT]))
    gg.models.save_gguf(tmp_path / "a.gguf", embedded_model.first_weights(0), about)
    with pytest.raises(gg.TypeMismatch, match="only F32 weights can be trained"), load_model() as m:
        m.weights.unfreeze()
    with load_model(tmp_path / "a.gguf", n_threads=1, reserve=False) as m:
        before = m.logits([1, 2, 3])
        m.weights.unfreeze()
        m.embd.set(np.zeros(m.embd.shape, np.float32))
        assert before.any() and not m.logits([1, 2, 3]).any()


def test_names_of_other_libraries_tokenizers(austen):
    t = austen.tokenizer
    assert len(t) == t.n_vocab
    with pytest.raises(TypeError, match=r"write tokenizer.encode\(text\)"):
        t("a text")
    for name, instead in (("vocab_size", "n_vocab"), ("eos_token_id", "eos_id"), ("convert_ids_to_tokens", "piece"),
                          ("apply_chat_template", "chat_prompt")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; write .*{instead}"):
            getattr(t, name)
    assert not hasattr(t, "no_such_name")
