"""Text <-> token ids, and the choice of the next token.

    tokenizer.py        the vocabularies of GGUF files; pre_tokenizers.py: how text is split into words before
    generation.py       a text piece by piece; sampling.py chooses each token
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
