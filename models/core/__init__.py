"""What all folders of models use: checks of arguments (checks.py), GPT-2's way to write bytes (byte_chars.py)."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
