"""Networks: bert, llama and kin, Silero VAD; what they share; how they are loaded and measured."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
