"""Models of other formats as GGUF files.

    convert.py          convert_folder: config.json, tokenizer.json, *.safetensors -> a GGUF file
    config.py           config.json
    common_metadata.py  metadata that most architectures have
    metadata.py         metadata of each architecture
    families.py         the table of architectures: metadata, changes, names
    tensors.py          what changes in the tensors
    whisper.py          Whisper: folders of Hugging Face and CTranslate2; whisper_package.py: base, from pip packages
    mmproj.py           vision parts of folders of Hugging Face
    moonshine.py        Moonshine: folders of Hugging Face
    rerank.py           classifiers of rerankers
    vocabulary.py       tokenizer.json or tokenizer.model -> tokenizer.ggml.*
"""
