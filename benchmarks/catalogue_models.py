"""Whole models next to llama.cpp and onnxruntime.

Speeds are llama-bench's: pp = one prompt from an empty cache, logits of its last token; tg = tokens one at a time from
an empty cache; KV cache F16.
"""
from benchmarks import synth
from benchmarks.work import Model, reference_file
from ggjit.models.files.minilm import minilm_path

SHAPES = {"tinyllama": ("TinyLlama-1.1B shape", "tinyllama-1.1b"), "smollm": ("SmolLM-135M shape", "smollm-135m"),
          "0.5b": ("0.5B shape", "qwen2.5-0.5b-like")}
TYPES = "Q4_0", "Q8_0", "Q4_K_M", "Q6_K", "F16"
DECODE = {"wheel": 1.3, "ik": 1.1, "native": 1.3, "llamafile": None}
PREFILL = {"wheel": 2.0, "native": 2.0, "llamafile": None}
PREFILL_F16 = PREFILL | {"llamafile": 1.0}
N_DECODED = 16


def _models():
    for name, (text, shape) in SHAPES.items():
        for type in TYPES:
            def file(shape=shape, type=type):
                return synth.model_path(shape, type)
            key, text_of = f"{name}-{type.lower()}", f"{text} {type}"
            large = name == "tinyllama"
            yield Model(key=f"{key}-tg", text=f"{text_of}, decode", targets=DECODE, file=file,
                        measure="tg", n=N_DECODED, share=0.9 if large else None)
            for n in (128, 512):
                yield Model(key=f"{key}-pp{n}", text=f"{text_of}, prompt of {n}", file=file, measure="pp", n=n,
                            targets=PREFILL_F16 if type == "F16" else PREFILL,
                            share=0.75 if large and n == 512 else None, arithmetic="f32" if type == "F16" else "int8",
                            quick=(n == 128 and (name != "0.5b" or type == "Q4_0")) or key == "smollm-q4_0" or large)


def _minilm():
    for n in (16, 64, 256):
        yield Model(key=f"minilm-{n}", text=f"MiniLM F32, length {n}", file=lambda: str(minilm_path()),
                    measure="embed", n=n,
                    targets={"wheel": 2.5, "native": 2.0, "llamafile": None, "onnxruntime": 1.1})


STORIES = reference_file("data", "stories260k", "stories260K-F32.gguf")
WORKS = (*_models(), *_minilm(),
         Model(key="stories260k-tg", text="stories260K F32, decode (overhead)", file=STORIES, measure="tg", n=128,
               targets={"wheel": 3.0, "native": 2.0, "llamafile": None}))
