"""Control vectors in llama.cpp's format: they are added to the output of each layer and steer the text.

    x = layer(x) + strength d[layer]

    general.architecture = "controlvector"      controlvector.model_hint = the model's architecture
    controlvector.layer_count                   direction.N [n_embd], F32, of layer N, from 1 on

Source: llama.cpp's cvector-generator; arXiv 2310.01405.  Made by models/networks/parts/steering.py.
"""
import dataclasses

import numpy as np

from ggjit.models.core.checks import number
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.files.save import save_gguf
from ggjit.ops.core.errors import BadFile, ModelError, ParamError
from ggjit.ops.core.types import F32

ARCH, NAME = "controlvector", "direction."


@dataclasses.dataclass(frozen=True)
class ControlVector:
    """`.directions`: {layer: float32 (n_embd,)}, `.arch` of the model it was made with."""
    directions: dict
    arch: str = ""
    path: str = "the control vector"

    def save(self, path):
        """Write it as llama.cpp reads it.  The file appears when it is whole.  Errors: OSError."""
        save_gguf(path, {f"{NAME}{i}": np.asarray(d, np.float32) for i, d in sorted(self.directions.items())},
                  {"general.architecture": ARCH, f"{ARCH}.model_hint": self.arch,
                   f"{ARCH}.layer_count": np.int32(max(self.directions, default=0) + 1)})

    def __mul__(self, factor):
        """All directions times a number: `vector * -0.5`."""
        factor = np.float32(number("the factor of a control vector", factor))
        return dataclasses.replace(self, directions={i: d * factor for i, d in self.directions.items()})

    __rmul__ = __mul__

    def __repr__(self):
        layers = sorted(self.directions)
        of = f"layers {layers[0]} to {layers[-1]}" if layers else "no layer"
        return f"<ControlVector of {of}, {self.arch or 'any model'}>"


def load_control_vector(path):
    """The ControlVector of a GGUF file, such as one that `ggjit control-vector` wrote.

        m.set_control_vectors([(load_control_vector("happy.gguf"), 0.8)])

    Errors: BadFile.
    """
    file = GGUFFile(path)
    if file.arch != ARCH:
        raise BadFile(f"{path} is not a control vector: general.architecture is {file.arch!r}, expected {ARCH!r}; make "
                      f"one with ggjit.models.make_control_vector")
    found = {}
    for name, t in file.tensors.items():
        number_ = name.removeprefix(NAME)
        if not name.startswith(NAME) or not number_.isdecimal() or not int(number_):
            raise BadFile(f"{path}: tensor {name!r} is not a direction of a layer from 1 on; make the file again")
        a = np.frombuffer(file.tensor_bytes(name), np.float32).copy() if t.type is F32 else np.float32([np.nan])
        if t.ne[0] != a.size or not np.isfinite(a).all():
            raise BadFile(f"{path}: {name!r} is {t.type!r} {list(t.ne)}, expected finite F32 numbers of one layer; "
                          f"make the file again")
        found[int(number_)] = a
    if not found:
        raise BadFile(f"{path} holds no directions; make the file again")
    return ControlVector(found, str(file.metadata.get(f"{ARCH}.model_hint", "")), str(path))


def combined(vectors, n_embd, n_layer, path):
    """{layer: float32 (n_embd,)}: the sum of vectors, each a ControlVector, a path, or (one of these, strength).

    Errors: BadFile, ParamError, ModelError for a vector of another size.
    """
    total = {}
    for item in vectors:
        vector, strength = item if isinstance(item, list | tuple) and len(item) == 2 else (item, 1.0)
        vector = vector if isinstance(vector, ControlVector) else load_control_vector(vector)
        for i, d in (vector * strength).directions.items():
            if d.shape != (n_embd,):
                raise ModelError(f"{vector.path}: the direction of layer {i} has {d.size} numbers, {path} has "
                                 f"{n_embd}; use the model it was made with")
            if not 0 < i < n_layer:
                raise ParamError(f"{vector.path} has a direction of layer {i}, {path} takes those of layers 1 to "
                                 f"{n_layer - 1}; use the model it was made with")
            total[i] = total[i] + d if i in total else d
    return total
