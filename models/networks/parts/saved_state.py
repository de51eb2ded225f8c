"""The saved state of a text as bytes, so that the text need not be computed again.

    MAGIC | length of the header, uint32 | header, JSON | ids, int32 | rows of every cache | CRC-32 of all before

    header      model: a hash of its description, tensors and some of their bytes;  kv_type;  n_past;  n_bytes behind;
                n_exact: of how many tokens this is what the network computes of them alone (Text.exact of cells.py)
    rows        of keys and values: those that the layer looks back on, in the order of positions;  of states: one;
                of what belongs to no token of the text: all
"""
import dataclasses
import hashlib
import json
import os
import struct
import zlib

import numpy as np

from ggjit.models.blocks.description import WHOLE
from ggjit.models.networks.parts.kv_cells import ALL
from ggjit.ops.core.errors import BadFile, ModelError, NotSupported, ParamError, TypeMismatch
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.whole_file import whole_file
from ggjit.ops.core.whole_numbers import is_whole

MAGIC = b"ggjit state 1\n"
LENGTH = struct.Struct("<I")
MAX_HEADER_NBYTES = 1 << 12
SAMPLE_NBYTES = 64                      # bytes from the middle of every tensor that go into the fingerprint's hash


def save(m, path):
    text = m.text
    if text is None and m.cells.texts:
        raise NotSupported(f"save_state: the caches hold {len(m.cells.texts)} texts of a generation that goes on; "
                           f"finish it, or m.reset() and read the one to save")
    if text is not None and text.broken:
        m._read_again(text)
    ids = [] if text is None else text.ids
    parts = [np.array(ids, "<i4").tobytes()]
    parts += [leaf.bytes(at * row, n * row) for leaf, row, runs in _rows(m, text) for at, n in runs]
    parts = [bytes(part) for part in parts]
    exact = 0 if text is None or not m._weights_as_read else min(text.exact, len(ids))
    header = json.dumps({"model": fingerprint(m), "kv_type": _kv_type(m), "n_past": len(ids), "n_exact": exact,
                         "n_bytes": sum(map(len, parts))}).encode()
    parts = [MAGIC, LENGTH.pack(len(header)), header, *parts]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    state = b"".join([*parts, LENGTH.pack(crc)])            # joined once: no other copy of a long text
    if path is not None:
        with whole_file(path) as f:
            f.write(state)
    return state


def load(m, state):
    state, source = _read(state)
    header, body = _checked(m, state, source)
    n = header["n_past"]
    ids = np.frombuffer(body, "<i4", n)
    if n:
        m._checked_ids(ids, m.n_ctx)
    m.reset()
    text = m.text
    text.ids, text.written, text.state_row = ids.tolist(), n, int(bool(n) and m.recurrent)
    text.exact = header["n_exact"] if header["n_exact"] < n else ALL
    for window, mapping in text.mappings.items():
        mapping.since = _first(n, window)
    at = 4 * n
    try:
        for leaf, row, runs in _rows(m, text):
            for first, count in runs:
                leaf.set_bytes(np.frombuffer(body, np.uint8, count * row, at), first * row)
                at += count * row
    except BaseException:
        m.reset()
        raise


def _kv_type(m):
    """As load_model takes it."""
    return m.kv_type.name if m.kv_type is m.v_type else f"{m.kv_type.name}/{m.v_type.name}"


def copy_rows(m, copies):
    """Rows of the caches of keys and values to others.  copies: {window: (rows, where to)}, both in runs."""
    for block, kept in zip(m.description.blocks, m.cache, strict=True):
        rows, to = copies[getattr(block.mixer, "window", 0)] if kept else ((), ())
        for leaf in kept:
            row = leaf.nb[1]
            for (first, n), (there, _) in zip(_runs(rows), _runs(to), strict=True):
                leaf.set_bytes(leaf.bytes(first * row, n * row), there * row)


def fingerprint(m):
    """A hash that is equal for two networks that compute the same from the same state."""
    about = [(f.name, getattr(m.description, f.name)) for f in dataclasses.fields(m.description)]        # repr is short
    h = hashlib.blake2b(repr((m.file.arch, about, m.n_embd, m.n_vocab)).encode(), digest_size=16)
    for name, info in sorted(m.file.tensors.items()):
        h.update(repr((name, info.type.name, tuple(info.ne))).encode())
        middle = max(info.nbytes - SAMPLE_NBYTES, 0) // 2
        h.update(bytes(m.file.tensor_bytes(name)[middle:middle + SAMPLE_NBYTES]))
    for adapter in m.weights.adapters:
        for name, pair in sorted(adapter.pairs.items()):
            h.update(repr((name, adapter.scale, adapter.alpha)).encode())
            for leaf in pair:
                h.update(leaf.bytes())          # leaves in own memory may be written to, so all bytes count
    for i, direction in sorted(m.control.items()):
        h.update(repr(("control", i)).encode() + direction.bytes())
    return h.hexdigest()


def _first(n, window):
    """The first position that a text of n tokens looks back on."""
    return max(n - window + 1, 0) if window else 0


def _rows(m, text):
    """(leaf, bytes of a row, [(first row, how many)]) of every cache."""
    n = 0 if text is None else len(text.ids)
    for block, kept in zip(m.description.blocks, m.cache, strict=True):
        window = getattr(block.mixer, "window", 0)
        for leaf in kept:
            if leaf.name.startswith(WHOLE):
                rows = np.arange(leaf.ne[1])
            elif leaf.name.startswith("state"):
                rows = np.array([text.state_row] if n else [], np.int64)
            else:
                rows = text.mappings[window].at(_first(n, window), n) if n else np.array([], np.int64)
            yield leaf, leaf.nb[1], _runs(rows)


def _runs(rows):
    """[(first, count)] of rows that follow each other."""
    ends = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(run[0]), len(run)) for run in np.split(rows, ends) if len(run)]


# ---------------------------------------------------------------- checks
def _read(state):
    """(bytes of the state, its name in error messages)"""
    if isinstance(state, str | os.PathLike):
        with open(state, "rb") as f:
            return f.read(), os.fspath(state)
    if not isinstance(state, bytes | bytearray | memoryview):
        raise TypeMismatch(f"load_state takes bytes or the path of a file, got {type(state).__name__}")
    return bytes(state), "the state"


def _checked(m, state, source):
    """(header, bytes behind it).  Errors: those of load_state."""
    def broken(what):
        return BadFile(f"{source}: {what}; save it again")
    start = len(MAGIC) + LENGTH.size
    if not state.startswith(MAGIC) or len(state) < start + LENGTH.size:
        raise broken("this is not a saved state")
    n_header = LENGTH.unpack_from(state, len(MAGIC))[0]
    view = memoryview(state)
    if n_header > MAX_HEADER_NBYTES or zlib.crc32(view[:-4]) != LENGTH.unpack(view[-4:])[0]:
        raise broken(f"the {len(state)} bytes of the saved state are cut off or damaged")
    try:
        header = parse_json(state[start:start + n_header])
        model, kv_type, n_past, n_exact, n_bytes = (
            header[k] for k in ("model", "kv_type", "n_past", "n_exact", "n_bytes"))
    except (ValueError, TypeError, KeyError) as e:
        raise broken(f"the header cannot be read ({e})") from None
    body = view[start + n_header:-4]
    if not all(is_whole(n, 0) for n in (n_past, n_exact, n_bytes)) or n_bytes != len(body) or 4 * n_past > n_bytes:
        raise broken(f"n_past {n_past!r} and n_bytes {n_bytes!r} do not fit the {len(body)} bytes")
    if model != fingerprint(m):
        raise ModelError(f"{source} was saved from another model, or with other options of RoPE, than {m.file.path}")
    if kv_type != _kv_type(m):
        raise ParamError(f"{source} has a cache of {kv_type!r}, the model one of {_kv_type(m)!r}; load the model with "
                         f"kv_type={str(kv_type).upper()!r}")
    if n_past > m.n_ctx:
        raise ParamError(f"{source} has {n_past} tokens, the context {m.n_ctx}; load the model with n_ctx={n_past} or "
                         f"more")
    more = n_bytes - 4 * n_past - _expected_nbytes(m, n_past)
    each = sum(leaf.nb[1] for kept in m.cache for leaf in kept if leaf.name.startswith(WHOLE))
    if more and each and more % each == 0 and -more // each < m.n_ctx:
        raise ParamError(f"{source} was saved with another context, what it holds of an encoded text is as long; load "
                         f"the model with n_ctx={m.n_ctx + more // each}")
    if more:
        raise broken(f"{n_bytes} bytes are not what {n_past} tokens take")
    return header, body


def _expected_nbytes(m, n):
    """Bytes of the cache rows of n tokens."""
    total = 0
    for block, kept in zip(m.description.blocks, m.cache, strict=True):
        window = getattr(block.mixer, "window", 0)
        for leaf in kept:
            n_rows = min(n, 1) if leaf.name.startswith("state") else n - _first(n, window)
            total += leaf.nb[1] * (leaf.ne[1] if leaf.name.startswith(WHOLE) else n_rows)
    return total
