"""Programs on top of the engine and its models: the command line and the op suite."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
