"""The addresses of a plan's tensors, looked up once: in arrays if possible, else one by one."""
import functools

import numpy as np

from ggjit.core.buffer import Buffer, live_buffers
from ggjit.core.row_sizes import nbytes_of
from ggjit.core.table import TABLE
from ggjit.ops.core.record import T_BUFFER, T_OFFS, T_VIEW_OFFS, T_VIEW_SRC

_FACTS = [T_VIEW_SRC, T_VIEW_OFFS]
_BUFFER_BITS = 47               # of an offset, in one number with its buffer's


class PlanPlaces:
    """Tensor k of a PlanTensors lies at byte offs[k] of buffers[at[k]].

    version: of the table, before the first was looked up.  where(t): the place of any other tensor.
    """

    def __init__(self, tensors, where):
        self.version, self.tensors, self._where = TABLE.placement_version, tensors, where

    def __call__(self, t):
        return self._each.get(self.tensors.key(t)) or self._where(t)

    @functools.cached_property
    def _each(self):
        """{key of a tensor: (buffer, byte offset)}"""
        return dict(zip(self.tensors.keys, zip(map(self.buffers.__getitem__, self.at.tolist()), self.offs.tolist(),
                                               strict=True), strict=True))

    def spans(self):
        """(first bytes, ends) of the tensors: numbers that overlap where the tensors do."""
        tensors = self.tensors
        sizes = np.array([x.nbytes for x in tensors.handles], np.int64) if tensors.by_handle else nbytes_of(tensors.ids)
        first = (self.at << _BUFFER_BITS) + self.offs
        return first, first + sizes

    def lines(self, nbytes):
        """(first lines, ends) of the tensors in lines of so many bytes: buffers over the same memory are the same
        lines."""
        first, last = self.spans()
        begin = self.addresses(slice(None), [0 if b is None else b.base for b in self.buffers])
        return begin // nbytes, -(-(begin + last - first) // nbytes)

    def used(self, numbers):
        """The buffers in which these tensors lie, each once."""
        return [self.buffers[k] for k in np.flatnonzero(np.bincount(self.at[numbers])).tolist()]

    def addresses(self, numbers, first):
        """The address of each of these tensors.  first: address of each buffer, of those that are not used anything."""
        return np.array(first, np.int64)[self.at[numbers]] + self.offs[numbers]

    def put(self, places):
        """The tensors lie at these (buffer, byte offset)."""
        buffers = {id(buf): buf for buf, _ in places}
        number = {key: k for k, key in enumerate(buffers)}
        self.buffers = list(buffers.values())
        self.at = np.array([number[id(buf)] for buf, _ in places], np.int64)
        self.offs = np.array([offs for _, offs in places], np.int64)

    def find_all(self, placement, device):
        """Look all tensors up by the table and a Placement.  False: at least one has to be looked at itself, because
        it may have been freed, has no place, lies outside its buffer or where the device cannot reach it, or because
        its buffer binds tensors one by one."""
        ids, rows = self.tensors.ids, getattr(placement, "rows", None)
        if self.tensors.by_handle or TABLE.has_strays():
            return False
        base, view_offs = TABLE.words[ids[:, None], _FACTS].T
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
        self.buffers, self.at, self.offs = buffers, number, offs
        if not all(_reaches_all(device, buf) for buf in self.used(slice(None))):
            return False
        sizes = np.array([0 if buf is None else buf.size for buf in buffers], np.int64)
        return not ((offs < 0) | (offs + nbytes_of(ids) > sizes[number])).any()


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
