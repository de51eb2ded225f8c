"""Rerankers of Hugging Face folders: the names of their classifier's tensors, and their metadata.

    bert.pooler.dense, classifier                   BERT            \\
    classifier.dense, classifier.out_proj           RoBERTa          >  cls, cls.norm, cls.output
    head.dense, head.norm, classifier               ModernBERT      /
    rows "yes" and "no" of the output matrix        Qwen3-Reranker      cls.output
    score, beside a row of zeros                    Qwen 3 for sequence classification: the same probability
"""
import numpy as np

from ggjit.models.convert.tensors import ConvertedTensor, same
from ggjit.models.convert.vocabulary import read_json
from ggjit.ops.core.errors import ModelError

CLASSIFIER = "ForSequenceClassification"
OUT = "cls.output.weight"
ANSWERS = "yes", "no"
# Source: the model card of Qwen3-Reranker, with the instruction it states for searching
PROMPT = ("<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
          "provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: "
          "Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: "
          "{document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def classifies(config):
    """Is it a network with a classifier of whole texts?"""
    return (config.get("architectures", default=[None]) or [""])[0].endswith(CLASSIFIER)


def is_qwen3_reranker(config):
    """Does the folder's name, its README or its architecture say so?"""
    readme = config.path.parent / "README.md"
    text = readme.read_text("utf-8", "replace").lower() if readme.is_file() else ""
    return "qwen3-reranker" in config.path.parent.resolve().name.lower() or "# qwen3-reranker" in text or \
        classifies(config)


def add_rank(w, gguf, config):
    """Pooling by the classifier, and the names of its classes."""
    w.add_pooling_type(gguf.PoolingType.RANK)
    labels = config.get("id2label", default={"0": "LABEL_0"})
    if len(labels) > 1:
        w.add_array(f"{w.arch}.classifier.output_labels", [labels[key] for key in sorted(labels, key=int)])


def add_qwen3_rank(w, gguf):
    w.add_pooling_type(gguf.PoolingType.RANK)
    w.add_array(f"{w.arch}.classifier.output_labels", list(ANSWERS))
    w.add_string("tokenizer.chat_template.rerank", PROMPT)


def bert_classifier(name):
    """BERT's pooler belongs to the classifier."""
    if name.startswith("classifier."):
        return name.replace("classifier.", "classifier.out_proj.")
    return name.replace("pooler.dense.", "classifier.dense.")


def modern_bert_classifier(name):
    return name.replace("classifier.", "classifier.out_proj.").replace("head.dense.bias", "classifier.dense.bias")


def qwen3_change(c, name, x):
    """The output matrix stays, its rows of the two answers are the classifier as well."""
    if name == "score.weight":
        if len(x) != 1:
            raise ModelError(f"{c.path}: a classifier of {len(x)} classes; a reranker's has one")
        return [ConvertedTensor(OUT, (2, *x.shape[1:]), (x, np.zeros_like(x)))]
    tied = c.get("tie_word_embeddings", default=False)
    if name != ("model.embed_tokens.weight" if tied else "lm_head.weight") or classifies(c):
        return None
    vocabulary = read_json(c.path.parent / "tokenizer.json")["model"]["vocab"]
    ids = [vocabulary.get(word, -1) for word in ANSWERS]
    if not all(0 <= i < len(x) for i in ids):
        raise ModelError(f"{c.path.parent / 'tokenizer.json'}: no tokens {' and '.join(map(repr, ANSWERS))}, which a "
                         f"Qwen3 reranker answers with")
    return [*same(name, x), ConvertedTensor(OUT, (2, *x.shape[1:]), tuple(x[i:i + 1] for i in ids))]
