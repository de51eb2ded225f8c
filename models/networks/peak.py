"""Peak memory of a model, from its file's metadata or from shapes alone: nothing is allocated, no weight is read
from the disk.

    report = model_peak("model.gguf", n_ctx=4096, n_batch=512, flash=True)
    report.kinds        # weights, repacked weights, KV cache, compute, kernel work: bytes
    what_if("model.gguf", n_ctx=(2048, 4096), n_batch=(128, 512))
    explore_model("llama-70b", n_ctx=(2048, 4096)).save("plans.html")
"""
import itertools
import os
import time

import numpy as np

from ggjit.api.explore import explore
from ggjit.api.measure_memory import kernel_work_nbytes, measured
from ggjit.api.null_device import NullDevice
from ggjit.api.what_if import checked
from ggjit.core.arguments import nbytes_of, nearest
from ggjit.core.process_memory import process_memory, resident_now
from ggjit.models.files.gguf import TensorInfo
from ggjit.models.files.whisper_file import open_model
from ggjit.models.networks.base.load_options import LoadOptions
from ggjit.models.networks.base.memory import MemoryUse, expected
from ggjit.models.networks.load import EMBEDDED, network_of
from ggjit.models.networks.placement.offload import names_devices
from ggjit.ops.core.errors import BadFile, ModelError, ParamError, TypeMismatch
from ggjit.ops.core.progress import work
from ggjit.ops.core.types import BY_NAME

#                 dim   layers heads kv  ffn    vocab   context
SHAPES = {
    "llama-7b": (4096, 32, 32, 32, 11008, 32000, 4096),
    "llama-3-8b": (4096, 32, 32, 8, 14336, 128256, 8192),
    "llama-13b": (5120, 40, 40, 40, 13824, 32000, 4096),
    "llama-70b": (8192, 80, 64, 8, 28672, 32000, 4096),
    "tinyllama-1.1b": (2048, 22, 32, 4, 5632, 32000, 2048),
}


def _unknown(name):
    return ModelError(f"{str(name)!r} is neither a file nor a shape{nearest(str(name), SHAPES)}; shapes: "
                      f"{', '.join(SHAPES)}")


class ShapeFile:
    """A llama as a GGUFFile would present it, made of shapes; its tensors have types and sizes but no bytes."""

    arch, state = "llama", None

    def __init__(self, name, weight_type="q4_0"):
        if name not in SHAPES:
            raise _unknown(name)
        dim, n_layer, n_head, n_head_kv, n_ff, n_vocab, n_ctx = SHAPES[name]
        self.path, self.parts = f"{name} ({weight_type})", (self,)
        self.metadata = {f"llama.{k}": v for k, v in {
            "context_length": n_ctx, "embedding_length": dim, "block_count": n_layer, "feed_forward_length": n_ff,
            "attention.head_count": n_head, "attention.head_count_kv": n_head_kv,
            "attention.layer_norm_rms_epsilon": 1e-5}.items()}
        self.read_keys = frozenset(self.metadata)
        kv = dim // n_head * n_head_kv
        shapes = {"token_embd": (dim, n_vocab), "output_norm": (dim,), "output": (dim, n_vocab)}
        for i in range(n_layer):
            shapes |= {f"blk.{i}.{k}": ne for k, ne in {
                "attn_norm": (dim,), "attn_q": (dim, dim), "attn_k": (dim, kv), "attn_v": (dim, kv),
                "attn_output": (dim, dim), "ffn_norm": (dim,), "ffn_gate": (dim, n_ff), "ffn_up": (dim, n_ff),
                "ffn_down": (n_ff, dim)}.items()}
        self.tensors, offs = {}, 0
        for k, ne in shapes.items():
            kind = BY_NAME[weight_type if len(ne) > 1 else "f32"]
            nbytes = int(kind.row_nbytes(ne[0]) * np.prod(ne[1:], dtype=np.int64))
            self.tensors[k + ".weight"] = TensorInfo(k + ".weight", kind, ne, offs, nbytes)
            offs += nbytes
        self.nbytes = offs

    def map(self):
        """As many bytes as the file would have, none of them real."""
        return np.broadcast_to(np.uint8(0), (self.nbytes,))

    def get(self, key, default=..., kind=None):
        """A key of the metadata that need not be there."""
        return self.metadata.get(key, default)

    def arch_get(self, key, default=..., kind=None):
        value = self.metadata.get(f"llama.{key}", default)
        if value is ...:
            raise BadFile(f"{self.path}: key llama.{key} is missing")
        return value


def model_file(model):
    if isinstance(model, ShapeFile):
        return model
    model = EMBEDDED if model is None else model
    if not isinstance(model, str | os.PathLike):
        raise TypeMismatch(f"a model is planned from its file: expected a path, got {type(model).__name__}; of a "
                           f"network that was loaded, m.file.path")
    if model in SHAPES:
        return ShapeFile(model)
    if not os.path.exists(model):
        raise _unknown(model)
    return open_model(model)


def model_peak(model, n_ctx=None, n_batch=512, flash=False, planner="best", order="graph", kv_type="F16",
               all_logits=False, n_threads=1, time_limit=1.0, repack=None, strict=True, what_if=(), lora=(),
               n_gpu_layers=None, cpu_moe=False, override_tensor=(), devices=(), arena=None, vision=None, image=None,
               n_seqs=None, n_cells=None, draft=None):
    """The MeasureReport of a model's largest graph: a full batch whose last token is the last of the context.

    model: a GGUF path (None: the model of the package), a name in SHAPES, or a ShapeFile.  all_logits: keep logits of
    every token of the batch, as llama.cpp reserves them.  strict, lora, arena, n_seqs, n_cells: as load_model; a server
    of N texts has n_seqs=N, and n_cells up to N * n_ctx.  what_if: as gg.measure's.  `.kinds` tells weights, KV cache,
    compute arena and kernel work apart.

    `.memory`: a MemoryUse, what a process that loads the model so and reads a context of tokens takes in all, by term,
    as `m.memory()` of the loaded model has it; with all_logits, the logits of all these tokens are handed out.  Its
    compute arena is that of load_model, which has planner "ggml".

    devices: {name: bytes} of GPUs that need not be here, such as {"GPU0": "24G", "GPU1": "16GiB"}; n_gpu_layers (-1:
    all), cpu_moe, override_tensor: what lies there, as load_model.  `.memory.devices` is then each one's share, by a
    Scheduler on NULL devices of these sizes; layers are divided by size, as llama.cpp does.
    Errors: OutOfMemory where a share does not fit its device.

    vision: path of the vision part, an mmproj file; image: (width, height) of a picture that it reads: its terms are
    those that begin with "picture".

    draft: a model that guesses (`m.generate(speculative=)`), in a context of as many tokens; `.memory` is that of both.
    """
    if (vision is None) != (image is None):
        raise ParamError("a picture's memory: give the vision part and the picture's size, --mmproj FILE --image WxH")

    t0 = time.perf_counter()
    with null_network(model_file(model), devices, n_ctx=n_ctx, n_batch=n_batch, flash=flash, kv_type=kv_type,
                      repack=repack, strict=strict, lora=lora, n_gpu_layers=n_gpu_layers, cpu_moe=cpu_moe,
                      override_tensor=override_tensor, arena=arena, vision=vision, n_seqs=n_seqs, n_cells=n_cells) as m:
        graph = m.within_arena(m.largest_graph(all_logits))
        report = measured(graph, planner, order=order, time_limit=time_limit, title=str(m.file.path),
                          what_if=checked(what_if), compared=True, repacked=m.weights.repacked)
        work = kernel_work_nbytes(graph, n_threads, m.weights.repacked)
        n_logits = m.n_ctx if all_logits and m.CAUSAL else m.n_rows_held
        if image is not None and m.vision is None:
            raise ParamError(f"{vision} sees nothing; leave image out")
        seen, work_of_seen = ([], 0) if image is None else of_picture(m.vision, *image, n_threads)
        work = max(work, work_of_seen)                          # one buffer for both
        terms = expected(m, graph, arenas(m, graph, report), work, n_logits, resident_now())
        report.memory = MemoryUse(terms + seen, process_memory(), str(m.file.path))
        repacked = m.weights.repacked_nbytes
        report.kinds = {"weights": m.weights.nbytes - repacked, "repacked weights": repacked,
                        "KV cache": getattr(m, "kv_nbytes", 0), "compute": report.peak,
                        "kernel work": work, **{term.name: term.nbytes for term in seen if term.nbytes}}
        report.n_ctx, report.n_cells = getattr(m, "n_ctx", 0), getattr(m, "n_cells", 0)
    if draft is not None:
        guessing = model_peak(draft, n_ctx, flash=flash, n_threads=n_threads, strict=strict).memory
        report.memory += guessing.without_tokenizer()
    report.total_seconds = time.perf_counter() - t0
    return report


def of_picture(vision, width, height, n_threads):
    """([MemoryTerm], bytes of kernel work) of a vision part on the NULL device, once it has read a picture of that
    size."""
    graphs = [vision.graph(*shape) for shape in vision.shapes_of(width, height)]
    largest = max(graphs, key=lambda graph: vision._allocator.plan(graph).peak)
    terms = expected(vision, largest, arenas(vision, largest), 0, 0, (0, 0))
    return vision.named_terms(terms), max(kernel_work_nbytes(g, n_threads, vision.weights.repacked) for g in graphs)


def null_network(file, devices=(), n_gpu_layers=None, **options):
    """The network of an opened file on NULL devices.  devices, n_gpu_layers: as model_peak; options: of LoadOptions."""
    gpus = null_devices(devices)
    placed = {"n_gpu_layers": n_gpu_layers, "override_tensor": names_devices(options.get("override_tensor"))}
    if not gpus and any(placed.values()):
        raise ParamError(f"{next(filter(placed.get, placed))}: say which devices there are, "
                         'devices={"GPU0": "24G"}')
    if gpus:
        options |= {"gpus": gpus, "n_gpu_layers": -1 if n_gpu_layers is None else n_gpu_layers}
    host = NullDevice("host", host=True).init_backend() if gpus else "NULL"
    return network_of(file, LoadOptions(backend=host, reserve=False, **options))


def null_devices(sizes):
    """(NullBackend, ...) of the devices argument of model_peak."""
    return tuple(NullDevice(name, nbytes).init_backend() for name, nbytes in device_sizes(sizes).items())


def device_sizes(sizes):
    """{name: bytes} of {name: bytes, or a text such as "24G"}.  Errors: ParamError, TypeMismatch."""
    if not isinstance(sizes, dict | tuple | list) or sizes and not isinstance(sizes, dict):
        raise TypeMismatch(f"devices takes {{name: bytes}}, got {type(sizes).__name__}")
    return {str(name): nbytes_of(size, f"devices: {name}") for name, size in dict(sizes).items()}


def arenas(m, graph, report=None):
    """{device or None for the host: bytes of the arena that load_model makes there}"""
    if m.scheduler is not None:
        m.scheduler.reserve(graph)
        sizes = {b: m.scheduler.buffer_size(b) for b in m.scheduler.backends}
        return {None if b is m.backend else b.device.name: n for b, n in sizes.items()}
    return {None: report.peak if report is not None and report.planner == "ggml" else m._allocator.plan(graph).peak}


def what_if(model, n_ctx=(None,), n_batch=(128, 512), flash=(False, True), planner=("ggml", "best"), **options):
    """[{n_ctx, n_batch, flash, planner, peak, lower_bound, kv, total}] over all combinations; bytes."""
    rows, every = [], list(itertools.product(n_ctx, n_batch, flash, planner))
    with work("measuring", len(every)) as step:
        for ctx, batch, fl, pl in every:
            r = model_peak(model, ctx, batch, fl, pl, **options)
            rows.append({"n_ctx": ctx, "n_batch": batch, "flash": fl, "planner": pl, "peak": r.peak,
                         "lower_bound": r.lower_bound, "kv": r.kinds["KV cache"], "total": sum(r.kinds.values())})
            step()
    return rows


def explore_model(model, n_ctx=(None,), n_batch=(1, 128, 512), flash=(False, True), planner=("best", "ggml"),
                  strict=True, **options):
    """gg.explore of a model's largest graph: drag context, batch, flash attention and planner.

    model: as model_peak's.  n_ctx, n_batch, flash, planner: a value each, or several.  options: those of gg.explore.
    Nothing is allocated, no weight is read.  Errors: those of model_peak and gg.explore.
    """
    file, networks = model_file(model), []

    def build(n_ctx, n_batch, flash):
        while networks:                             # networks whose graphs have been measured are freed
            networks.pop().free()
        m = network_of(file, LoadOptions("NULL", strict=strict, n_ctx=n_ctx, n_batch=n_batch, flash=flash))
        networks.append(m)
        return m.largest_graph(), {"weights": m.weights.nbytes, "KV cache": getattr(m, "kv_nbytes", 0)}
    try:
        return explore(build, planner, n_ctx=n_ctx, n_batch=n_batch, flash=flash, title=str(file.path), **options)
    finally:
        while networks:
            networks.pop().free()
