"""Many texts through one model: in parts, here or on the workers of a cluster, and on where it stopped.

    texts     | 0 .. 31 | 32 .. 63 | 64 .. 95 | ...        each part is a task; a worker loads the model once
    keep/     | 0.npy   | 1.npy    |          | ...        parts that are done: a second call computes the others
    result    one array, in the order of the texts

On a cluster Dask gives the parts to its workers, and the parts of a worker that dies to another.
"""
import contextlib
import functools
import hashlib
import os
import pathlib

import numpy as np

from ggjit.core.arguments import typed_call
from ggjit.models.core.checks import integer
from ggjit.models.networks.load import load_model
from ggjit.ops.core.errors import BadFile, GgjitError, ModelError, ParamError, TypeMismatch, extra
from ggjit.ops.core.whole_file import whole_file

N_PART = 32                     # texts of a part
PARTS_AHEAD = 2                 # parts that a worker has waiting: it never runs dry
SAMPLE_NBYTES = 1 << 20         # of a model file's begin and end, by which it is known again
MAX_PART = 1 << 16


@typed_call
def embed_texts(model, texts, cluster=None, keep=None, n_part=N_PART, progress=None):
    """Embeddings of many texts, (n, dim) float32 in their order: the same bits as `load_model(model).embed(texts)`.

        with gg.cluster.local(n_workers=2) as cl:
            vectors = embed_texts("minilm.gguf", texts, cluster=cl, keep="vectors.parts")

    model: the path of a GGUF file, which every worker reads for itself.  cluster: of gg.cluster, with a Dask scheduler
    (`cl.client`); None: here.  keep: a folder for parts that are done; a call that was stopped goes on there.
    progress(n): called with the texts that are done since the last call.
    Errors: TypeMismatch, ParamError, those of load_model; ModelError where a worker has another file under that path.
    """
    if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
        raise TypeMismatch(f"embed_texts takes a list of strings, got {type(texts).__name__}")
    n_part = integer("n_part", n_part, 1, MAX_PART)
    client = getattr(cluster, "client", None)
    if cluster is not None and client is None:
        raise ParamError(f"{cluster!r} has no Dask scheduler to give parts to its workers; use gg.cluster.local(), or "
                         f"connect to a scheduler")
    path = os.path.abspath(model)
    stamp, parts = _stamp(path), [list(texts[at:at + n_part]) for at in range(0, len(texts), n_part)]
    kept = _Kept(keep, [stamp, n_part, *texts])
    todo = [k for k in range(len(parts)) if not kept.has(k)]
    tell = progress or (lambda n: None)
    tell(sum(len(p) for p in parts) - sum(len(parts[k]) for k in todo))
    for k, vectors in (_here if client is None else functools.partial(_on_workers, client))(path, stamp, parts, todo):
        kept.put(k, vectors)
        tell(len(vectors))
    out = [kept.get(k) for k in range(len(parts))]
    return np.concatenate(out) if out else np.empty((0, _dimension(path)), np.float32)


def _here(path, stamp, parts, todo):
    """(number of a part, its vectors), one after the other."""
    if todo:
        with load_model(path) as m:
            for k in todo:
                yield k, m.embed(parts[k])


def _on_workers(client, path, stamp, parts, todo):
    """The same, in the order in which workers are done."""
    distributed = extra("distributed", "cluster")
    todo, running = todo[::-1], {}
    done = distributed.as_completed(loop=client.loop, raise_errors=False)

    def submit():
        k = todo.pop()
        future = client.submit(embed_part, path, stamp, parts[k], pure=False)
        running[future] = k
        done.add(future)
    try:
        for _ in range(min(len(todo), PARTS_AHEAD * max(len(client.nthreads()), 1))):
            submit()
        for future in done:
            try:
                yield running[future], future.result()
            except distributed.KilledWorker as e:
                raise GgjitError(f"part {running[future]} was given up: {e.allowed_failures + 1} workers died with it; "
                                 f"is a text too long for their memory?") from e
            del running[future]
            if todo:
                submit()
    finally:
        client.cancel([*running])


@functools.lru_cache(maxsize=2)
def _loaded(path, stamp):
    """The model of a worker; one thread, as the worker has."""
    try:
        mine = _stamp(path)
    except OSError as e:
        raise ModelError(f"{path}: a worker cannot read it ({e.strerror}); put the model there too") from None
    if mine != stamp:
        raise ModelError(f"{path}: a worker has another file under this path than the driver; copy the driver's there")
    return load_model(path, n_threads=1)


def embed_part(path, stamp, texts):
    """The vectors of one part, on a worker."""
    return _loaded(path, stamp).embed(texts)


def _stamp(path):
    """What a model file is known by: its size, its begin and its end."""
    with open(path, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(0)
        h = hashlib.blake2b(f.read(SAMPLE_NBYTES), digest_size=16)
        f.seek(max(size - SAMPLE_NBYTES, 0))
        h.update(f.read(SAMPLE_NBYTES))
    return f"{size}-{h.hexdigest()}"


def _dimension(path):
    with load_model(path, reserve=False) as m:
        return m.n_embd


class _Kept:
    """Vectors of parts that are done: in memory, or as files of a folder, whose name says what they belong to."""

    def __init__(self, folder, key):
        self._found = {}
        self._folder = None
        if folder is not None:
            digest = hashlib.blake2b(digest_size=8)
            for part in key:
                raw = str(part).encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "little") + raw)
            self._folder = pathlib.Path(folder) / digest.hexdigest()
            self._folder.mkdir(parents=True, exist_ok=True)

    def _file(self, k):
        return self._folder / f"{k}.npy"

    def has(self, k):
        return self._folder is not None and self._file(k).is_file()

    def put(self, k, vectors):
        if self._folder is None:
            self._found[k] = vectors
            return
        with whole_file(self._file(k), devices=False) as f:
            np.save(f, vectors)

    def get(self, k):
        if self._folder is None:
            return self._found.pop(k)
        try:
            return np.load(self._file(k))
        except (ValueError, EOFError) as e:
            raise BadFile(f"{self._file(k)}: {e}; delete it, and it is computed again") from None


def drop_kept(keep):
    """Delete the parts that embed_texts kept in a folder, and the folder if nothing else is in it."""
    for folder in pathlib.Path(keep).iterdir() if os.path.isdir(keep) else ():
        if folder.is_dir():
            for file in folder.glob("*.npy"):
                file.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()
    with contextlib.suppress(OSError):
        os.rmdir(keep)
