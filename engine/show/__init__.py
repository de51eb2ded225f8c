"""How objects look in a notebook: HTML of every object, drawings of graphs."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
