"""Performance models: the shapes of real networks with seeded random weights, as GGUF files in the cache folder.

    python -m benchmarks.synth tinyllama-1.1b Q4_0          # prints the path, writes the file if it is not there

Speed does not depend on what the weights are, only on their types and shapes; rows repeat after REPEAT, for some types
take a second to quantise a million values.  The same name and seed give the same float weights in every type; all
engines read the same file.  No vocabulary: these models take token ids.
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import os
import shutil
import zlib

import numpy as np

import ggjit as gg
from benchmarks.worker import Missing
from ggjit.ops.core.whole_file import whole_file
from ggjit.ops.native.cache_files import cache_dir

TYPES = {"F32": (gg.F32, 0), "F16": (gg.F16, 1), "Q4_0": (gg.Q4_0, 2), "Q8_0": (gg.Q8_0, 7),      # type, file_type
         "Q4_K_M": (gg.Q4_K, 15), "Q6_K": (gg.Q6_K, 18)}
SHORT_ROWS = {gg.Q4_K: gg.Q5_0, gg.Q6_K: gg.Q8_0}       # llama.cpp's choice where rows are no multiple of 256
REPEAT = 256
KEEP_FREE_NBYTES = 2 << 30          # of the disk, after the file is written
RECIPE = 2                          # raise it when the files change


@dataclasses.dataclass(frozen=True)
class Shape:
    """A llama: d_model, layers, heads, heads of K and V, feed-forward size, vocabulary, context; tied: no output."""
    d: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    tied: bool = True
    rope_base: float = 1e4

    def matrices(self):
        """(name, rows, columns)"""
        d, kv = self.d, self.d // self.n_head * self.n_head_kv
        yield "token_embd.weight", self.n_vocab, d
        if not self.tied:
            yield "output.weight", self.n_vocab, d
        for i in range(self.n_layer):
            for name, rows, columns in (
                    ("attn_q", d, d), ("attn_k", kv, d), ("attn_v", kv, d), ("attn_output", d, d),
                    ("ffn_gate", self.n_ff, d), ("ffn_up", self.n_ff, d), ("ffn_down", d, self.n_ff)):
                yield f"blk.{i}.{name}.weight", rows, columns

    def vectors(self):
        """Names of the norms' weights, d values each."""
        yield "output_norm.weight"
        for i in range(self.n_layer):
            yield f"blk.{i}.attn_norm.weight"
            yield f"blk.{i}.ffn_norm.weight"

    def kinds(self, type):
        """{matrix: tensor type} of a model of `type`; Q4_K_M mixes: Q6_K for the output and half of v and down."""
        kind, n = TYPES[type][0], self.n_layer
        precise = set()
        if type == "Q4_K_M":
            precise = {"token_embd.weight" if self.tied else "output.weight"} | {
                f"blk.{i}.{name}.weight" for i in range(n) for name in ("attn_v", "ffn_down")
                if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2}
        out = {}
        for name, _, columns in self.matrices():
            t = gg.Q6_K if name in precise else kind
            out[name] = SHORT_ROWS[t] if columns % t.block else t
        return out


SHAPES = {
    "tinyllama-1.1b": Shape(2048, 22, 32, 4, 5632, 32000, 2048, tied=False),
    "qwen2.5-0.5b-like": Shape(896, 24, 14, 2, 4864, 151936, 4096, rope_base=1e6),
    "smollm-135m": Shape(576, 30, 9, 3, 1536, 49152, 2048),
    "stories15m": Shape(288, 6, 6, 6, 768, 32000, 256),
    "llama-tiny": Shape(64, 2, 4, 2, 192, 512, 256),
}
LAYERS = 1, 2, 4, 8, 16, 32
SHAPES |= {f"layers-{n}": Shape(576, n, 9, 3, 1536, 512, 256) for n in LAYERS}     # how cost grows with layers


def model_path(shape, type):
    """Path of the model, written first if it is not there.  Missing where the disk or a package does not allow it."""
    path = cache_dir() / "bench" / f"{shape}-{type}-{RECIPE}.gguf"
    if not path.exists():
        kinds = SHAPES[shape].kinds(type)
        nbytes = sum(rows * kinds[name].row_nbytes(columns) for name, rows, columns in SHAPES[shape].matrices())
        with fresh_file(path, nbytes) as partial:
            _write(partial, shape, type)
    return str(path)


def vocabulary_path(n_words):
    """A GGUF file with the vocabulary of a byte-level BPE model of n_words tokens, and no tensors."""
    path = cache_dir() / "bench" / f"vocabulary-{n_words}-{RECIPE}.gguf"
    if not path.exists():
        with fresh_file(path, 64 * n_words) as partial:
            _write_vocabulary(partial, n_words)
    return str(path)


@contextlib.contextmanager
def fresh_file(path, nbytes):
    """A file of another name to write; it gets its own name when it is whole: no other process sees a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < nbytes + KEEP_FREE_NBYTES:
        raise Missing(f"{path.name} takes {nbytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free; "
                      f"GGJIT_CACHE_DIR chooses another place")
    with whole_file(path) as f:
        yield f.name


def gguf_package():
    try:
        import gguf
    except ImportError as e:
        raise Missing("gguf, which writes model files, is not installed (pip install gguf)") from e
    return gguf


def _write(path, shape, type):
    gguf, s = gguf_package(), SHAPES[shape]
    kinds, file_type = s.kinds(type), TYPES[type][1]
    w = gguf.GGUFWriter(path, "llama")
    write_head(w, s, f"synthetic {shape}", file_type)
    w.add_tokenizer_model("no_vocab")
    for name, rows, columns in s.matrices():
        nbytes = kinds[name].row_nbytes(columns)
        w.add_tensor_info(name, (rows, nbytes), np.dtype(np.uint8), rows * nbytes,
                          raw_dtype=gguf.GGMLQuantizationType(kinds[name].id))
    for name in s.vectors():
        w.add_tensor_info(name, (s.d,), np.dtype(np.float32), 4 * s.d)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for raw in _in_order(lambda m: _rows(kinds[m[0]], *m), s.matrices()):
        w.write_tensor_data(raw)
    for _ in s.vectors():
        w.write_tensor_data(np.ones(s.d, np.float32))
    w.close()


def write_head(w, s, name, file_type):
    w.add_name(name)
    w.add_vocab_size(s.n_vocab)
    w.add_context_length(s.n_ctx)
    w.add_embedding_length(s.d)
    w.add_block_count(s.n_layer)
    w.add_feed_forward_length(s.n_ff)
    w.add_head_count(s.n_head)
    w.add_head_count_kv(s.n_head_kv)
    w.add_rope_dimension_count(s.d // s.n_head)
    w.add_rope_freq_base(s.rope_base)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_file_type(file_type)


def _rows(type, name, rows, columns):
    raw = gg.quantize(type, values(name, min(rows, REPEAT), columns))
    return np.resize(raw.view(np.uint8), (rows, raw[0].nbytes))


def values(name, rows, columns, seed=0):
    """Normal weights; matrices are scaled so that activations keep their size from layer to layer."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    a = rng.standard_normal((min(rows, REPEAT), columns), np.float32)
    if name != "token_embd.weight":
        a *= np.float32(columns ** -0.5)
    return np.resize(a, (rows, columns))


def _in_order(work, items, n_ahead=3):
    """map(work, items) on all cores, a few items ahead of the reader."""
    items = iter(items)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        queue = [pool.submit(work, item) for item in itertools.islice(items, n_ahead)]
        while queue:
            yield queue.pop(0).result()
            queue += [pool.submit(work, item) for item in itertools.islice(items, 1)]


def _write_vocabulary(path, n_words):
    gguf = gguf_package()
    letters = "etaoinshrdlucmfwygpbvkxqjz"
    n_letters = math.ceil(math.log(n_words, len(letters))) + 1
    words = ["".join(w) for w in itertools.islice(itertools.product(letters, repeat=n_letters), n_words)]
    w = gguf.GGUFWriter(path, "llama")
    write_head(w, dataclasses.replace(SHAPES["llama-tiny"], n_vocab=n_words), f"vocabulary of {n_words} words", 0)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("default")
    w.add_token_list(words)
    w.add_token_types([gguf.TokenType.NORMAL] * n_words)
    w.add_token_merges([f"{x[:-1]} {x[-1:]}" for x in words])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    w.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", choices=TYPES)
    args = parser.parse_args()
    print(model_path(args.shape, args.type))
