"""Models of other formats as GGUF files.

    convert.py          convert_folder: config.json, tokenizer.json, *.safetensors -> a GGUF file
    families.py         architectures: metadata from config.json, and what changes in their tensors
    vocabulary.py       tokenizer.json or tokenizer.model -> tokenizer.ggml.*
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
