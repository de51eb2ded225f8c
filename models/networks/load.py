"""load_model: a GGUF file -> the network its architecture names."""
import dataclasses
import os
import pathlib

from ggjit.core.arguments import lists_options, typed_call
from ggjit.models.convert import convert
from ggjit.models.core.other_options import LOADING, takes_other_names
from ggjit.models.families.registry import DECODERS, DIFFUSERS, DRAFTERS, ENCODERS
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.networks.base.load_options import KEYWORDS, LoadOptions
from ggjit.models.networks.pictures import senses
from ggjit.models.networks.pictures.tower import ARCH, senses_of
from ggjit.models.networks.sounds.moonshine import Moonshine
from ggjit.models.networks.sounds.whisper import Whisper
from ggjit.models.networks.texts.decoder import Decoder
from ggjit.models.networks.texts.diffuser import Diffuser
from ggjit.models.networks.texts.drafter import Drafter
from ggjit.models.networks.texts.encoder import Encoder
from ggjit.models.networks.texts.t5 import T5
from ggjit.models.text.tokenizer import Tokenizer
from ggjit.ops.core.errors import ModelError, ParamError, TypeMismatch

EMBEDDED = pathlib.Path(__file__).parent.parent / "austen.gguf"         # docs/austen.md
# {general.architecture: class}
ARCHITECTURES = {**dict.fromkeys(ENCODERS, Encoder), **dict.fromkeys(DECODERS, Decoder),
                 **dict.fromkeys(DIFFUSERS, Diffuser), **dict.fromkeys(DRAFTERS, Drafter),
                 "t5": T5, "whisper": Whisper, "moonshine": Moonshine}

# {general.type: what such a file is}
NO_MODELS = {"adapter": "an adapter, which changes a model: load the model with lora=[(path, 1.0)] (--lora)",
             "imatrix": "importances for `ggjit quantize --imatrix`, no model",
             ARCH: "what sees or hears beside a model, load_model(model, vision=path) (--mmproj)"}


# {general.architecture: why it is not here}
LEFT_OUT = {"qwen4exp": "llama.cpp's graph of it is to be rewritten and says that it is no reference, so there "
                        "is nothing to compare a network with"}


def network_of(file, options):
    """The network of an opened file with these LoadOptions."""
    if other := NO_MODELS.get(str(file.metadata.get("general.type"))) or NO_MODELS.get(file.arch):
        raise ModelError(f"{file.path}: {other}")
    if file.arch in LEFT_OUT:
        raise ModelError(f"{file.path}: architecture {file.arch!r} is not supported: {LEFT_OUT[file.arch]}; "
                         f"llama.cpp runs such files")
    if file.arch not in ARCHITECTURES:
        raise ModelError(f"{file.path}: architecture {file.arch!r} is not supported; supported: "
                         f"{', '.join(ARCHITECTURES)}")
    network = ARCHITECTURES[file.arch]
    if options.vision is not None and not (issubclass(network, Decoder) and network.SEES):
        raise ParamError(f"{file.path}: {file.arch} models read no pictures; leave vision out")
    return network(file, options)


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(LoadOptions) if f.default is not dataclasses.MISSING}


@lists_options({name: _DEFAULTS.get(name) for name in KEYWORDS})
@takes_other_names(LOADING)
@typed_call
def load_model(path=None, backend="CPU", n_threads=None, reserve=True, n_gpu_layers=None, cpu_moe=False, strict=True,
               validate=False, lora=(), devices=None, override_tensor=(), vision=None, **options):
    """Load a GGUF model: `.tokenize .logits .embed .generate`.

        m = load_model("model.gguf", n_ctx=512)
        print(m.generate("Once upon a time", n_predict=16).text)

    path: of the file; None: the small model that comes with the package (docs/austen.md).
    backend: a device name ("CPU", "CPU:n_threads=2") or a Backend.  Options of decoders: n_ctx, tokens of all texts;
    n_batch; kv_type (F16, F32, BF16, Q8_0, Q5_1, Q5_0, Q4_1, Q4_0, IQ4_NL; "Q8_0/Q4_0": of keys and of values); flash;
    n_seqs, texts at once (8); n_cells, cache rows of all of them together (n_ctx).  pooling: how `m.embed` makes one
    vector of a text's tokens, "mean", "cls" (the first), "last", or "rank" for `m.rerank`; None: as the file says.
    repack: matrices in a layout that products read faster (ops/matmul/repack), for a slower first load and memory that
    is not shared with the file; large ones are kept on disk for the next load (models/files/kept_layout.py); None:
    encoders', and those of decoders that are large, where this processor is faster for it and half of the free memory
    holds them (`ggjit info --tuning`).  reserve=False sets no memory aside for computing yet.  Weights are mapped, not
    read, but for those that are repacked now and those on a GPU.
    arena: the most bytes that computed results may take, such as "24M"; prompts of any length are read in pieces, by
    the cheapest plan that fits, with the same bits (docs/byte-budget.md).
    n_gpu_layers: the last so many layers lie on a GPU (`backend`, or the first one there is), the rest on the CPU; the
    output matrix as well when there are more than the model has layers; -1: all.  cpu_moe: experts stay on the CPU.
    override_tensor: {pattern: "CPU" or the GPU's name}: where tensors whose names match lie, before all other rules.
    devices: the layers are spread over these by memory and measured speed, such as cl.devices of gg.cluster; what does
    not fit stays here, and a device that would make nothing faster gets nothing (`m.explain()`).
    strict: a file with tensors or settings that the network does not use is refused, with their names: it is another
    model than what would be computed.  strict=False computes it all the same.
    RoPE as llama.cpp's options of these names: rope_freq_base, rope_freq_scale or rope_scale (1 / rope_freq_scale),
    rope_scaling ("none", "linear", "yarn"), yarn_orig_ctx, yarn_ext_factor, yarn_attn_factor, yarn_beta_fast,
    yarn_beta_slow.  A context beyond what the model was trained for is a warning.
    validate: read all weights first, and refuse a file with a NaN or an infinity in them (slow for a large model).
    vision: path of the part that sees or hears, llama.cpp's mmproj file: `m.generate(prompt, images=[...])` or
    audio=[...], `m.chat` with pictures and sounds, `m.encode_image(image)`, `m.encode_audio(sound)` (docs/vision.md).
    lora: [(path, scale)], adapters in llama.cpp's GGUF format that are computed beside the weights they change.
    Errors: BadFile (a broken file), ModelError (an architecture, tensor or type we cannot run), ParamError (options);
    nothing stays loaded after an error.
    """
    path = EMBEDDED if path is None else path
    if not isinstance(path, str | os.PathLike):
        raise TypeMismatch(f"load_model takes the path of a GGUF file, got {type(path).__name__}")
    options = LoadOptions.of(options, backend=backend, n_threads=n_threads, reserve=reserve, n_gpu_layers=n_gpu_layers,
                             cpu_moe=cpu_moe, strict=strict, lora=lora, devices=devices, vision=vision,
                             override_tensor=override_tensor)
    if devices is not None and (n_gpu_layers is not None or cpu_moe or override_tensor):
        raise ParamError("devices chooses the layers of each device; leave out n_gpu_layers, cpu_moe and "
                         "override_tensor")
    if "NULL" in str(backend).upper():
        raise ParamError("the NULL device computes nothing; load on \"CPU\", or measure with `ggjit peak`")
    file = GGUFFile(path)
    if validate:
        file.validate()
    return network_of(file, options)


def _loader_rules(path):
    """The errors of load_model for a file, of which header and sizes alone are read, and those of its tokenizer."""
    file = GGUFFile(path)
    if file.arch == ARCH:
        part_of = senses.hearing_of if senses_of(path) == ["audio"] else senses.vision_of
        part_of(path, LoadOptions("NULL", reserve=False)).free()
        return
    network_of(file, LoadOptions("NULL")).free()
    if "tokenizer.ggml.model" in file.metadata:
        Tokenizer.from_gguf(file)


convert.loader_rules = _loader_rules
