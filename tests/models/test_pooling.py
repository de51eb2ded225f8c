"""One row for a text: embeddings of decoders and encoders, and what rerankers say of a query and a text."""
import json

import gguf
import numpy as np
import pytest
from helpers import hf_folders, pooled_files, tiny_model
from helpers.gguf_files import written
from helpers.llamacpp import computed
from helpers.processes import ggjit, result

import ggjit as gg
from ggjit.models import convert_folder, load_model, save_safetensors
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.text.tokenizer import Tokenizer

WORDS = ["who", "wrote", "em", "##ma", "jane", "austen", "did", "rain", "in", "spain"]


@pytest.mark.peer
@pytest.mark.parametrize("name", pooled_files.CASES)
def test_against_llamacpp(name, tmp_path, need):
    need("xllamacpp", "llama.cpp is the oracle")
    want = computed("pooled_files", name, tmp_path, "pooled.npy")
    options = {} if "bert" in name else {"kv_type": "F32", "flash": False, "n_batch": 16}      # in batches of 16 and 14
    with load_model(tmp_path / "model.gguf", n_threads=1, reserve=False, **options) as m:
        if m.pooling.kind == "rank":
            got = m.rank_ids(pooled_files.IDS)
            with pytest.raises(gg.NotSupported, match="ranks texts: m.rerank"):
                m.embed_ids(pooled_files.IDS)
        else:
            got, want = m.embed_ids(pooled_files.IDS), want / np.linalg.norm(want)
            with pytest.raises(gg.NotSupported, match="is not a reranker"):
                m.rank_ids(pooled_files.IDS)
        assert got.shape == want.shape and got.dtype == np.float32
        # BERT's GELU is the exact one here, and read from a table of F16 there; a score is a sum of terms of about 1
        scale = 1 if m.pooling.kind == "rank" else abs(want).max()
        assert abs(got - want).max() <= (3e-3 if "bert" in name else 3e-4) * scale


# ---------------------------------------------------------------- decoders
def test_embeddings_of_a_decoder_are_its_hidden_states(tmp_path):
    path, ids = tiny_model.write(tmp_path / "m.gguf"), [1, 2, 3, 4, 5]
    for pooling, of in (("mean", lambda h: h.mean(0)), ("cls", lambda h: h[0]), ("last", lambda h: h[-1])):
        with load_model(path, n_threads=1, n_batch=2, pooling=pooling) as m:
            want = of(m.hidden(ids).astype(np.float64))
            np.testing.assert_allclose(m.embed_ids(ids), want / np.linalg.norm(want), atol=1e-6)


def test_a_file_without_pooling_says_what_to_do(tmp_path):
    path = tiny_model.write(tmp_path / "m.gguf")
    with load_model(path, n_threads=1) as m:
        with pytest.raises(gg.NotSupported, match="says no pooling.*pooling=\"mean\""):
            m.embed_ids([1, 2])
        with pytest.raises(gg.NotSupported, match="is not a reranker.*m.embed"):
            m.rerank("a", ["b"])
        assert len(m.logits([1, 2])) == 2               # as usable as before
    with pytest.raises(gg.ParamError, match="pooling must be one of none, mean, cls, last, rank, got 'max'"):
        load_model(path, n_threads=1, pooling="max")
    with pytest.raises(gg.ModelError, match="no head that ranks"):
        load_model(path, n_threads=1, pooling="rank")
    with pytest.raises(gg.ModelError, match="pooling_type 9 is not supported"):
        load_model(tiny_model.write(tmp_path / "m9.gguf", metadata={"pooling_type": 9}), n_threads=1)


# ---------------------------------------------------------------- pairs
@pytest.fixture
def cross_encoder(tmp_path):
    """(path of BERT with a classifier, its folder): words of WORDS, drawn weights."""
    folder = hf_folders.write(tmp_path / "bert", "bert_rank", save_safetensors)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {text: i for i, text in enumerate([*special, *WORDS])}
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [{"id": vocab[t], "content": t, **token} for t in special],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"SpecialToken": {"id": "[SEP]", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}},
                     {"SpecialToken": {"id": "[SEP]", "type_id": 1}}],
            "special_tokens": {t: {"id": t, "ids": [vocab[t]], "tokens": [t]} for t in ("[CLS]", "[SEP]")}},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocab}}))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]",
         "pad_token": "[PAD]", "mask_token": "[MASK]"}))
    convert_folder(folder, tmp_path / "m.gguf", "F32", progress=False)
    return tmp_path / "m.gguf", folder


def test_a_cross_encoder_reads_pairs_as_it_was_trained(cross_encoder):
    """Types 0 and 1 change the score; ids are those of the tokenizers package."""
    path, folder = cross_encoder
    tokenizers = pytest.importorskip("tokenizers")
    query, texts = "Who wrote Emma", ["Jane Austen wrote Emma", "rain in Spain"]
    with load_model(path, n_threads=1) as m:
        engine = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        for text, score in zip(texts, m.rerank(query, texts), strict=True):
            want = engine.encode(query, text)
            ids, n_first = m.tokenizer.encode_pair(query, text)
            assert ids == want.ids and n_first == want.type_ids.count(0)
            assert m.rank_ids(ids, n_first)[0] == score != m.rank_ids(ids)[0]
        assert m.rank_ids(ids, n_first).shape == (3,)
        with pytest.raises(gg.TypeMismatch, match="rerank takes a list of strings, got str"):
            m.rerank(query, texts[0])
        with pytest.raises(gg.ParamError, match="do not fit the context of 64"):
            m.rerank(query, ["rain " * 99])


@pytest.mark.parametrize("bos, eos, arch, want", [
    ("<s>", "</s>", "bert", [0, 4, 2, 2, 5, 2]), ("[CLS]", "[SEP]", "modern-bert", [0, 4, 2, 5, 2])])
def test_pairs_of_roberta_have_two_separators(bos, eos, arch, want, tmp_path):
    w = gguf.GGUFWriter(str(tmp_path / "v.gguf"), arch)
    w.add_tokenizer_model("t5")
    w.add_token_list([bos, "<pad>", eos, "<unk>", "▁a", "▁b"])
    w.add_token_scores([0.0, 0.0, 0.0, 0.0, -1.0, -2.0])
    w.add_token_types([3, 3, 3, 2, 1, 1])
    w.add_bos_token_id(0)
    w.add_eos_token_id(2)
    w.add_unk_token_id(3)
    for add in (w.add_add_bos_token, w.add_add_eos_token, w.add_add_sep_token, w.add_add_space_prefix):
        add(True)
    path = written(w, tmp_path / "v.gguf")
    assert Tokenizer.from_gguf(GGUFFile(path)).encode_pair("a", "b") == (want, want.index(5))


def test_special_tokens_of_a_prompt_are_not_those_of_a_text(cross_encoder):
    with load_model(cross_encoder[0], n_threads=1) as m:
        t, cls, sep = m.tokenizer, 2, 3
        assert t.encode_prompt("[CLS] {query} [SEP] {document}", query="rain", document="[SEP] spain") == \
            [cls, cls, *t.encode("rain", False), sep, *t.encode("[SEP] spain", False)]


def test_rerank_command(cross_encoder, tmp_path):
    path, texts = cross_encoder[0], ["Jane Austen wrote Emma", "rain in Spain", "did it rain"]
    out = result(ggjit, "rerank", "-m", path, "-t", 1, "Who wrote Emma", *texts)
    with load_model(path, n_threads=1) as m:
        scores = m.rerank("Who wrote Emma", texts)
    assert [r["index"] for r in out["results"]] == np.argsort(-scores, kind="stable").tolist()
    assert out["results"][0]["score"] == float(scores.max())
    (tmp_path / "t.txt").write_text("\n".join(texts))
    got = ggjit("rerank", "-m", path, "-t", 1, "--input", tmp_path / "t.txt", "--top", 1, "Who wrote Emma").stdout
    assert texts[scores.argmax()] in got and len(got.strip().splitlines()) == 1
