"""The messages between driver and workers: greetings, ops, answers.

    [seq, ops]  + payload          from the driver, in order
    [seq, status, results] + bytes the answer to each; meanwhile [0, BUSY, []], or [0, WAITS, []] for another worker:
                                   so silence means something

    op                                      payload     answer
    [ALLOC, arena, nbytes]
    [FREE, arena]
    [SET, arena, offs, nbytes]              nbytes
    [FILL, arena, offs, nbytes, value]
    [COPY, from, offs, to, offs, nbytes]
    [GET, arena, offs, nbytes]                          nbytes
    [GRAPH, key, n rows, names nbytes]      rows, names
    [RUN, key]                                          nanoseconds
    [MEMORY]                                            free, total
    [HAVE, arena, offs, nbytes, key]                    1: these weights are there now, 0: they are not kept
    [KEEP, arena, offs, nbytes, key]
    [PEER, address, secret]                             1: that driver's session there can be reached, 0: it cannot
    [PUSH, arena, offs, nbytes, number]                 the bytes are laid out for another worker to fetch
    [DROP, number]                                      no worker will fetch them
    [TAKE, arena, offs, nbytes, address, secret, number]    they are fetched from the worker at that address
    [FETCH, secret, number, nbytes]                     nbytes; what a worker says to another one

Numbers of arenas are the driver's, never used twice.  After an error the rest of a message is skipped, but for what
says which arenas and graphs there are: driver and worker keep the same list of graphs (`GraphCache`), so a graph is
sent when the worker does not have it and at no other time.

A copy between workers is a PUSH in one stream and a TAKE in the other.  Who fetches connects like a driver, with the
same greeting and certificates, and names the secret that the driver gave its worker.
"""
import collections
import functools
import hashlib
import pathlib

import ggjit.ops
from ggjit.cluster.wire import BadMessage
from ggjit.ops.core.errors import NotSupported

PROTOCOL = 3
(ALLOC, FREE, SET, FILL, COPY, GET, GRAPH, RUN, MEMORY, HAVE, KEEP, PEER, PUSH, DROP, TAKE, FETCH) = range(16)
OK, FAILED, BUSY, WAITS = range(4)
MAX_GRAPHS = 64                 # graphs that a worker keeps for one driver
FRAME_NBYTES = 4 << 20          # largest payload of one SET, GET or PUSH
SECRET_NBYTES = 16


class GraphCache:
    """The most recently used graphs, at most MAX_GRAPHS: {key: (value, arenas)}.  Driver and worker keep equal caches
    by doing the same operations.

    dropped: called with each value that is kept no longer.
    """

    def __init__(self, dropped=lambda value: None):
        self._kept, self._dropped = collections.OrderedDict(), dropped

    def put(self, key, value, arenas):
        self._drop(key)
        self._kept[key] = value, frozenset(arenas)
        while len(self._kept) > MAX_GRAPHS:
            self._drop(next(iter(self._kept)))

    def _drop(self, key):
        if key in self._kept:
            self._dropped(self._kept.pop(key)[0])

    def clear(self):
        """Drop all graphs."""
        for key in list(self._kept):
            self._drop(key)

    def use(self, key):
        """The value, None if it is not kept."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def drop_arena(self, arena):
        """Drop the graphs that use an arena."""
        for key in [k for k, (_, arenas) in self._kept.items() if arena in arenas]:
            self._drop(key)

    def __len__(self):
        return len(self._kept)


@functools.cache
def kernels_digest():
    """Hash of all sources of ops.  Where the two sides differ in it, results could differ."""
    root = pathlib.Path(ggjit.ops.__file__).parent
    h = hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        h.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return h.hexdigest()


def hello():
    """The greeting that each side sends first."""
    return {"ggjit": ggjit.__version__, "protocol": PROTOCOL, "kernels": kernels_digest()}


def check_hello(mine, theirs, where):
    """NotSupported where the other side is another ggjit."""
    if not isinstance(theirs, dict) or "protocol" not in theirs:
        raise BadMessage(f"{where}: the greeting of the other side has no version")
    for key, what in (("ggjit", "version"), ("protocol", "protocol"), ("kernels", "kernels")):
        if theirs.get(key) != mine[key]:
            raise NotSupported(f"{where} runs ggjit {theirs.get('ggjit')!s:.40} with {what} {theirs.get(key)!s:.40}, "
                               f"this side {mine['ggjit']} with {mine[key]}: install the same version on both, or "
                               f"results could differ")
