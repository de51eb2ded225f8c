"""What several tensor types share: block decoders, dot products, quantiser searches, rows of elements."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
