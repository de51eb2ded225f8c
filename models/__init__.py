"""Real networks on the engine: GGUF files, tokenizers, bert, llama, sampling, and the command line.

    from ggjit.models import load_model
    m = load_model("model.gguf")
    for piece in m.generate("Once upon a time"): print(piece, end="")
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")

from ggjit.models.load import load_model
