"""Real networks on the engine: GGUF files, tokenizers, bert, llama, sampling, Silero VAD, and the command line.

    from ggjit.models import load_model, load_vad
    m = load_model("model.gguf")
    for piece in m.generate("Once upon a time"): print(piece, end="")
    load_vad("silero.bin").segments(samples)            # where somebody speaks
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")

from ggjit.models.load import load_model
from ggjit.models.load_tensors import load_gguf, load_safetensors
from ggjit.models.save import save_gguf, save_safetensors


def __getattr__(name):
    """load_vad is imported when it is first asked for: commands start faster without it."""
    if name == "load_vad":
        from ggjit.models.silero import load_vad
        globals()[name] = load_vad
        return load_vad
    raise AttributeError(f"module 'ggjit.models' has no attribute {name!r}")
