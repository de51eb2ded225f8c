"""Many texts through one model: in parts, on this machine or on the workers of a cluster; a run that stopped can
continue.

    texts     | 0 .. 31 | 32 .. 63 | 64 .. 95 | ...        each part is a task; a worker loads the model once
    keep/     | 0.npy   | 1.npy    |          | ...        parts that are done: a second call computes the others
    result    in the order of the texts: one array of vectors, or a list of texts

On a cluster Dask gives the parts to its workers, and the parts of a worker that dies to another.
"""
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib

import numpy as np

from ggjit.core.arguments import typed_call
from ggjit.models.core.checks import integer
from ggjit.models.networks.load import EMBEDDED, load_model
from ggjit.ops.core.errors import BadFile, GgjitError, ModelError, ParamError, TypeMismatch, extra
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.whole_file import whole_file

N_PART = 32                     # number of texts in a part
PARTS_AHEAD = 2                 # parts queued at a worker, so that it is never idle
MAX_PART = 1 << 16


class EmbeddingResults:
    """Embeddings of a part, kept as an array."""
    name, suffix = "embed_texts", ".npy"

    @staticmethod
    def compute(m, texts, options):
        return m.embed(texts)

    @staticmethod
    def save(f, vectors):
        np.save(f, vectors)

    @staticmethod
    def load(path):
        return np.load(path)


class GeneratedTexts:
    """The generated continuations of the texts of a part, kept as JSON."""
    name, suffix = "generate_texts", ".json"

    @staticmethod
    def compute(m, texts, options):
        runs = m.generate(texts, **options)
        for _ in runs:
            """All pieces, as they come."""
        return runs.texts

    @staticmethod
    def save(f, texts):
        f.write(json.dumps(texts).encode())

    @staticmethod
    def load(path):
        return parse_json(path.read_bytes())


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
    out = _in_parts(EmbeddingResults, model, texts, cluster, keep, n_part, progress, {}, {})
    return np.concatenate(out) if out else np.empty((0, _dimension(model)), np.float32)


@typed_call
def generate_texts(model, texts, cluster=None, keep=None, n_part=N_PART, progress=None, load=None, **options):
    """What continues each of many texts, as a list of strings in their order.

        with gg.cluster.local(n_workers=2) as cl:
            answers = generate_texts("model.gguf", prompts, cluster=cl, keep="answers.parts", n_predict=64, temp=0)

    model: None: the small one that comes with the package.  n_part: texts that are computed together, up to as many at
    once as the model has sequences for.  load: options of load_model; options: of `m.generate` (n_predict=64, temp=0,
    stop ...).  Who computes a part makes no difference.  The other arguments and errors: as in embed_texts; those of
    `m.generate`.
    """
    out = _in_parts(GeneratedTexts, model, texts, cluster, keep, n_part, progress, load or {}, options)
    return [text for part in out for text in part]


def _in_parts(task, model, texts, cluster, keep, n_part, progress, load, options):
    """The results of all parts, in order."""
    if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
        raise TypeMismatch(f"{task.name} takes a list of strings, got {type(texts).__name__}")
    n_part = integer("n_part", n_part, 1, MAX_PART)
    client = getattr(cluster, "client", None)
    if cluster is not None and client is None:
        raise ParamError(f"{cluster!r} has no Dask scheduler to give parts to its workers; use gg.cluster.local(), or "
                         f"connect to a scheduler")
    if model is None and task is GeneratedTexts:
        model = EMBEDDED
    if not isinstance(model, str | os.PathLike):
        raise TypeMismatch(f"{task.name} takes the path of a GGUF file, got {model!r}")
    path = os.path.abspath(model)
    job = BulkTask(task, path, _stamp(path), load, options)
    parts = [list(texts[at:at + n_part]) for at in range(0, len(texts), n_part)]
    kept = _Kept(keep, task, [job.stamp, n_part, *texts] if task is EmbeddingResults else
                 [task.name, job.stamp, n_part, sorted(load.items()), sorted(options.items()), *texts])
    todo = [k for k in range(len(parts)) if not kept.has(k)]
    advance = progress or (lambda n: None)
    advance(sum(len(p) for p in parts) - sum(len(parts[k]) for k in todo))
    for k, found in _here(job, parts, todo) if client is None else _on_workers(client, job, parts, todo):
        kept.put(k, found)
        advance(len(found))
    return [kept.get(k) for k in range(len(parts))]


@dataclasses.dataclass
class BulkTask:
    """What is done with each part, as it goes to a worker."""
    task: type
    path: str
    stamp: str
    load: dict          # options of load_model
    options: dict       # options of the task


def _here(job, parts, todo):
    """(number of a part, its result), one after the other."""
    if todo:
        with load_model(job.path, **job.load) as m:
            for k in todo:
                yield k, job.task.compute(m, parts[k], job.options)


def _on_workers(client, job, parts, todo):
    """As `_here`, computed by workers, in the order in which they finish."""
    distributed = extra("distributed", "cluster")
    todo, running = todo[::-1], {}
    done = distributed.as_completed(loop=client.loop, raise_errors=False)

    def submit():
        k = todo.pop()
        future = client.submit(done_part, job, parts[k], pure=False)
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


_models = {}                    # {BulkTask's path and load options: model} of this worker, at most one entry
_loading = ForkLock()


def _loaded(job):
    """The model of a worker; one thread, as the worker has."""
    key = repr((job.path, job.stamp, job.load))
    with _loading:
        if key not in _models:
            _models.clear()
            _models[key] = _load(job.path, job.stamp, job.load)
        return _models[key]


def _load(path, stamp, load):
    try:
        mine = _stamp(path)
    except OSError as e:
        raise ModelError(f"{path}: a worker cannot read it ({e.strerror}); put the model there too") from None
    if mine != stamp:
        raise ModelError(f"{path}: a worker has another file under this path than the driver; copy the driver's there")
    return load_model(path, **{**load, "n_threads": 1})


def done_part(job, texts):
    """The result of one part, on a worker."""
    return job.task.compute(_loaded(job), texts, job.options)


def _stamp(path):
    """The identity of a model file: its size and the hash of its bytes."""
    facts = os.stat(path)
    return _hashed(path, facts.st_size, facts.st_mtime_ns, facts.st_ino)


@functools.lru_cache(maxsize=16)
def _hashed(path, size, *changed):
    """The hash of the file's contents, computed again when the file was changed."""
    with open(path, "rb") as f:
        return f"{size}-{hashlib.file_digest(f, functools.partial(hashlib.blake2b, digest_size=16)).hexdigest()}"


def _dimension(path):
    with load_model(path, reserve=False) as m:
        return m.n_embd


class _Kept:
    """Results of parts that are done: in memory, or as files of a folder, whose name says what they belong to."""

    def __init__(self, folder, task, key):
        self._found, self._task = {}, task
        self._folder = None
        if folder is not None:
            digest = hashlib.blake2b(digest_size=8)
            for part in key:
                raw = str(part).encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "little") + raw)
            self._folder = pathlib.Path(folder) / digest.hexdigest()
            self._folder.mkdir(parents=True, exist_ok=True)

    def _file(self, k):
        return self._folder / f"{k}{self._task.suffix}"

    def has(self, k):
        return self._folder is not None and self._file(k).is_file()

    def put(self, k, result):
        if self._folder is None:
            self._found[k] = result
            return
        with whole_file(self._file(k), devices=False) as f:
            self._task.save(f, result)

    def get(self, k):
        if self._folder is None:
            return self._found.pop(k)
        try:
            return self._task.load(self._file(k))
        except (ValueError, EOFError) as e:
            raise BadFile(f"{self._file(k)}: {e}; delete it, and it is computed again") from None


def drop_kept(keep):
    """Delete the parts that were kept in a folder, and the folder if nothing else is in it."""
    for folder in pathlib.Path(keep).iterdir() if os.path.isdir(keep) else ():
        if folder.is_dir():
            for file in folder.iterdir():
                if file.suffix in (EmbeddingResults.suffix, GeneratedTexts.suffix) and file.stem.isdigit():
                    file.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()
    with contextlib.suppress(OSError):
        os.rmdir(keep)
