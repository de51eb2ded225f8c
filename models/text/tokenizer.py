"""Text <-> token ids, from a GGUF file's own metadata.

    text -- cut at special tokens --> parts -- engine of the vocabulary's kind --> ids
    ids  -- bytes of each piece ----> UTF-8 text; StreamDecoder gives it out as soon as characters are whole

The kinds (`tokenizer.ggml.model`) are a file each; what they share is vocabulary.py.  Nothing is built until text is
encoded, so a model that is only given ids pays nothing, and a file whose vocabulary is absent or unknown still loads.
Source: llama.cpp's llama-vocab.cpp for what the metadata mean, the models' own tokenizers for what comes out.
"""
from ggjit.models.text.bpe import BPE, BYTE_OF_CHAR, Gemma4, HybridDNA, Whitespace
from ggjit.models.text.prefixes import RWKV, PLaMo2
from ggjit.models.text.sentencepiece import SentencePiece
from ggjit.models.text.unigram import Unigram
from ggjit.models.text.vocabulary import KEY, KINDS, Absent, StreamDecoder, Tokenizer
from ggjit.models.text.wordpiece import WordPiece

__all__ = ["BPE", "BYTE_OF_CHAR", "KINDS", "RWKV", "Absent", "Gemma4", "HybridDNA", "PLaMo2", "SentencePiece",
           "StreamDecoder", "Tokenizer", "Unigram", "Whitespace", "WordPiece"]


# anonymous bytes for each token, and each merge of byte-pair encodings, and of the library whatever it holds; measured
# with vocabularies of 8,000 to 128,000 tokens
NBYTES_PER_TOKEN, PER_MERGE, LIBRARY = {"gpt2": 230, "llama": 550, "bert": 360}, 230, (1 << 20, 5 << 20)
WITHOUT_MERGES = 155            # for each token of Whisper's vocabulary, which needs no library


def tokenizer_nbytes(file):
    """(anonymous, file) bytes that the tokenizer of a file is expected to take once a text was encoded."""
    n_tokens, n_merges = (len(file.metadata.get(KEY + name, ())) for name in ("tokens", "merges"))
    if not n_tokens:
        return 0, 0
    kind = file.metadata.get(KEY + "model")
    if kind == "gpt2" and not n_merges:
        return WITHOUT_MERGES * n_tokens, 0
    each = NBYTES_PER_TOKEN.get(kind, max(NBYTES_PER_TOKEN.values()))
    return LIBRARY[0] + each * n_tokens + PER_MERGE * n_merges, LIBRARY[1]
