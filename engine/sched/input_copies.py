"""Copies between backends: whether the last copy is still valid, what to wait for, and how to move the bytes.

    the original is ...
    a leaf that this run leaves alone       copied again when it was written, after every stream that reaches it came
                                            to rest; kept copies are good until then
    computed by one backend                 copied in the order of both streams, or that stream comes to rest first
    written by several                      all of them come to rest first
"""
from ggjit.core.buffer import USAGE_WEIGHTS, Buffer
from ggjit.core.events import event_synchronize
from ggjit.core.slots import as_bool
from ggjit.core.versions import VERSIONS
from ggjit.sched.experts import copy_experts
from ggjit.tensors.transfer import copy_bytes


class Copy:
    """One tensor on one backend, in one instance.

    writer      number of the backend that computes the original, -1: a leaf that this run leaves alone
    waits       numbers of the asynchronous backends that must come to rest before
    experts     the ids that say which experts of a weight are needed (engine/sched/experts.py), None: all of it
    """

    __slots__ = ("number", "src", "dst", "kept", "writer", "waits", "base_id", "nbytes", "experts", "place", "stamp",
                 "fast", "buf")

    def __init__(self, number, src, dst, kept, writer, waits, base_id, nbytes):
        self.number, self.src, self.dst, self.kept, self.writer, self.waits = number, src, dst, kept, writer, waits
        self.base_id, self.nbytes = base_id, nbytes
        self.experts = self.place = self.stamp = None
        self.look_up()

    def look_up(self):
        """Look the places up again.  If the original or the copy moved, the copy has to be made again."""
        self.fast = self.buf = None
        place = self.src._where(), self.dst._where()
        if place != self.place:
            self.place, self.stamp = place, None

    def is_host_weight(self):
        """Is the original a weight in host memory, of which a copy callback may copy a part?"""
        buf = self.src.buffer
        return buf.usage == USAGE_WEIGHTS and buf.buft.is_host()

    def still_good(self):
        """Was it copied before, and was the original left alone since?"""
        buf = self.buf
        if buf is None:
            buf = self.buf = self.src.buffer
        trusted = buf.trusted
        now = VERSIONS.item(self.base_id), buf.version
        if self.stamp == now and trusted:
            return True
        self.stamp = now
        return False

    def make(self, run, part, ids):
        """Copy it.  Returns (bytes copied, the ids whose experts were looked up last, with their values)."""
        backends, b = run.support.backends, part.number
        if self.writer < 0:
            if self.waits and (self.kept or not self.still_good()):
                _rest(backends, self.waits)
        else:
            _rest(backends, self.waits)
            if self.writer != b:
                if run.support.copies_async[b] and \
                        part.backend.copy_tensor_async(self.src, self.dst, backends[self.writer]):
                    return self.nbytes, ids
                if run.support.is_async[self.writer]:
                    backends[self.writer].synchronize()
        # the backend may still read the former values of the copy
        if run.support.is_async[b] and not part.backend.writes_in_order:
            if part.event is not None and run.n_instances > 1:
                event_synchronize(part.event)
            else:
                part.backend.synchronize()
        if run.copy_callback is not None and self.is_host_weight() and \
                as_bool(run.copy_callback(part.backend, self.src, self.dst, part.graph.nodes), "the copy callback"):
            self.stamp = None                             # the copy holds what the callback wrote
            return 0, ids
        if self.experts is not None:
            return copy_experts(run, self, ids)
        if self.fast is None:
            self.fast = _direct(self.src, self.dst)
        if self.fast:
            self.fast[0][...] = self.fast[1]
        else:
            copy_bytes(self.src, self.dst)
        return self.nbytes, ids


def _rest(backends, numbers):
    for k in numbers:
        backends[k].synchronize()


def _direct(src, dst):
    """(destination, source) arrays where the slots would only copy from one arena to another; False: they do more."""
    a, b = src.buffer, dst.buffer
    own = type(b).copy_tensor is not Buffer.copy_tensor or type(a).get_tensor is not Buffer.get_tensor
    if type(b).set_tensor is not Buffer.set_tensor or own and not a.buft.is_host():
        return False
    if a._arena is None or b._arena is None or src.nbytes != dst.nbytes:
        return False
    return b.host_bytes(dst.offs, dst.nbytes), a.host_bytes(src.offs, src.nbytes)
