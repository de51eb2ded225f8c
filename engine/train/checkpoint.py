"""Training checkpoints: parameters, moments and position, in one safetensors file.

    length of the header | JSON {name: {dtype, shape, data_offsets}} | float32 arrays
    param.0.w  state.0.0.w  state.0.1.w ...         metadata: place (step, epoch, partial, setup), history (JSON)

Arrays go to the file and come from it one by one, so neither takes memory.  A file takes the place of the one before
when it is whole.  What it holds is all that the next step depends on, so a resumed training has the same bits.
"""
import dataclasses
import json
import math
import os
import struct

import numpy as np

from ggjit.ops.core.errors import BadFile, CannotWrite, ParamError, ShapeError, TypeMismatch, extra
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.shape import describe
from ggjit.ops.core.whole_file import whole_file
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.train.history import History

WHOLE = 0, 0.0, 0, 0                    # `partial` of a complete epoch; else: steps, sum of losses, right rows, rows


def _named(params, states):
    """{name in the file: tensor}"""
    found = {}
    for i, (w, own) in enumerate(zip(params, states, strict=True)):
        found[f"param.{i}.{w.name}"] = w
        found.update({f"state.{i}.{k}.{w.name}": s for k, s in enumerate(own)})
    return found


def save(path, params, states, place, history):
    """Write everything; place: {"step", "epoch", "partial", "setup"}; setup: the settings that a call that resumes must
    have in common.

    Errors: CannotWrite; the file of before stays.
    """
    tensors, at = _named(params, states), 0
    header = {"__metadata__": {"place": json.dumps(place), "history": json.dumps(dataclasses.asdict(history)),
                               "format": "ggjit.train"}}
    for name, t in tensors.items():
        end = at + 4 * math.prod(t.shape)
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        with whole_file(path) as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for t in tensors.values():
                f.write(np.ascontiguousarray(t.numpy(), "<f4"))
    except OSError as e:
        raise CannotWrite(f"{path}: {e.strerror or e}; a checkpoint of before stays as it is: make space or choose "
                          f"another place") from e


def load(path, params, states, setup):
    """(step, epoch, steps of an epoch that is not whole, History) of a file; the tensors get its values.

    Errors: BadFile (not a checkpoint of ggjit), ShapeError (of other parameters), ParamError (of another setup);
    nothing is changed then.
    """
    safetensors, wanted = extra("safetensors", "models"), _named(params, states)
    try:
        with safetensors.safe_open(os.fspath(path), "numpy") as file:
            place, history = _words(path, file.metadata() or {})
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            _check_shapes(path, _parameters(found), _parameters(wanted))
            # checked first, since the states belong to the optimizer that it names
            _check_setup(path, place["setup"], setup)
            _check_shapes(path, found, wanted)
            for name, t in wanted.items():
                t.set(file.get_tensor(name))
    except (safetensors.SafetensorError, OSError) as e:
        raise _bad(path, e) from None
    return *(place[key] for key in ("step", "epoch", "partial")), history


def _words(path, words):
    """(place, History) of a file's metadata.  Errors: BadFile."""
    try:
        place, history = parse_json(words["place"]), History(**parse_json(words["history"]))
        n_done, total, right, seen = place.get("partial", WHOLE)
        if not all(is_whole(n, 0) for n in (place["step"], place["epoch"], n_done, seen)):
            raise ValueError("steps, epochs and rows are not whole numbers")
        _check_history(history)
        return {"step": place["step"], "epoch": place["epoch"], "setup": dict(place["setup"]),
                "partial": (n_done, float(total), float(right), seen)}, history
    except (KeyError, ValueError, TypeError, OverflowError) as e:
        raise _bad(path, e) from None


def _check_history(history):
    """TypeError and others, where what JSON says are not numbers and texts as they have to be."""
    for name, empty in dataclasses.asdict(History()).items():
        x = getattr(history, name)
        if type(x) is not type(empty):
            raise TypeError(f"{name} is {x!r}")
        if isinstance(x, list):
            x[:] = map(float, x)


def _bad(path, error):
    return BadFile(f"{path} is not a training checkpoint: {error}; name another file, or one that does not exist yet")


def _check_setup(path, before, setup):
    differs = [f"{k}={before[k]!r}, now {v!r}" for k, v in setup.items() if k in before and before[k] != v]
    if differs:
        raise ParamError(f"{path} is of another training: {'; '.join(differs)}; use another file")


def _parameters(found):
    return {name: x for name, x in found.items() if name.startswith("param.")}


def _check_shapes(path, shapes, wanted):
    if shapes.keys() != wanted.keys():
        raise ShapeError(f"{path} is of other parameters: it has {_few(shapes.keys() - wanted.keys())}, the graph "
                         f"{_few(wanted.keys() - shapes.keys())}; use another file")
    for name, t in wanted.items():
        if shapes[name] != t.shape:
            raise ShapeError(f"{path}: {name} has shape {shapes[name]}, {describe(t)} has {t.shape}; use another file")


def _few(names):
    listed = sorted(names)
    return ", ".join(listed[:3]) + ", ..." * (len(listed) > 3) if listed else "no others"


def require_folder(path):
    """Check, before hours of work, that a file can be written there.  Errors: TypeMismatch, ParamError."""
    if not isinstance(path, str | os.PathLike):
        raise TypeMismatch(f"a file to write is named by its path, got {path!r}")
    path = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ParamError(f"{path!r}: there is no folder {folder}; make it first")
    if os.path.isdir(path):
        raise ParamError(f"{path!r} is a folder; name a file in it")


def exists(path):
    """Is there a checkpoint to go on from?"""
    return os.path.exists(path)
