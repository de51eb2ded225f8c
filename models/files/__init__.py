"""Model files, read, mapped and written.

    gguf.py             the GGUF format: metadata and where each tensor lies
    mapped_file.py      a file as memory: mapped, and given back page by page; missing.py: what to do where none is
    weights.py          a network's weights over the mapped file, repacked or moved to another device; own_weights.py:
                        those a worker has itself; kept_layout.py: repacked ones on disk, for the next load
    adapter.py          LoRA adapters; control_vector.py: control vectors
    load_tensors.py     GGUF and safetensors as plain tensors; save.py writes both
    rewrite.py          files made from others: quantised (mixtures.py: which types), edited, split, joined
    quantized_part.py   matrices of a file in another type, in memory
    imatrix.py          importance matrices
    minilm.py           MiniLM's GGUF, made from a package; silero_file.py: Silero's form; wav.py: recordings
    smollm2.py          the model that chats, in its pip package
    bin_cursor.py       a bounded reader of whisper.cpp's forms; whisper_file.py: one of them as if it were a GGUF;
                        ct2_file.py: CTranslate2's
    sound.py            recordings of any length, format and rate; mel.py, short_mel.py: their spectrograms
    picture.py          pictures of any format; resample.py: in other sizes
"""
