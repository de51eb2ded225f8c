"""A training on disk: parameters, moments and where it was, as one safetensors file.

    param.0.w  state.0.0.w  state.0.1.w ...         float32 arrays; metadata: step, epoch, setup, history (JSON)

A file is written beside the old one and takes its place when it is whole.  What the file holds is all that the next
step depends on, so a resumed training has the same bits.
"""
import dataclasses
import json
import os

import numpy as np

from ggjit.ops.core.errors import BadFile, ParamError, ShapeError, extra
from ggjit.ops.core.shape import describe
from ggjit.train.history import History

WHOLE = 0, 0.0, 0, 0                    # an epoch that is not whole has steps, a sum of losses, right rows, rows


def _named(params, states):
    """{name in the file: tensor}"""
    found = {}
    for i, (w, own) in enumerate(zip(params, states, strict=True)):
        found[f"param.{i}.{w.name}"] = w
        found.update({f"state.{i}.{k}.{w.name}": s for k, s in enumerate(own)})
    return found


def save(path, params, states, place, history):
    """Write everything; place: {"step", "epoch", "partial", "setup"}; setup: what a call that goes on has in common."""
    arrays = {name: np.ascontiguousarray(t.numpy(), np.float32) for name, t in _named(params, states).items()}
    words = {"place": json.dumps(place), "history": json.dumps(dataclasses.asdict(history)), "format": "ggjit.train"}
    beside = f"{os.fspath(path)}.new"
    extra("safetensors.numpy", "models").save_file(arrays, beside, metadata=words)
    os.replace(beside, path)


def load(path, params, states, setup):
    """(step, epoch, steps of an epoch that is not whole, History) of a file; the tensors get its values.

    Errors: BadFile (not a checkpoint of ggjit), ShapeError (of other parameters), ParamError (of another setup);
    nothing is changed then.
    """
    safetensors = extra("safetensors", "models")
    try:
        with safetensors.safe_open(os.fspath(path), "numpy") as file:
            words, arrays = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
        place, history = json.loads(words["place"]), History(**json.loads(words["history"]))
        step, epoch, before = int(place["step"]), int(place["epoch"]), dict(place["setup"])
        partial = tuple(place.get("partial", WHOLE))
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as e:
        raise BadFile(f"{path} is no checkpoint of a training: {e}") from None
    wanted = _named(params, states)
    if arrays.keys() != wanted.keys():
        raise ShapeError(f"{path} is of other parameters: it has {_few(arrays.keys() - wanted.keys())}, the graph "
                         f"{_few(wanted.keys() - arrays.keys())}")
    for name, t in wanted.items():
        if arrays[name].shape != t.shape:
            raise ShapeError(f"{path}: {name} has shape {arrays[name].shape}, {describe(t)} has {t.shape}")
    differs = [f"{k}={before.get(k)!r}, now {v!r}" for k, v in setup.items() if before.get(k) != v]
    if differs:
        raise ParamError(f"{path} is of another training: {'; '.join(differs)}; use another file")
    for name, t in wanted.items():
        t.set(arrays[name])
    return step, epoch, partial, history


def _few(names):
    listed = sorted(names)
    return ", ".join(listed[:3]) + ", ..." * (len(listed) > 3) if listed else "no others"


def require_folder(path):
    """Errors: ParamError where no file can be written, before hours of work."""
    path = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ParamError(f"{path!r}: there is no folder {folder}; make it first")
    if os.path.isdir(path):
        raise ParamError(f"{path!r} is a folder; name a file in it")


def exists(path):
    """Is there a checkpoint to go on from?"""
    return os.path.exists(path)
