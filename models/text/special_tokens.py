"""Special tokens: by a file's token types, by its ids for roles, and by the texts that llama.cpp knows.

Files often call the tokens that end a turn ordinary or user-defined, and name only one of them, so llama.cpp goes by
their texts.  Source: llama-vocab.cpp, llama_vocab::impl::load.
"""
from dataclasses import dataclass

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)     # tokenizer.ggml.token_type

# tokens that end a turn or a document, whatever the file says
STOP_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
              "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]",
              "[EOS]", "</s>", "<eos>", "<turn|>", "<|tool_response>", "[e~[", "<｜end▁of▁sentence｜>")
# fill-in-the-middle tokens by role, where the file does not name one; padding and separators end a text, too
MIDDLE_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",)}
STOP_ROLES = ("bos", "eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")      # bos: models write it between documents
# gpt-oss: control tokens that are part of its answers
SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class SpecialTokens:
    """types: (n_vocab,), corrected where files are wrong; stop_ids: frozenset of the ids that end a text; middle:
    {role: id} of those of MIDDLE_TEXTS that the vocabulary has."""
    types: np.ndarray
    stop_ids: frozenset
    middle: dict


def specials(types, vocab, roles):
    """The SpecialTokens of a vocabulary: `types` of the file, `vocab` text -> id, `roles` role -> id or None."""
    types = types.copy()
    named = {role: id for role, id in roles.items() if id is not None}
    for role, texts in MIDDLE_TEXTS.items():
        if role not in named and (found := [vocab[text] for text in texts if text in vocab]):
            named[role] = found[0]
            types[found[0]] = CONTROL
    ends = {text: vocab[text] for text in STOP_TEXTS if text in vocab}
    types[list(ends.values())] = CONTROL
    types[[vocab[text] for text in SHOWN_TEXTS if text in vocab]] = USER_DEFINED
    stops = {named[role] for role in STOP_ROLES if role in named} | set(ends.values())
    # in two families a token that ends a turn elsewhere has another meaning
    if "<|end|>" in ends and ({"<|return|>", "<|call|>"} <= ends.keys()
                              or "<|flush|>" in ends and {"<|call|>", "<|calls|>"} & ends.keys()):
        types[ends["<|end|>"]] = USER_DEFINED
        stops.discard(ends["<|end|>"])
    if {"<|tool_response>", "</s>"} <= ends.keys():
        types[ends["</s>"]] = NORMAL
        stops.discard(ends["</s>"])
    return SpecialTokens(types, frozenset(stops), {role: named[role] for role in MIDDLE_TEXTS if role in named})


def space_stripping(pre, arch, model_name, vocab, special_ids):
    """(ids of tokens that strip white space to their left, of those that strip it to their right).  Files do not store
    this; llama.cpp decides it by the names of models."""
    def ids(*texts):
        return {vocab[text] for text in texts if text in vocab}
    if any(name in pre for name in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) \
            or any(name in arch for name in ("nomic-bert-moe", "jina-bert-v3")):
        return ids("<mask>"), set()
    if "phi-3" in model_name.lower() or "phi3" in model_name.lower():
        return set(), (set(special_ids) | ids("</s>")) - ids("<unk>", "<s>", "<|endoftext|>")
    return (ids("[MASK]") if "modern-bert" in model_name.lower() else set()), set()
