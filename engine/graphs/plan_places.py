"""Where the tensors of a plan lie, looked up once: for all of them in arrays, else one after the other."""
import numpy as np

from ggjit.core.buffer import Buffer, live_buffers
from ggjit.core.row_sizes import nbytes_of
from ggjit.core.table import TABLE
from ggjit.ops.core.record import T_BUFFER, T_GEN, T_OFFS, T_VIEW_OFFS, T_VIEW_SRC

_FACTS = [T_GEN, T_VIEW_SRC, T_VIEW_OFFS]


class PlanPlaces:
    """version: of the table, before the first was looked up.  tensors: handles, each once; found: {id of a handle:
    (buffer, byte offset)} in their order."""

    def __init__(self, where, tensors):
        self.version, self._where = TABLE.placement_version, where
        self.tensors = list({id(x): x for x in tensors}.values())
        self.found = {}

    def __call__(self, t):
        return self.found.get(id(t)) or self._where(t)

    def of(self, tensors):
        """[(buffer, byte offset)] of tensors that were looked up."""
        return list(map(self.found.__getitem__, map(id, tensors)))

    def buffers(self):
        """{id of a buffer: buffer}"""
        return {id(buf): buf for buf, _ in self.found.values()}

    def find_all(self, placement, device):
        """Look all tensors up by the table and a Placement.  False: at least one has to be looked at itself, because
        it was freed, has no place, lies outside its buffer or where the device cannot reach it, or because its buffer
        binds tensors one by one."""
        tensors, rows = self.tensors, getattr(placement, "rows", None)
        ids = np.array([x.id for x in tensors], np.int64)
        generation, base, view_offs = TABLE.words[ids[:, None], _FACTS].T
        bases = [x.view_src for x in tensors if x.view_src is not None]
        if generation.tolist() != [x.generation for x in tensors] or \
                not all([ctx.alive for ctx in {x.ctx for x in (*tensors, *bases)}]):
            return False
        is_view = base >= 0
        base, view_offs = np.where(is_view, base, ids), np.where(is_view, view_offs, 0)
        number, offs = TABLE.words[base, T_BUFFER], TABLE.words[base, T_OFFS] + view_offs
        named, number = np.unique(number, return_inverse=True)
        buffers, bare = live_buffers(named.tolist()), np.flatnonzero(named[number] < 0)
        if len(bare):
            if rows is None:
                return False
            at, offs[bare] = rows.of(ids[bare], base[bare], view_offs[bare])
            number[bare] = at + len(buffers)
            buffers += rows.buffers
            if at.min() < 0:
                return False
        used = [buffers[k] for k in np.unique(number).tolist()]
        if not all(_reaches_all(device, buf) for buf in used):
            return False
        sizes = np.array([0 if buf is None else buf.size for buf in buffers], np.int64)
        if ((offs < 0) | (offs + nbytes_of(ids) > sizes[number])).any():
            return False
        self.found = dict(zip(map(id, tensors), zip(map(buffers.__getitem__, number.tolist()), offs.tolist(),
                                                    strict=True), strict=True))
        return True


def _reaches_all(device, buf):
    """Is the buffer there, and may the device use any tensor that lies in it?"""
    return buf is not None and type(buf).is_bound is Buffer.is_bound and device.supports_buft(buf.buft)


class PlacedRows:
    """The places of a plan of memory by tensor id, as arrays.  buffers: those that the numbers name."""

    def __init__(self, ids, numbers, offs, buffers):
        order = np.argsort(ids)
        self._ids, self._numbers, self._offs, self.buffers = ids[order], numbers[order], offs[order], buffers

    def of(self, ids, bases, view_offs):
        """(numbers of buffers, -1: it has no place; byte offsets) of tensors, of views else by the place of their
        base."""
        own, itself = self._find(ids)
        base, its_base = self._find(bases)
        at = np.where(itself, own, base)
        number = np.where(itself | its_base, self._numbers[at], -1)
        return number, self._offs[at] + np.where(itself, 0, view_offs)

    def _find(self, ids):
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return at, self._ids[at] == ids
