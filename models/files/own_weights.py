"""Weights that a worker finds in its own model files by a hash of their content (`ggjit worker --models DIR`).

    driver   HAVE key, 4,194,304 bytes   ->   worker   tensors of its files that are as long, until one has that hash

A tensor is hashed once, and again before it is used: a file that was changed since gives no false weights.
"""
import pathlib

import numpy as np

from ggjit.core.content_key import content_key
from ggjit.models.files.gguf import GGUFFile
from ggjit.ops.core.errors import BadFile, ParamError


class OwnWeights:
    """The tensors of all GGUF files of a folder and those below it.  Errors: ParamError if there are none."""

    def __init__(self, directory):
        self._places, self._keys = {}, {}       # {bytes: [(path, offset)]}, {(path, offset): key}
        files = sorted(pathlib.Path(directory).rglob("*.gguf"))
        if not files:
            raise ParamError(f"{directory}: no .gguf file is there or below; name the folder that holds your models")
        self.damaged = [str(path) for path in files if not self._add(path)]

    def _add(self, path):
        """False for a file that cannot be read, or a part whose others are missing."""
        try:
            file = GGUFFile(path)
        except (BadFile, OSError):
            return False
        for info in file.tensors.values():
            self._places.setdefault(info.nbytes, []).append((file.parts[info.part].path, info.offs))
        return True

    def get(self, key, nbytes):
        """The bytes of that key as an array, None if no file has them."""
        for place in self._places.get(nbytes, ()):
            if self._keys.get(place, key) == key:
                raw = _read(*place, nbytes)
                self._keys[place] = None if raw is None else content_key(raw)
                if self._keys[place] == key:
                    return raw
        return None


def _read(path, offs, nbytes):
    try:
        raw = np.fromfile(path, np.uint8, nbytes, offset=offs)
    except OSError:
        return None
    return raw if raw.size == nbytes else None
