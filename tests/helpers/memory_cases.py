"""Models and texts whose memory is announced, then taken, each in a process of its own (tests/models/test_memory.py).

    python -c "from helpers.memory_cases import main; main()" announced|taken NAME FOLDER
"""
import gc
import json
import os
import pathlib
import sys

import numpy as np

import ggjit as gg
from ggjit.core.process_memory import process_memory
from ggjit.models import load_model, load_speech, quantize_gguf, smollm2_path
from ggjit.models.files import kept_layout
from ggjit.models.files.minilm import minilm_path
from ggjit.models.networks.finetune import Finetuning, new_adapter
from ggjit.models.networks.parts.kv_cells import KV_STEP
from ggjit.models.networks.peak import model_peak
from ggjit.models.text.picture_prompt import ids_with_pictures
from ggjit.ops.native.jit import CACHE
from helpers import arch_files, devices
from helpers.paths import SHARED

WIDE = dict(vocab=8192, embd=256, ff=1024, blocks=4)            # sizes of random models: some 20 MB of weights


class Case:
    """model(folder) -> path; `options` of load_model; all_logits: are those of all tokens handed out?"""

    def __init__(self, model, n_ctx=512, all_logits=False, **options):
        self.model, self.n_ctx, self.all_logits, self.options = model, n_ctx, all_logits, options

    def announced(self, path, **more):
        o = {"flash": True, **self.options, **more}
        return model_peak(path, self.n_ctx, n_threads=1, all_logits=self.all_logits, **o).memory

    def load(self, path):
        return load_model(path, n_ctx=self.n_ctx, n_threads=1, **self.options)

    def run(self, m):
        """What the user holds afterwards."""
        if m.file.get("tokenizer.ggml.model", "no_vocab") != "no_vocab":
            m.tokenize("Once upon a time")
        ids = np.random.default_rng(3).integers(0, m.n_vocab, self.n_ctx)
        return m.logits(ids) if self.all_logits else m.decode(ids)

    def use(self, m):
        return m.memory()


class Together(Case):
    """n texts at once, as a server has them: short ones that are written, then long ones, which fill the cache."""

    def __init__(self, model, n_ctx, n, n_cells):
        super().__init__(model, n_ctx, n_seqs=n, n_cells=n_cells)
        self.n, self.longest = n, min(n_cells // n, n_ctx)

    def run(self, m):
        m.tokenize("Once upon a time")
        rng = np.random.default_rng(3)
        for n_prompt in (KV_STEP - 16, self.longest - 72):
            for _ in m.generate([rng.integers(0, m.n_vocab, n_prompt).tolist() for _ in range(self.n)],
                                n_predict=32, ignore_eos=True):
                pass


class Seeing(Case):
    """A text with a picture; what sees has 33 MB of weights."""
    SIDE, SIZES = 192, {"D": 320, "FF": 1280, "LAYERS": 4}

    def vision(self, path):
        from helpers import vision_files
        mmproj = pathlib.Path(path).with_suffix(".mmproj")
        if not mmproj.exists():
            vars(vision_files).update(self.SIZES)       # of this process alone
            vision_files.write("qwen25", mmproj)
        return mmproj

    def announced(self, path):
        return super().announced(path, vision=self.vision(path), image=(self.SIDE, self.SIDE))

    def load(self, path):
        return load_model(path, n_ctx=self.n_ctx, n_threads=1, vision=self.vision(path), **self.options)

    def run(self, m):
        from helpers.vision_files import picture
        ids = ids_with_pictures(m, "See <__media__>", [picture(1, self.SIDE, self.SIDE)])
        return m.decode([*ids, *np.random.default_rng(3).integers(0, 256, self.n_ctx - len(ids)).tolist()])


class Drafted(Case):
    """Another model guesses for it."""

    def announced(self, path):
        return super().announced(path, draft=smollm2_path())

    def load(self, path):
        m = super().load(path)
        self.draft = super().load(smollm2_path())
        return m

    def run(self, m):
        ids = m.tokenize("Once upon a time there was a " * self.n_ctx)[:self.n_ctx - 40]
        for _ in m.generate(ids, n_predict=32, temp=0.0, ignore_eos=True, speculative=self.draft):
            pass

    def use(self, m):
        return m.memory() + self.draft.memory()


class Embedded(Case):
    def announced(self, path):
        return model_peak(path, n_threads=1).memory

    def load(self, path):
        return load_model(path, n_threads=1)

    def run(self, m):
        m.embed(["a text"])
        return m.embed_ids(np.random.default_rng(3).integers(0, m.n_vocab, m.n_ctx))


class Heard(Embedded):
    def load(self, path):
        return load_speech(path, n_threads=1)

    def run(self, m):
        list(m.transcribe(np.random.default_rng(1).normal(0, 0.1, 16000 * 20).astype(np.float32), vad=False,
                          language="en"))

    def use(self, m):
        return m.memory()


class Adapted(Case):
    """With a LoRA adapter of rank 16 beside attention and feed-forward."""

    def load(self, path):
        return load_model(path, n_ctx=self.n_ctx, n_threads=1, lora=[(self.adapter(path), 1.0)], **self.options)

    def adapter(self, path):
        out = pathlib.Path(sys.argv[3]) / "adapter.gguf"
        if not out.exists():
            from ggjit.models.files.gguf import GGUFFile
            new_adapter(GGUFFile(path), ("attn_q", "attn_v", "ffn_up"), 16, 32, 0).save(out)
        return str(out)

    def announced(self, path):
        return model_peak(path, self.n_ctx, n_threads=1, flash=True, lora=[(self.adapter(path), 1.0)]).memory


class Trained(Case):
    """A step of training an adapter."""

    def announced(self, path):
        return None

    def load(self, path):
        text = np.random.default_rng(0).integers(0, 1000, 2 * self.n_ctx + 1)
        return Finetuning(path, text, 8, 16, None, self.n_ctx, None, 1, 2, 1e-4, 1, 0, 1, None, None)

    def run(self, job):
        job.run(pathlib.Path(sys.argv[3]) / "trained.gguf", progress=False)

    def use(self, job):
        return job.memory()


class OnTwoDevices(Case):
    """The last layers on another device, whose memory is this process's too."""

    def load(self, path):
        self.device = devices.Fake("A")
        return load_model(path, backend=self.device.init_backend(), n_gpu_layers=12, n_ctx=self.n_ctx, n_threads=1,
                          **self.options)

    def announced(self, path):
        return None


def smollm2(folder):
    return str(smollm2_path())


def seeing(folder):
    from helpers import vision_files
    path = pathlib.Path(folder) / "seeing.gguf"
    return str(path if path.exists() else vision_files.write_text(SHARED / "tools", path, "qwen25"))


def q4_k_m(folder):
    path = pathlib.Path(folder) / "q4_k_m.gguf"
    if not path.exists():
        quantize_gguf(smollm2_path(), path, "Q4_K_M", requantize=True, progress=False)
    return str(path)


def random_model(name):
    def write(folder):
        path = pathlib.Path(folder) / f"{name}.gguf"
        if not path.exists():
            arch_files.write(SHARED / "tools", name, path, kind="F16", **WIDE)
        return str(path)
    return write


def whisper(folder):
    """whisper.cpp's ggml-base.bin where GGJIT_WHISPER names its folder, else the packages' base, else a small one."""
    real = pathlib.Path(os.environ.get("GGJIT_WHISPER", "/nowhere")) / "ggml-base.bin"
    if real.is_file():
        return str(real)
    from ggjit.models.convert.whisper_package import whisper_base_path
    from helpers.whisper_reference import random_tensors, write_bin
    try:
        return str(whisper_base_path())
    except gg.GgjitError:
        return str(write_bin(pathlib.Path(folder) / "small.bin", random_tensors()))


CASES = {
    "512 tokens": Case(smollm2, 512),
    "512 tokens, all logits": Case(smollm2, 512, True),
    "1024 tokens, no flash attention": Case(smollm2, 1024, flash=False),
    "2048 tokens": Case(smollm2, 2048),
    "2048 tokens, all logits": Case(smollm2, 2048, True),
    "2048 tokens, all logits, no flash attention": Case(smollm2, 2048, True, flash=False),
    "4096 tokens": Case(smollm2, 4096),
    "8192 tokens": Case(smollm2, 8192),
    "8192 tokens, no flash attention": Case(smollm2, 8192, flash=False),
    "batches of 64": Case(smollm2, 1024, n_batch=64),
    "batches of 1024": Case(smollm2, 2048, n_batch=1024),
    "cache of Q8_0": Case(smollm2, 2048, kv_type="Q8_0"),
    "cache of F32, not repacked": Case(smollm2, 2048, kv_type="F32", repack=False),
    "embeddings": Embedded(lambda folder: str(minilm_path())),
    "an adapter": Adapted(smollm2, 1024),
    "training": Trained(smollm2, 256),
    "a mixture": Case(random_model("qwen3moe"), 2048),
    "recurrent": Case(random_model("mamba"), 2048),
    "windows": Case(random_model("gemma3"), 2048, n_batch=256),
    "Whisper": Heard(whisper),
    "4 texts": Together(smollm2, 2048, 4, 2048),
    "16 texts": Together(smollm2, 512, 16, 8192),
    "Q4_K_M": Case(q4_k_m, 1024),
    "a picture": Seeing(seeing, 1024),
    "a draft model": Drafted(q4_k_m, 1024),
    "two devices": OnTwoDevices(smollm2, 1024),
}


def main():
    """What the case announces, or takes: two processes, since what one freed the other would use again."""
    case = CASES[sys.argv[2]]
    path = case.model(sys.argv[3])
    print(json.dumps(announced(case, path) if sys.argv[1] == "announced" else taken(case, path)))


def announced(case, path):
    memory = case.announced(path)
    return memory and {"anonymous": memory.anonymous, "file": memory.file, "terms": memory.terms}


def taken(case, path):
    x = gg.tensor([1.0])
    gg.compute(gg.scale(x, 2.0))                        # loads what any computation needs
    gc.collect()
    layouts = set(kept_layout.folder().glob("*.layout"))
    before = process_memory()
    m = case.load(path)
    held = case.run(m)
    use = case.use(m)
    now = use.process
    kept_layout.wait()
    return {"said": {"anonymous": use.anonymous, "file": use.file}, "total": use.total, "terms": use.terms,
            "taken": {"anonymous": now.anonymous - before.anonymous, "file": now.file - before.file},
            "process": now.total, "high_water": now.high_water, "compiled": CACHE.compiled,
            "kept": len(set(kept_layout.folder().glob("*.layout")) - layouts),
            "held": 0 if held is None else held.nbytes}
