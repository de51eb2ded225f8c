"""Weights that a worker keeps on its disk under a hash of their content, so that a model is sent only once.

    driver   HAVE key      ->   worker   it has: copies them into the arena, done
                                         it has not: the driver sends the bytes, and then KEEP key

The key is the hash of the bytes.  The worker computes it itself, before it keeps something and after it has read it: a
damaged file is sent again, and no driver can put false weights there for another.
"""
import os
import pathlib

import numpy as np

from ggjit.core.content_key import content_key
from ggjit.ops.core.whole_file import whole_file
from ggjit.ops.native.cache_files import cache_dir, make_room


class WeightCache:
    """Files of one folder, at most `limit_nbytes` together; the least recently used ones are deleted."""

    def __init__(self, limit_nbytes, folder=None):
        self.limit_nbytes = limit_nbytes
        self.folder = pathlib.Path(folder) if folder is not None else cache_dir() / "weights"

    def get(self, key, nbytes):
        """The bytes as an array, None where they are not there or damaged."""
        file = self.folder / key.hex()
        try:
            if os.stat(file).st_size != nbytes:
                return None
            raw = np.fromfile(file, np.uint8)
            if content_key(raw) != key:
                return None
            os.utime(file)
        except OSError:                 # another worker has just deleted it, or it cannot be read
            return None
        return raw

    def put(self, key, raw):
        """Keep the bytes, if they are those of the key and the limit allows it.  Errors: OSError (a full disk)."""
        if raw.size > self.limit_nbytes or content_key(raw) != key:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        make_room(self.folder, raw.size, self.limit_nbytes)
        with whole_file(self.folder / key.hex(), mode=0o600, durable=False, devices=False) as f:
            f.write(raw)
