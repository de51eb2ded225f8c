"""LoRA adapters in llama.cpp's GGUF format: low-rank matrices beside unchanged weights.

    y = W x + scale alpha / rank  B (A x)

    general.type = "adapter"      general.architecture = the model's      adapter.type = "lora"      adapter.lora.alpha
    NAME.lora_a  [n_in, rank]     NAME.lora_b  [rank, n_out]              NAME: a tensor of the model
    of experts, a third size: [n_in, rank, n_expert], [rank, n_out, n_expert]; each expert has its own pair
    of the embedding, a row for each token: lora_a [rank, n_vocab], lora_b [rank, n_embd]; y = W[token] + .. B A[token]

alpha 0 stands for alpha = rank.  Source: llama.cpp's llama-adapter.cpp; arXiv 2106.09685.
"""
import math
import os

import numpy as np

from ggjit.models.core.checks import integer, number
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.files.save import save_gguf
from ggjit.models.files.weights import Weights
from ggjit.ops.core.errors import BadFile, ModelError, NotSupported, ParamError, TypeMismatch
from ggjit.ops.core.types import BF16, F16, F32
from ggjit.tensors.arrays import from_numpy
from ggjit.tensors.context import Context

LOW, UP = ".lora_a", ".lora_b"
EMBEDDING = "token_embd.weight"
TOKENS = "adapter.alora.invocation_tokens"
MAX_NAMED = 4


class Adapter:
    """`.pairs`: {tensor of the model: (A, B)}, `.alpha`, `.scale`.

    scale: what the caller multiplies it by.  Made by `read_adapter` or `new_adapter`.
    """

    def __init__(self, path, arch, alpha, scale, pairs, weights=None):
        self.path, self.arch, self.alpha, self.scale, self.pairs = path, arch, alpha, scale, pairs
        self._weights, self.used = weights, set()

    def beside(self, name):
        """[(A, B, factor)] for the weight `name`: one or none."""
        if name not in self.pairs:
            return []
        self.used.add(name)
        low, up = self.pairs[name]
        return [(low, up, self.scale * (self.alpha / up.ne[0] if self.alpha else 1.0))]

    def added(self, name):
        """[(A, B, factor)] as arrays, so that rows W[i] of the weight become W[i] + factor B[i] A, expert by expert."""
        pairs = [(low.numpy(), up.numpy(), factor) for low, up, factor in self.beside(name)]
        return [(up.T, low, factor) for low, up, factor in pairs] if name == EMBEDDING else pairs

    def refuse_unused(self):
        """Errors: NotSupported for matrices of the model that it would change and that take no adapter here."""
        left = [name for name in self.pairs if name not in self.used]
        if left:
            raise NotSupported(f"{self.path}: {_few(left)} take no adapter in the {self.arch} network here; only "
                               f"matrices that are multiplied with activations, experts and the embedding do")

    def move(self, takes, buft):
        """Copy the matrices of weights whose names `takes` accepts into memory of `buft`."""
        if self._weights is not None:
            self._weights.move(lambda name: takes(name.removesuffix(LOW).removesuffix(UP)), buft)

    @property
    def is_file(self):
        """Are its matrices those of a mapped file?"""
        return self._weights is not None

    @property
    def again(self):
        """What load_model's `lora` takes to have it in another model."""
        return (self.path, self.scale) if self.is_file else self

    @property
    def buffers(self):
        """Buffers that its matrices lie in."""
        if self.is_file:
            return [*self._weights.buffers, *self._weights.copies]
        return list({id(t.buffer): t.buffer for pair in self.pairs.values() for t in pair}.values())

    @property
    def copies(self):
        """Its buffers in memory of their own, not mapped from its file."""
        return self._weights.copies if self.is_file else self.buffers

    def save(self, path):
        """Write it as llama.cpp reads it, tensor by tensor.  The file appears when it is whole.  Errors: OSError."""
        save_gguf(path, {name + end: t for name, pair in self.pairs.items()
                         for end, t in zip((LOW, UP), pair, strict=True)},
                  {"general.architecture": self.arch, "general.type": "adapter", "adapter.type": "lora",
                   "adapter.lora.alpha": np.float32(self.alpha)})

    def free(self):
        if self._weights is not None:
            self._weights.free()


def read_adapter(path, scale, model, device):
    """The Adapter of a file, for the GGUFFile `model`.

    Errors: BadFile (broken, or no adapter), ModelError (of another architecture or shape, or for tensors that the model
    lacks), NotSupported (kinds of adapters that are not computed here), ParamError (scale).
    """
    scale = number("lora: scale", scale)
    file = GGUFFile(path)
    kind = [file.get(key, None, str) for key in ("general.type", "adapter.type")]
    if kind != ["adapter", "lora"]:
        raise BadFile(f"{path} is not a LoRA adapter: general.type is {kind[0]!r}, adapter.type {kind[1]!r}; convert "
                      f"it with llama.cpp's convert_lora_to_gguf.py, or make one with ggjit finetune")
    if file.arch != model.arch:
        raise ModelError(f"{path} is an adapter for the architecture {file.arch!r}, {model.path} is {model.arch!r}; "
                         f"use the model it was trained on")
    if TOKENS in file.metadata:
        raise NotSupported(f"{path} is switched on by words in the text ({TOKENS}), which is not done here; only "
                           f"adapters that are always on are")
    alpha = file.get("adapter.lora.alpha", 0.0, float)
    if not math.isfinite(alpha):
        raise BadFile(f"{path}: adapter.lora.alpha is {alpha}; train or convert the adapter again")
    names = _paired(file)
    missing = [name for name in names if name not in model.tensors]
    if missing:
        raise ModelError(f"{path} changes {_few(missing)}, which {model.path} does not have; use the model it was "
                         f"trained on")
    for name in names:
        _check_shapes(file, model, name)
    weights = Weights(file, device)
    pairs = {name: tuple(weights.want(name + end, *file.tensors[name + end].ne) for end in (LOW, UP)) for name in names}
    return Adapter(path, file.arch, alpha, scale, pairs, weights)


def _paired(file):
    """Names of the weights that a file has both matrices for.  Errors: BadFile."""
    odd = [name for name in file.tensors if not name.endswith((LOW, UP))]
    if odd:
        raise BadFile(f"{file.path}: {_few(odd)} are not matrices of a LoRA adapter (NAME{LOW}, NAME{UP}); convert it "
                      f"again without them")
    names = [name.removesuffix(LOW) for name in file.tensors if name.endswith(LOW)]
    alone = {name.removesuffix(UP) for name in file.tensors if name.endswith(UP)} ^ set(names)
    if alone or not names:
        raise BadFile(f"{file.path}: " + (f"{_few(sorted(alone))} have one matrix of two" if alone else
                                          "the adapter has no matrices") + "; train or convert the adapter again")
    return names


def _check_shapes(file, model, name):
    """Errors: ModelError for an adapter of another model; BadFile for matrices of two ranks."""
    own = tuple(model.tensors[name].ne) + (1,) * (2 - len(model.tensors[name].ne))
    low, up = (tuple(file.tensors[name + end].ne) + (1,) * (len(own) - len(file.tensors[name + end].ne))
               for end in (LOW, UP))
    rank_of_low, fits = low[1], (low[0], up[1]) == own[:2] and low[2:] == up[2:] == own[2:]
    if name == EMBEDDING:
        rank_of_low, fits = low[0], (up[1], low[1]) == own
        if "output.weight" not in model.tensors:
            raise NotSupported(f"{file.path} changes {name!r}, which {model.path} also makes its logits from; an "
                               f"adapter of both is not defined: train one without it")
    kinds = {file.tensors[name + end].type for end in (LOW, UP)}
    if any(not t.quantized and t not in (F32, F16, BF16) for t in kinds):
        raise BadFile(f"{file.path}: {name}{LOW} and {UP} are {', '.join(map(repr, kinds))}, floats or a quantised "
                      f"type are expected; train or convert the adapter again")
    if rank_of_low != up[0]:
        raise BadFile(f"{file.path}: {name}{LOW} {list(low)} and {name}{UP} {list(up)} are of different rank; train or "
                      f"convert the adapter again")
    if not fits:
        raise ModelError(f"{file.path}: {name}{LOW} {list(low)} and {UP} {list(up)} do not fit {list(own)} of "
                         f"{model.path}; use the model the adapter was trained on")


def new_adapter(model, targets, rank, alpha, seed=0):
    """An Adapter to train, for tensors of a GGUFFile whose names have one of `targets` before ".weight".

    targets: "attn_q", "ffn_up_exps" of every layer, "output", "token_embd".  A is uniform in +-1 / sqrt(n_in), of the
    embedding in +-1 / sqrt(rank); B zero: at first the model stays as it is.
    Errors: ParamError for a rank or target that does not fit, with the targets there are; TypeMismatch.
    """
    rank = integer("rank", rank, 1, 1 << 16)
    if isinstance(targets, str) or not all(isinstance(t, str) for t in targets):
        raise TypeMismatch(f"targets is a list of names, such as [\"attn_q\"], got {targets!r}")
    rng, ctx, pairs, there = np.random.default_rng(seed), Context(), {}, targets_of(model)
    unknown = [t for t in targets if t not in there]
    if unknown or not targets:
        wrong = f"no adapter goes beside {_few(unknown)}" if unknown else "none are given"
        raise ParamError(f"targets: {wrong}; in {model.path} one goes beside {', '.join(there)}")
    for target in dict.fromkeys(targets):
        for info in there[target]:
            n_in, n_out, *n_experts = info.ne
            if rank > min(n_in, n_out):
                raise ParamError(f"rank {rank} is more than {info.name!r} {list(info.ne)} has; use a smaller one")
            shape, bound = (*n_experts, rank, n_in), n_in ** -0.5
            if info.name == EMBEDDING:
                shape, n_out, bound = (n_out, rank), n_in, rank ** -0.5
            low = rng.uniform(-bound, bound, shape).astype(np.float32)
            pairs[info.name] = (from_numpy(ctx, low, info.name + LOW),
                                from_numpy(ctx, np.zeros((*n_experts, n_out, rank), np.float32), info.name + UP))
    return Adapter("the new adapter", model.arch, number("alpha", alpha), 1.0, pairs)


def targets_of(model):
    """{target: tensors of that name}: matrices of layers, those of experts, and of the vocabulary if they are two."""
    there = {}
    for name, info in model.tensors.items():
        parts = name.split(".")
        if parts[0] == "blk" and parts[-1] == "weight" and len(parts) == 4 and \
                len(info.ne) == 2 + parts[2].endswith("_exps"):
            there.setdefault(parts[2], []).append(info)
    if "output.weight" in model.tensors:
        there |= {t: [model.tensors[t + ".weight"]] for t in ("output", "token_embd") if t + ".weight" in model.tensors}
    return there


def adapters_of(lora, model, device):
    """The Adapters of load_model's `lora`: a path, or [(path, scale)], paths alone with scale 1, or Adapters.

    Errors: TypeMismatch, and those of read_adapter; none of the files stays open then.
    """
    if isinstance(lora, str | os.PathLike):
        lora = [lora]
    if not isinstance(lora, list | tuple):
        raise TypeMismatch(f"lora is a list, such as [path] or [(path, 0.5)], got {type(lora).__name__}")
    found, opened = [], []
    try:
        for item in lora:
            if not isinstance(item, Adapter):
                path, scale = item if isinstance(item, list | tuple) and len(item) == 2 else (item, 1.0)
                if not isinstance(path, str | os.PathLike):
                    raise TypeMismatch(f"lora is a list of paths and of (path, scale), got {item!r} in it")
                item = read_adapter(path, scale, model, device)
                opened.append(item)
            found.append(item)
    except BaseException:
        for adapter in opened:
            adapter.free()
        raise
    return found


def _few(names):
    return ", ".join(map(repr, names[:MAX_NAMED])) + f" and {len(names) - MAX_NAMED} more" * (len(names) > MAX_NAMED)
