"""Model files: GGUF, safetensors, Silero's form, WAV; read, mapped and written."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
