"""How long it takes to predict the memory of large files without their weights: python -m benchmarks.announcing

The files hold metadata and the names, types and shapes of their tensors; the weights are a hole behind them, which
takes no space on the disk.  Weights that were read would show in `read`, MiB of files that came into memory.
Processor time of one thread in a process of its own for each file, importing left out: the first call, and the fastest
of the others.  The target is 1 s.
"""
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks.synth import TYPES, Shape, gguf_package, write_head
from benchmarks.vision import ENCODERS, add_keys
from ggjit.core.process_memory import process_memory
from ggjit.models.files.gguf import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS, GGUFFile
from ggjit.models.networks.finetune import new_adapter
from ggjit.models.networks.peak import model_peak

REPEATS, N_CTX, N_PARTS, MIB = 3, 8192, 5, 1 << 20
LARGE = Shape(8192, 80, 64, 8, 28672, 128256, N_CTX, tied=False)


@dataclasses.dataclass(frozen=True)
class Mixture(Shape):
    """A Shape whose feed-forward parts are experts, each of n_ff."""
    n_expert: int = 384

    def matrices(self):
        """(name, experts and rows, columns)"""
        for name, rows, columns in super().matrices():
            is_expert = "ffn" in name
            yield name.replace(".weight", "_exps.weight") if is_expert else name, \
                self.n_expert * rows if is_expert else rows, columns
        for i in range(self.n_layer):
            yield f"blk.{i}.ffn_gate_inp.weight", self.n_expert, self.d


MIXTURE = Mixture(7168, 61, 64, 8, 2048, 163840, N_CTX, tied=False)
VISION = dataclasses.replace(ENCODERS["siglip-b"], n_out=LARGE.d)          # its projector, as wide as the model
GPUS = {"GPU0": "24G", "GPU1": "24G"}
# {what: (shape, parts of the file, has an adapter, options of model_peak)}
CASES = {
    "llama of 70B": (LARGE, 1, False, {}),
    f"the same in {N_PARTS} parts": (LARGE, N_PARTS, False, {}),
    "the same with an adapter of rank 4": (LARGE, 1, True, {}),
    "the same with SigLIP and a picture of 1920 x 1080": (LARGE, 1, False, {"image": (1920, 1080)}),
    "the same, two GPUs of 32 GB": (LARGE, 1, False, {"devices": {"GPU0": "32G", "GPU1": "32G"}}),
    "a mixture of 1T, 384 experts": (MIXTURE, 1, False, {}),
    "the same, experts on the CPU, two GPUs": (MIXTURE, 1, False, {"devices": GPUS, "cpu_moe": True}),
}


def write_hole(path, s, n_parts):
    """Path of the first part of a GGUF of shape s in Q4_0 whose weights are a hole."""
    gguf, (kind, file_type) = gguf_package(), TYPES["Q4_0"]
    tensors = [(name, rows, columns, kind) for name, rows, columns in s.matrices()]
    tensors += [(name, 1, s.d, None) for name in s.vectors()]
    paths = [path if n_parts == 1 else path.with_name(f"{path.stem}-{k + 1:05}-of-{n_parts:05}.gguf")
             for k in range(n_parts)]
    for k, part in enumerate(paths):
        w = gguf.GGUFWriter(part, "llama")
        if k == 0:
            write_head(w, s, path.stem, file_type)
            w.add_tokenizer_model("no_vocab")
            if isinstance(s, Mixture):
                w.add_expert_count(s.n_expert)
                w.add_expert_used_count(8)
        if n_parts > 1:
            w.add_uint16(SPLIT_NO, k)
            w.add_uint16(SPLIT_COUNT, n_parts)
            w.add_int32(SPLIT_TENSORS, len(tensors))
        _end_with_hole(w, part, [_info(s, *tensor) for tensor in tensors[k::n_parts]])
    return paths[0]


def write_vision_hole(path):
    """The same of the vision part VISION, in F16."""
    w = gguf_package().GGUFWriter(path, "clip")
    add_keys(w, VISION)
    tensors = [(name, shape, np.dtype(np.float16 if len(shape) > 1 else np.float32), None)
               for name, shape in VISION.tensors().items()]
    _end_with_hole(w, path, tensors)
    return path


def _info(s, name, rows, columns, type):
    """(name, shape, type in NumPy, type in the file) of a tensor."""
    row = 4 * columns if type is None else type.row_nbytes(columns)
    shape = (columns,) if type is None else (rows, row)
    if "_exps" in name:
        shape = s.n_expert, rows // s.n_expert, row
    return name, shape, np.dtype(np.float32 if type is None else np.uint8), type


def _end_with_hole(w, path, tensors):
    """Write the head with these tensors, and a hole in place of their values."""
    end = 0
    for name, shape, dtype, type in tensors:
        nbytes = dtype.itemsize * math.prod(shape)
        w.add_tensor_info(name, shape, dtype, nbytes,
                          raw_dtype=None if type is None else gguf_package().GGMLQuantizationType(type.id))
        end += -(-nbytes // 32) * 32
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    w.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + end)


def child(what, path, adapter, vision):
    """The figures of a case, in a process of its own."""
    options = dict(CASES[what][3], n_ctx=N_CTX, flash=True, n_threads=1, lora=[(adapter, 1.0)] if adapter else (),
                   vision=vision or None)
    before, seconds = process_memory().file, []
    for _ in range(REPEATS):
        t0 = time.process_time()
        memory = model_peak(path, **options).memory
        seconds.append(time.process_time() - t0)
    devices = {name: sum(terms.values()) / MIB for name, terms in memory.devices.items()}
    return {"first": seconds[0], "again": min(seconds[1:]), "read": (process_memory().file - before) / MIB,
            "total": memory.total / MIB, "devices": devices}


def main():
    print("| file | GB | process, MiB | GPUs, MiB | first, s | again, s | read, MiB |\n" + "| --- " * 7 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for what, (shape, n_parts, has_adapter, options) in CASES.items():
            path, adapter = write_hole(pathlib.Path(folder, "m.gguf"), shape, n_parts), pathlib.Path(folder, "a.gguf")
            vision = write_vision_hole(pathlib.Path(folder, "mmproj.gguf")) if "image" in options else ""
            nbytes = sum(p.stat().st_size for p in pathlib.Path(folder).glob("m*.gguf"))
            if has_adapter:
                new_adapter(GGUFFile(path), ("attn_q", "attn_v"), 4, 8, 0).save(adapter)
            run = subprocess.run([sys.executable, "-m", "benchmarks.announcing", "--child", what, str(path),
                                  str(adapter) * has_adapter, str(vision)], check=True, text=True, capture_output=True)
            d = json.loads(run.stdout)
            print(f"| {what} | {nbytes / 1e9:.0f} | {d['total']:,.0f} | "
                  f"{', '.join(f'{n:,.0f}' for n in d['devices'].values())} | {d['first']:.2f} | {d['again']:.2f} | "
                  f"{d['read']:.0f} |", flush=True)
            for p in pathlib.Path(folder).iterdir():
                p.unlink()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(*sys.argv[2:])))
    else:
        main()
