"""Programs on top of the engine and its models.

    command/            the command line, `ggjit COMMAND`
    suite/              ggml's operator tests, run against ggjit (`ggjit ops`)
    release.py          makes the tag of a release (`python -m ggjit.tools.release`)
    stubs.py            writes the .pyi files (`python -m ggjit.tools.stubs`)
    ship_kernels.py     compiles the kernels that a wheel carries
    arm_code.py         the machine code of products for ARM processors, on any machine
    embedded_model.py   trains the model that the package carries
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
