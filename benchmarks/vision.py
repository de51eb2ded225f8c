"""Vision encoders beside llama.cpp's libmtmd: the time to encode one picture.

    python -m benchmarks.vision [--mtmd FOLDER] [--threads 1,2] [--types F16,Q8_0] [--rounds N] [--only NAME]
                                [--processor] > TABLE.md

Without --mtmd, libmtmd is that of the `xllamacpp` wheel.  --processor: processor time, for one thread on a machine that
is not idle.  The page that the program prints (ABOUT) explains its columns.
"""
import argparse
import ctypes as C
import dataclasses
import os
import pathlib
import sys
import time

import numpy as np

from benchmarks.engines import llama
from benchmarks.engines.peer import PACKAGE, llama_library
from benchmarks.machine import cpu_model, idle_check
from benchmarks.report import Spread
from benchmarks.synth import fresh_file, gguf_package
from benchmarks.worker import EngineError, Missing, Worker
from ggjit.models.networks.base.load_options import LoadOptions
from ggjit.models.networks.pictures.vision import Vision, VisionFile
from ggjit.ops.native.cache_files import cache_dir
from ggjit.tools.suite.ggml import libraries

ABOUT = """\
The table compares how long ggjit and llama.cpp's libmtmd take to encode one picture of the encoder's native size
(`python -m benchmarks.vision --mtmd FOLDER`). FOLDER has libmtmd and libllama, built from llama.cpp's source for this
processor. The networks have the shapes of the named models and random weights; where the table says "12 of 24 layers",
the others were left out. Both engines read the same file, run in processes of their own and take turns. Each time is a
median, with the minimum and the maximum in brackets. Resizing the picture is not timed.

- **ratio**: libmtmd's time divided by ggjit's. Above 1, ggjit is faster. **target** is the ratio to reach.
- **off by**: the largest difference between the two engines' vectors, divided by the largest value."""
TARGET = 1.5
N_OUT = 256                     # of the projector: small, since a decoder of that width is written, too
RECIPE = 2                      # raise it when the files change
N_BLOCK = 32                    # weights of a block of Q8_0
MARK = b"<__media__>"


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A vision network: projector, width, layers (of so many), heads, feed-forward size, pixels of a patch and of the
    field."""
    text: str
    projector: str
    d: int
    n_layer: int
    of: int
    n_head: int
    n_ff: int
    patch: int
    side: int
    merge: int = 1
    keys: tuple = ()
    gated: bool = False             # SiLU with a gate, and RMS norms; else GELU and layer norms
    n_out: int = N_OUT              # width of the decoder

    @property
    def n(self):
        """Patches of the field."""
        return (self.side // self.patch) ** 2

    def __str__(self):
        layers = f", {self.n_layer} of {self.of} layers" if self.n_layer < self.of else ""
        return f"{self.text}, {self.side} x {self.side}, {self.n} patches{layers}"

    def tensors(self):
        """{name: shape}"""
        d, out, of_norm = self.d, {}, ("weight",) if self.gated else ("weight", "bias")
        parts = {f"attn_{c}": (d, d) for c in ("q", "k", "v", "out")} | {"ffn_up": (self.n_ff, d),
                                                                        "ffn_down": (d, self.n_ff)}
        parts |= {"ffn_gate": (self.n_ff, d)} if self.gated else {}
        for i in range(self.n_layer):
            for name, shape in parts.items():
                out |= {f"v.blk.{i}.{name}.weight": shape, f"v.blk.{i}.{name}.bias": shape[:1]}
            out |= {f"v.blk.{i}.{ln}.{part}": (d,) for ln in ("ln1", "ln2") for part in of_norm}
        out |= {"v.patch_embd.weight": (d, 3, self.patch, self.patch)} | {f"v.post_ln.{part}": (d,) for part in of_norm}
        wide = d * self.merge ** 2
        if self.projector.startswith("qwen"):
            return out | {"v.patch_embd.weight.1": (d, 3, self.patch, self.patch), "mm.0.weight": (wide, wide),
                          "mm.0.bias": (wide,), "mm.2.weight": (self.n_out, wide), "mm.2.bias": (self.n_out,)}
        out |= {"v.patch_embd.bias": (d,), "v.position_embd.weight": (self.n, d)}
        if self.projector == "idefics3":
            return out | {"mm.model.fc.weight": (self.n_out, wide)}
        return out | {"mm.0.weight": (d, d), "mm.0.bias": (d,), "mm.2.weight": (self.n_out, d),
                      "mm.2.bias": (self.n_out,)}


ENCODERS = {
    "siglip-b": Encoder("SigLIP base (SmolVLM)", "idefics3", 768, 12, 12, 12, 3072, 16, 512, 4,
                        (("projector.scale_factor", 4), ("preproc_image_size", 512))),
    "clip-l": Encoder("CLIP ViT-L/14 (LLaVA 1.5)", "mlp", 1024, 12, 24, 16, 4096, 14, 336),
    "qwen2-vl": Encoder("Qwen2-VL", "qwen2vl_merger", 1280, 8, 32, 16, 5120, 14, 448, 2, (("spatial_merge_size", 2),)),
    "qwen2.5-vl": Encoder("Qwen2.5-VL", "qwen2.5vl_merger", 1280, 8, 32, 16, 3420, 14, 448, 2,
                          (("spatial_merge_size", 2), ("n_wa_pattern", 8)), gated=True),
}


def _drawn(name, shape):
    """float32, or float16 of a matrix."""
    rng = np.random.default_rng(len(name))
    if len(shape) == 1:
        return np.full(shape, "ln" in name and name.endswith("weight"), np.float32)
    rows = (rng.standard_normal((min(shape[0], 256), *shape[1:])) / np.prod(shape[1:]) ** 0.5).astype(np.float16)
    rows = np.resize(rows, shape)
    return rows.astype(np.float32) if "position" in name else rows          # which are added, not multiplied


def add_keys(w, e):
    """The metadata of an Encoder."""
    w.add_bool("clip.has_vision_encoder", True)
    w.add_bool("clip.use_silu" if e.gated else "clip.use_gelu", True)
    w.add_string("clip.projector_type", e.projector)
    keys = {"image_size": e.side, "patch_size": e.patch, "embedding_length": e.d, "block_count": e.n_layer,
            "feed_forward_length": e.n_ff, "attention.head_count": e.n_head, "projection_dim": e.n_out}
    for key, value in (keys | dict(e.keys)).items():
        w.add_uint32(f"clip.vision.{key}", value)
    w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for key in ("image_mean", "image_std"):
        w.add_array(f"clip.vision.{key}", [0.5] * 3)


def encoder_path(name, type):
    """Path of the vision part, written first if it is not there; type: of its matrices, F16 or Q8_0."""
    path, e, gguf = cache_dir() / "bench" / f"{name}-{type}-{RECIPE}.gguf", ENCODERS[name], gguf_package()
    if not path.exists():
        nbytes = sum(2 * int(np.prod(shape)) for shape in e.tensors().values())
        with fresh_file(path, nbytes) as partial:
            w = gguf.GGUFWriter(partial, "clip")
            add_keys(w, e)
            for tensor, shape in e.tensors().items():
                x, raw = _drawn(tensor, shape), None
                if type == "Q8_0" and x.dtype == np.float16 and x.ndim == 2 and x.shape[1] % N_BLOCK == 0:
                    raw = gguf.GGMLQuantizationType.Q8_0
                    x = gguf.quantize(x.astype(np.float32), raw)
                w.add_tensor(tensor, x, raw_dtype=raw)
            _finish(w)
    return str(path)


def decoder_path():
    """A decoder of one layer with a vocabulary of bytes: libmtmd takes a picture for a decoder alone."""
    path, gguf = cache_dir() / "bench" / f"decoder-{N_OUT}-{RECIPE}.gguf", gguf_package()
    if not path.exists():
        with fresh_file(path, 1 << 23) as partial:
            w = gguf.GGUFWriter(partial, "llama")
            for add, value in ((w.add_context_length, 64), (w.add_embedding_length, N_OUT), (w.add_block_count, 1),
                               (w.add_feed_forward_length, N_OUT), (w.add_head_count, 4), (w.add_head_count_kv, 4),
                               (w.add_rope_dimension_count, N_OUT // 4), (w.add_layer_norm_rms_eps, 1e-5)):
                add(value)
            # the characters that stand for bytes in a vocabulary of GPT-2's kind
            plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
            words = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]
            w.add_tokenizer_model("gpt2")
            w.add_tokenizer_pre("default")
            newline = chr(256 + 10)
            w.add_token_list([*words, "<s>", "</s>", *MARKS, 2 * newline])
            w.add_token_types([1] * 256 + [3] * (2 + len(MARKS)) + [1])
            w.add_token_merges([f"{newline} {newline}"])
            w.add_bos_token_id(256)
            w.add_eos_token_id(257)
            n = 259 + len(MARKS)
            matrices = {"token_embd": n, "output": n} | {f"blk.0.{part}": N_OUT for part in (
                "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
            for name, rows in matrices.items():
                w.add_tensor(f"{name}.weight", np.zeros((rows, N_OUT), np.float32))
            for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
                w.add_tensor(f"{name}.weight", np.ones(N_OUT, np.float32))
            _finish(w)
    return str(path)


MARKS = "<|vision_start|>", "<|vision_end|>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>"


def _finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def picture(e):
    """uint8 (side, side, 3)"""
    y, x = np.mgrid[:e.side, :e.side]
    return np.stack([(x + k * y) % 256 for k in range(3)], 2).astype(np.uint8)


# ---------------------------------------------------------------- engines
class Ours:
    def __init__(self, name, type, n_threads):
        self.vision = Vision(VisionFile(encoder_path(name, type)), LoadOptions(n_threads=int(n_threads)))
        self.field = picture(ENCODERS[name])

    def encode(self):
        return self.vision.encode_field(self.field)


class Params(C.Structure):
    """mtmd_context_params of this release; larger than it, since it travels by value."""
    _fields_ = [("use_gpu", C.c_bool), ("device", C.c_void_p), ("print_timings", C.c_bool), ("n_threads", C.c_int),
                ("markers", C.c_void_p * 2), ("flash", C.c_int), ("warmup", C.c_bool), ("rest", C.c_uint8 * 512)]


class Text(C.Structure):
    _fields_ = [("text", C.c_char_p), ("n", C.c_size_t), ("add_special", C.c_bool), ("parse_special", C.c_bool)]


class Mtmd:
    """Its vectors of the first field, without the making of the field."""

    def __init__(self, name, type, n_threads, folder=None):
        P = C.c_void_p
        llm, L = self._libraries(folder)
        for f, result, args in (
                ("mtmd_context_params_default", Params, ()), ("mtmd_log_set", None, (llama.LOG, P)),
                ("mtmd_init_from_file", P, (C.c_char_p, P, Params)),
                ("mtmd_bitmap_init", P, (C.c_uint32, C.c_uint32, C.c_char_p)), ("mtmd_input_chunks_init", P, ()),
                ("mtmd_tokenize", C.c_int32, (P, P, C.POINTER(Text), C.POINTER(P), C.c_size_t)),
                ("mtmd_input_chunks_size", C.c_size_t, (P,)), ("mtmd_input_chunks_get", P, (P, C.c_size_t)),
                ("mtmd_input_chunk_get_type", C.c_int, (P,)), ("mtmd_input_chunk_get_n_tokens", C.c_size_t, (P,)),
                ("mtmd_encode_chunk", C.c_int32, (P, P)), ("mtmd_get_output_embd", C.POINTER(C.c_float), (P,))):
            getattr(L, f).restype, getattr(L, f).argtypes = result, args
        self.log = llama.LOG(lambda level, text, data: None)
        llm.llama_log_set(self.log, None)
        L.mtmd_log_set(self.log, None)
        llm.llama_backend_init()
        self.model = llm.llama_model_load_from_file(os.fsencode(decoder_path()), llm.llama_model_default_params())
        params = L.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.warmup = False, int(n_threads), False
        self.context = L.mtmd_init_from_file(os.fsencode(encoder_path(name, type)), self.model, params)
        if not self.model or not self.context:
            raise EngineError(f"libmtmd does not load {encoder_path(name, type)}")
        self.L, self.chunk = L, self._first_chunk(L, picture(ENCODERS[name]))

    @staticmethod
    def _libraries(folder):
        """(llama's functions, libmtmd)"""
        llm = llama_library(folder)
        paths = sorted(pathlib.Path(folder).glob("libmtmd.*")) if folder else libraries(PACKAGE)
        if not paths:
            raise Missing(f"no libmtmd in {folder}")
        return llm, C.CDLL(str(paths[0]), mode=os.RTLD_LOCAL | os.RTLD_NOW)

    def _first_chunk(self, L, x):
        self.chunks, text = L.mtmd_input_chunks_init(), Text(MARK, len(MARK), False, True)
        bitmaps = (C.c_void_p * 1)(L.mtmd_bitmap_init(x.shape[1], x.shape[0], x.tobytes()))
        if L.mtmd_tokenize(self.context, self.chunks, C.byref(text), bitmaps, 1):
            raise EngineError("libmtmd takes no picture")
        chunks = (L.mtmd_input_chunks_get(self.chunks, i) for i in range(L.mtmd_input_chunks_size(self.chunks)))
        return next(chunk for chunk in chunks if L.mtmd_input_chunk_get_type(chunk) == 1)

    def encode(self):
        if self.L.mtmd_encode_chunk(self.context, self.chunk):
            raise EngineError("libmtmd encodes no picture")
        n = self.L.mtmd_input_chunk_get_n_tokens(self.chunk)
        return np.ctypeslib.as_array(self.L.mtmd_get_output_embd(self.context), (n, N_OUT))


class Engine:
    """The far end of a Worker."""

    def __init__(self, kind, *args):
        self.engine = {"ours": Ours, "mtmd": Mtmd}[kind](*args)

    def about(self):
        return {}

    def seconds(self, processor):
        clock = time.process_time if processor else time.perf_counter
        t0 = clock()
        self.engine.encode()
        return clock() - t0

    def vectors(self):
        """Some of the numbers, and the largest."""
        x = self.engine.encode()
        return x[::7, :5].tolist(), float(abs(x).max())


# ---------------------------------------------------------------- the table
def row(name, type, n_threads, args, log):
    """A line of the table."""
    encoder_path(name, type), decoder_path()
    env, about = {"RAYON_NUM_THREADS": "1"}, (name, type, str(n_threads))
    folder = [args.mtmd] if args.mtmd else []
    with Worker("vision", "ours", *about, **env) as ours, Worker("vision", "mtmd", *about, *folder, **env) as theirs:
        (a, largest), (b, _) = (engine.ask("vectors") for engine in (ours, theirs))     # which warms, too
        off = float(abs(np.array(a) - np.array(b)).max() / largest)
        times = {"ours": [], "theirs": []}
        for _ in range(args.rounds):
            for key, engine in (("ours", ours), ("theirs", theirs)):
                times[key].append(engine.ask("seconds", args.processor) * 1e3)
        x, y = (Spread(times[key], "ms") for key in times)
        log(f"{name}, {type}, {n_threads} thread(s): {x}, libmtmd {y}, off by {off:.1e} of the largest")
        return (f"| {ENCODERS[name]} | {type} | {n_threads} | {x} | {y} | {y.median / x.median:.2f} | {TARGET} | "
                f"{off:.1e} |")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mtmd")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--types", default="F16,Q8_0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(ENCODERS))
    parser.add_argument("--processor", action="store_true")
    args = parser.parse_args(argv)

    def log(line):
        print(line, file=sys.stderr, flush=True)
    peer = "libmtmd of a build of one's own" if args.mtmd else f"libmtmd of the {PACKAGE} wheel"
    print(f"# Vision encoders beside {peer}\n\n{ABOUT}\n\n{cpu_model()}. {'Processor time. ' * args.processor}"
          f"{idle_check('At the start')}.\n\n| encoder | type | threads | ggjit | libmtmd | ratio | "
          "target | off by, of the largest |\n|---|---|---|---|---|---|---|---|")
    for n_threads in map(int, args.threads.split(",")):
        for name in args.only.split(","):
            for type in args.types.split(","):
                print(row(name, type, n_threads, args, log), flush=True)
    print(f"\n{idle_check('At the end')}.")


if __name__ == "__main__":
    main()
