"""Weights: every tensor of a GGUF file as a leaf over the mapped file.  Nothing is copied or read ahead."""
import collections.abc
import itertools
from concurrent.futures import ThreadPoolExecutor

from ggjit.core.arguments import nearest
from ggjit.core.backend import TYPE_NULL
from ggjit.core.buffer import USAGE_WEIGHTS, place
from ggjit.core.html_repr import size_text
from ggjit.core.placing import move_tensors
from ggjit.display.html import table
from ggjit.models.files.kept_layout import Matrix, kept_layout
from ggjit.models.files.mapped_file import give_back, in_small_pages
from ggjit.ops.core.errors import ModelError, NoSuchName, TypeMismatch
from ggjit.ops.core.progress import work
from ggjit.ops.core.traits import all_traits
from ggjit.ops.core.types import F32
from ggjit.tensors.context import Context
from ggjit.tensors.tensor import set_param


class Weights(collections.abc.Mapping):
    """{name in the file: leaf}: `m.weights["blk.0.attn_q.weight"].numpy()`; a table in a notebook cell.

    Networks take theirs by `want`, which checks the shape.
    """

    def __init__(self, file, device):
        self.file, self.ctx = file, Context()
        self.buffers = []               # a buffer for each part of the file
        for part in file.parts:
            self.buffers.append(device.buffer_from_host_ptr(part.map(), read_only=True))
            self.buffers[-1].usage = USAGE_WEIGHTS
        self.device, self.repacked = device, {}         # id -> leaf in CPU_REPACK, or measured as if it were
        self.used = set()                               # names of the file's tensors that were handed out
        self.adapters = []
        self._leaves, self.moved, self.repack_buffers = {}, [], []     # buffers of leaves that lie elsewhere
        self.maps_layout = False                        # are the repacked ones mapped from where they are kept?

    @property
    def copies(self):
        """Buffers of the leaves that do not lie in the file."""
        return [*self.moved, *self.repack_buffers]

    def __getitem__(self, name):
        """The leaf of that name.  Errors: KeyError that names the nearest."""
        if name not in self.file.tensors:
            known = [n for n in self.file.tensors if isinstance(name, str)]
            raise NoSuchName(f"{self.file.path} has no tensor {name!r}{nearest(str(name), known)}; list(m.weights) has "
                             f"the {len(self.file.tensors)} names")
        leaf = self._leaves.get(name)
        return leaf if leaf is not None else self._new_leaf(name, self.file.tensors[name])

    def __iter__(self):
        return iter(self.file.tensors)

    def __len__(self):
        return len(self.file.tensors)

    def _repr_html_(self):
        rows = ((name, repr(info.type), f"({', '.join(map(str, reversed(info.ne)))})", f"{info.nbytes:,}")
                for name, info in self.file.tensors.items())
        return table(rows, ("name", "type", "shape", "bytes"), (3,))

    def __repr__(self):
        return f"<{len(self)} weights, {size_text(self.nbytes)}: {', '.join(itertools.islice(self, 3))}, ...>"

    @property
    def repacked_nbytes(self):
        """Bytes of the leaves in CPU_REPACK."""
        return sum(map(_aligned, self.repacked.values()))

    @property
    def nbytes(self):
        """Bytes of all tensors in the file."""
        return sum(info.nbytes for info in self.file.tensors.values())

    def want(self, name, *ne, optional=False, named=None):
        """The leaf `name` with exactly the shape `ne` (ggml order).  named: another leaf of the same bytes, so called.

        Errors: ModelError for a missing tensor, another shape, or a type without kernels.
        """
        info = self.file.tensors.get(name)
        if info is None:
            if optional:
                return None
            raise ModelError(f"{self.file.path}: tensor {name!r} is missing, the {self.file.arch} architecture "
                             f"needs it; convert the model again")
        found = tuple(info.ne) + (1,) * (4 - len(info.ne))
        wanted = tuple(ne) + (1,) * (4 - len(ne))
        if found != wanted:
            raise ModelError(f"{self.file.path}: tensor {name!r} has shape {list(info.ne)}, the metadata calls for "
                             f"{list(ne)}; convert the model again")
        if info.type not in all_traits():
            raise ModelError(f"{self.file.path}: tensor {name!r} has type {info.type!r}, which has no kernels yet; "
                             f"convert the model to one of {', '.join(map(repr, all_traits()))}")
        self.used.add(name)
        called = named or name
        return self._leaves[called] if called in self._leaves else self._new_leaf(called, info)

    def _new_leaf(self, called, info):
        leaf = self._leaves[called] = self.ctx.new_tensor(info.type, info.ne, called)
        # mapped memory has the file's alignment; kernels accept any
        place(leaf, self.buffers[info.part], info.offs)
        return leaf

    def beside(self, name):
        """[(A, B, factor)] of the adapters of the weight `name`."""
        return [pair for adapter in self.adapters for pair in adapter.beside(name)]

    def move(self, takes, buft):
        """Copy the leaves whose names `takes` accepts into memory of `buft`, where they lie from then on.

        The file's pages they came from are given back to the system.  Errors: OutOfMemory.
        """
        leaves = [t for name, t in self._leaves.items() if takes(name)]
        if self.device.type == TYPE_NULL:               # NULL devices hold no data
            self.moved += [buf for buf, _ in move_tensors([(buft, leaves)])]
            return
        raw = {t.id: t.buffer.host_bytes(t.offs, t.nbytes) for t in leaves}
        with work(f"loading weights into {buft.name}", len(leaves)) as step:
            for buf, tensors in move_tensors([(buft, leaves)]):
                self.moved.append(buf)
                buf.set_usage(USAGE_WEIGHTS)
                for t in tensors:
                    buf.set_tensor(t, raw[t.id])
                    give_back(raw[t.id])
                    step()
                buf.read_only = True

    def unfreeze(self):
        """Move every leaf into memory that may be written, marked as a parameter to train.  Errors: TypeMismatch."""
        wrong = next((t for t in self._leaves.values() if t.type is not F32), None)
        if wrong is not None:
            raise TypeMismatch(f"{self.file.path}: {wrong.name!r} is {wrong.type!r}, only F32 weights can be trained "
                               f"themselves; train an adapter beside them, or convert the model to F32")
        self.move(lambda name: True, self.device.buffer_type())
        for buf in self.moved:
            buf.read_only = False
        for t in self._leaves.values():
            set_param(t)

    def repack(self, leaves, n_threads=1):
        """Move matrices that have a layout into a CPU_REPACK buffer; only products and get_rows may read them then.

        A layout that an earlier load kept is mapped (kept_layout.py).  Else each is packed straight from the mapped
        file, whose pages are given back to the system.  n_threads 0: the leaves are only placed, as a process needs it
        that compiles for others.
        """
        buft = next((b for b in self.device.extra_buffer_types() if b.name == "CPU_REPACK"), None)
        if buft is not None or self.device.type == TYPE_NULL:
            self.repacked = {t.id: t for t in leaves}
        starts = itertools.accumulate((_aligned(t) for t in self.repacked.values()), initial=0)
        matrices = [Matrix(t.type, t.ne, t.nbytes, self.buffers.index(t.buffer), t.offs, at)
                    for t, at in zip(self.repacked.values(), starts, strict=False)]
        kept = kept_layout(self.file, matrices, self.repacked_nbytes) if n_threads or buft is None else None
        layout = kept.open() if kept is not None else None
        self.maps_layout = layout is not None
        if buft is None or not self.repacked:
            return
        buffer = buft.buffer_over(layout) if self.maps_layout else buft.alloc_buffer(self.repacked_nbytes)
        self.repack_buffers.append(buffer)
        buffer.set_usage(USAGE_WEIGHTS)
        todo = [(m.at, t.buffer.host_bytes(t.offs, t.nbytes))
                for t, m in zip(self.repacked.values(), matrices, strict=True)]
        for t, m in zip(self.repacked.values(), matrices, strict=True):
            buffer.hold(m.at, t.type, t.ne[0], t.ne[1] * t.ne[2])
            place(t, buffer, m.at)
        if n_threads and not self.maps_layout:
            self._pack(buffer, todo, n_threads)
            if kept is not None:
                kept.keep(buffer.layout())
        buffer.read_only = True

    def read_by_rows(self, leaf):
        """Only some rows of this leaf, a table, will be read."""
        if self.device.type != TYPE_NULL:
            in_small_pages(leaf.buffer.host_bytes(leaf.offs, leaf.nbytes))

    def _pack(self, buffer, todo, n_threads):
        def one(item):
            at, raw = item
            buffer.pack(at, raw)
            give_back(raw)
        with work("repacking weights", len(todo)) as step, ThreadPoolExecutor(n_threads) as pool:
            for _ in pool.map(one, todo):
                step()

    def free(self):
        self._leaves.clear()
        self.ctx.free()
        for buf in (*self.moved, *self.buffers):
            buf.free()


def _aligned(t):
    """Bytes of a leaf up to the next cache line."""
    return -(-t.nbytes // 64) * 64
