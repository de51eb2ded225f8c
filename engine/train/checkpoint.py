"""A training on disk: parameters, moments and where it was, as one safetensors file.

    param.0.w  state.0.0.w  state.0.1.w ...         float32 arrays; metadata: step, epoch, batch, seed, history (JSON)

A file is written beside the old one and takes its place when it is whole.  What the file holds is all that the next
step depends on, so a resumed training has the same bits.
"""
import dataclasses
import json
import os

import numpy as np

from ggjit.ops.core.errors import BadFile, ShapeError, extra
from ggjit.ops.core.shape import describe


def _named(params, states):
    """{name in the file: tensor}"""
    found = {}
    for i, (w, own) in enumerate(zip(params, states, strict=True)):
        found[f"param.{i}.{w.name}"] = w
        found.update({f"state.{i}.{k}.{w.name}": s for k, s in enumerate(own)})
    return found


def save(path, params, states, place, history):
    """Write everything; place: {"step", "epoch", "batch", "seed"}."""
    arrays = {name: np.ascontiguousarray(t.numpy(), np.float32) for name, t in _named(params, states).items()}
    words = {"place": json.dumps(place), "history": json.dumps(dataclasses.asdict(history)), "format": "ggjit.train"}
    beside = f"{os.fspath(path)}.new"
    extra("safetensors.numpy", "models").save_file(arrays, beside, metadata=words)
    os.replace(beside, path)


def load(path, params, states):
    """(place, history as a dict) of a file; the tensors get its values.

    Errors: BadFile (not a checkpoint of ggjit), ShapeError (of other parameters); nothing is changed then.
    """
    safetensors = extra("safetensors", "models")
    try:
        with safetensors.safe_open(os.fspath(path), "numpy") as file:
            words, arrays = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
        place, history = json.loads(words["place"]), json.loads(words["history"])
    except (safetensors.SafetensorError, KeyError, ValueError) as e:
        raise BadFile(f"{path} is no checkpoint of a training: {e}") from None
    wanted = _named(params, states)
    if arrays.keys() != wanted.keys():
        raise ShapeError(f"{path} is of other parameters: it has {_few(arrays.keys() - wanted.keys())}, the graph "
                         f"{_few(wanted.keys() - arrays.keys())}")
    for name, t in wanted.items():
        if arrays[name].shape != t.shape:
            raise ShapeError(f"{path}: {name} has shape {arrays[name].shape}, {describe(t)} has {t.shape}")
    for name, t in wanted.items():
        t.set(arrays[name])
    return place, history


def _few(names):
    listed = sorted(names)
    return ", ".join(listed[:3]) + ", ..." * (len(listed) > 3) if listed else "no others"


def exists(path):
    """Is there a checkpoint to go on from?"""
    return os.path.exists(path)
