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
from ggjit.models.text.vocabulary import KINDS, Absent, StreamDecoder, Tokenizer
from ggjit.models.text.wordpiece import WordPiece

__all__ = ["BPE", "BYTE_OF_CHAR", "KINDS", "RWKV", "Absent", "Gemma4", "HybridDNA", "PLaMo2", "SentencePiece",
           "StreamDecoder", "Tokenizer", "Unigram", "Whitespace", "WordPiece"]
