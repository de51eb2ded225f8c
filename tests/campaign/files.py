"""Files changed at random: GGUF models, and the kernel cache's files.

A GGUF file is cut into its fields, so that a change meets a length, a type or a count more often than a weight.
"""
import atexit
import functools
import os
import pathlib
import shutil
import struct
import tempfile
import warnings

import numpy as np
from helpers import tiny_model

from campaign.runner import Find
from ggjit.models import load_model
from ggjit.models.files.gguf import GGUFFile
from ggjit.ops.native import cache_files

LOADED = 0.1                    # share of changed files that are loaded and computed, not only read
COUNTS = (0, 1, 2, 3, 7, 31, 32, 33, 63, 255, 2 ** 16, 2 ** 31 - 1, 2 ** 31, 2 ** 32 - 1, 2 ** 40, 2 ** 63 - 1, 2 ** 63,
          2 ** 64 - 1)
FLOATS = (0.0, -1.0, 1e-30, 1e30, np.inf, -np.inf, np.nan)
TEXTS = (b"", b"\x1b[2J\x07", b"\xff\xfe", b"llama", b"bert", b"token_embd.weight", b"a" * 70, b"general.alignment",
         b"tokenizer.ggml.tokens", b"llama.attention.head_count")
SCALAR = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}     # GGUF value type -> bytes
STRING, ARRAY = 8, 9


@functools.cache
def folder():
    path = pathlib.Path(tempfile.mkdtemp(prefix="ggjit-campaign-"))
    atexit.register(shutil.rmtree, path, True)
    return path


# ---------------------------------------------------------------- GGUF
class Fields:
    """A right file as a list of records (the head, a key, a tensor's entry) of fields (kind, bytes), and its data."""

    def __init__(self, raw):
        self.raw, self.at = raw, 0
        self.head = [("text", self._take(4)), ("count", self._take(4)), ("count", self._take(8)),
                     ("count", self._take(8))]
        n_infos, n_keys = (struct.unpack("<Q", b)[0] for _, b in self.head[2:])
        self.keys = [self._key() for _ in range(n_keys)]
        self.infos = [self._info() for _ in range(n_infos)]
        self.data = raw[self.at + -self.at % 32:]

    def _take(self, n):
        self.at += n
        return self.raw[self.at - n:self.at]

    def _text(self):
        length = self._take(8)
        return [("count", length), ("text", self._take(struct.unpack("<Q", length)[0]))]

    def _value(self, kind):
        if kind == STRING:
            return self._text()
        return [("float" if kind in (6, 12) else "count", self._take(SCALAR[kind]))]

    def _key(self):
        fields = [*self._text(), ("count", self._take(4))]
        kind = struct.unpack("<I", fields[-1][1])[0]
        if kind != ARRAY:
            return fields + self._value(kind)
        fields += [("count", self._take(4)), ("count", self._take(8))]
        inner, n = struct.unpack("<I", fields[-2][1])[0], struct.unpack("<Q", fields[-1][1])[0]
        return fields + [field for _ in range(n) for field in self._value(inner)]

    def _info(self):
        fields = [*self._text(), ("count", self._take(4))]
        n = struct.unpack("<I", fields[-1][1])[0]
        return fields + [("count", self._take(8)) for _ in range(n)] + [("count", self._take(4)),
                                                                        ("count", self._take(8))]

    def changed(self, rng):
        """The bytes of the file after one to three changes."""
        records = [list(r) for r in (self.head, *self.keys, *self.infos)]
        data = bytearray(self.data)
        for _ in range(int(rng.integers(1, 4))):
            i, what = int(rng.integers(len(records))), rng.random()
            if what < 0.6 and records[i]:
                j = int(rng.integers(len(records[i])))
                records[i][j] = self._changed_field(*records[i][j], rng)
            elif what < 0.7 and i:
                del records[i]
            elif what < 0.8:
                records.insert(i, records[int(rng.integers(1, len(records)))])
            elif what < 0.9 and data:
                at = int(rng.integers(len(data)))
                data[at:at + 4] = rng.bytes(4) if rng.random() < 0.5 else struct.pack("<f", np.nan)
            else:
                j = int(rng.integers(1, len(records)))
                records[i], records[j] = records[j], records[i]
        head = b"".join(b for record in records for _, b in record)
        raw = head + bytes(-len(head) % 32) + bytes(data)
        return raw[:int(rng.integers(len(raw) + 1))] if rng.random() < 0.1 else raw

    @staticmethod
    def _changed_field(kind, raw, rng):
        if kind == "text":
            flip = bytearray(raw)
            if flip and rng.random() < 0.5:
                flip[int(rng.integers(len(flip)))] = int(rng.integers(256))
                return kind, bytes(flip)
            return kind, TEXTS[int(rng.integers(len(TEXTS)))]
        if kind == "float":
            return kind, struct.pack("<f" if len(raw) == 4 else "<d", FLOATS[int(rng.integers(len(FLOATS)))])
        value = int.from_bytes(raw, "little")
        near = (value + 1, value - 1, value * 2, value // 2, value ^ 1 << int(rng.integers(8 * len(raw))))
        value = (*COUNTS, *near, *near)[int(rng.integers(len(COUNTS) + 2 * len(near)))]
        return kind, (value % (1 << 8 * len(raw))).to_bytes(len(raw), "little")


@functools.cache
def models():
    """Small llamas, as fields."""
    made = []
    for i, type in enumerate(("F32", "F16", "Q8_0", "Q4_0")):
        path = tiny_model.write(folder() / f"{i}.gguf", seed=i, type=type)
        made.append(Fields(path.read_bytes()))
    return made


def gguf(rng):
    path = folder() / "case.gguf"
    path.write_bytes(models()[int(rng.integers(4))].changed(rng))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rng.random() < LOADED:
            model = load_model(path)
            logits = model.logits([1, 2, 3])
            if not np.isfinite(logits).all():
                raise Find("logits that are not finite were returned")
        else:
            file = GGUFFile(path)
            for name in file.tensors:
                file.tensors[name]
            repr(file)
            for value in file.metadata.values():
                str(value)
    return "right"


# ---------------------------------------------------------------- kernel cache
def kernel_cache(rng):
    """A payload comes back as it was written, or the file is refused."""
    place = folder() / "kernels"
    place.mkdir(mode=0o700, exist_ok=True)
    path, other, payload = place / "a.o", place / "b.o", rng.bytes(int(rng.integers(1, 4000)))
    cache_files.write(path, cache_files.pack(b"symbol", payload))
    raw = bytearray(path.read_bytes())
    what = int(rng.integers(6))
    if what == 0:
        raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
    elif what == 1:
        raw = raw[:int(rng.integers(len(raw)))]
    elif what == 2:
        raw += rng.bytes(int(rng.integers(1, 100)))
    if what < 3:
        path.write_bytes(raw)
    elif what == 3:
        os.replace(path, other)
        path = other
    elif what == 4:
        path.chmod(0o666)
    try:
        found = cache_files.read(path)
    except cache_files.Unusable:
        found = None
    finally:
        path.unlink()
    if found is not None and (what < 5 or cache_files.unpack(found, 2)[1] != payload):
        raise Find(f"a file changed in way {what} was used")
    if found is None and what == 5:
        raise Find("a file as it was written was refused")
    return "right" if what == 5 else "refused"


CASES = {"gguf": gguf, "kernel cache": kernel_cache}
