"""The memory of a network by term: what it takes now (`m.memory()`), and what it will take (`ggjit peak`).

    term                    pages                   what
    weights                 of the file             mapped; in memory once they were read
    weights in DEVICE       anonymous               copied into the memory of a device
    repacked weights        anonymous, or a file's  in a layout that products read faster; mapped where it was kept
    adapters                both                    LoRA matrices
    KV cache, state         anonymous               what layers keep of texts
    compute                 anonymous               results of nodes, as planned
    kernel work             anonymous               scratch memory of kernels, one buffer for the process
    inputs                  anonymous               token ids, positions, masks of the planned graphs
    logits                  anonymous               arrays that were handed out and are still in use
    tokenizer               both                    the vocabulary as the tokenizer holds it
    code                    both                    kernels, plans and libraries that came with them
    free                    anonymous               on the heap, between what is used
    Python and libraries    both                    what the process held before the model was loaded

The last one is not the model's: `.anonymous` and `.file` leave it out.
"""
import contextlib
import dataclasses
import html
import itertools
import weakref

import numpy as np

from ggjit.alloc.report import mib
from ggjit.core.process_memory import heap_free, is_cached, resident, taken_now
from ggjit.models.files.mapped_file import give_back
from ggjit.models.text.tokenizer import tokenizer_nbytes
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F32

# bytes of a file that the system maps, at least, around each page that is read (fault_around_bytes); places of a table
# that are read to find out
AROUND, N_TOUCHED = 1 << 16, 64
TOKENIZER, WORK, FREE, PROCESS = "tokenizer", "kernel work", "free", "Python and libraries"
COUNTED = TOKENIZER, "code", PROCESS            # terms that are measured, not computed from sizes
# of code: what any model's kernels and modules take; objects and rows of a plan, per node of the first and of each;
# and what loading leaves free on the heap, where the first plans lie.  Measured, within 3 MB, on the models of a test.
KERNELS_NBYTES, FIRST_NODE_NBYTES, NODE_NBYTES, FREE_NBYTES = 7 << 19, 3000, 1350, 9 << 19
PACKING_NBYTES = 3 << 20        # what packing weights leaves free on the heap besides, and mapping packed ones does not
HOST, MAPPED, OF_ALL = "host", "mapped", "of all models of the process"
HEAD = ("", "anonymous", "of files", "size", "")


@dataclasses.dataclass(frozen=True)
class MemoryTerm:
    """Bytes of one kind.  nbytes: its size; anonymous, file: of its pages that this process holds.

    device: whose memory it is; of devices with memory of their own this process holds nothing.
    """
    name: str
    nbytes: int
    anonymous: int = 0
    file: int = 0
    device: str = HOST
    about: str = ""


class MemoryUse:
    """Bytes by term.  `rows`: MemoryTerm, `process`: the process's own figures beside them, a ProcessMemory or None.

        use = m.memory()
        use.anonymous, use.file         what the model takes from the process, in bytes
        use.terms["KV cache"]           by name; all of them together are what the process takes
        use.process.high_water          the most that the process took so far
    """

    def __init__(self, rows, process=None, title=""):
        self.rows, self.process, self.title = [row for row in rows if row.nbytes], process, title

    @property
    def terms(self):
        """{name: bytes of the process's memory}; terms of the same name on several devices are added."""
        found = {}
        for row in self.rows:
            found[row.name] = found.get(row.name, 0) + row.anonymous + row.file
        return found

    @property
    def anonymous(self):
        """Bytes of anonymous pages that the model takes."""
        return sum(row.anonymous for row in self.rows if row.name != PROCESS)

    @property
    def file(self):
        """Bytes of pages of files that the model takes."""
        return sum(row.file for row in self.rows if row.name != PROCESS)

    @property
    def total(self):
        """Bytes of the whole process, by the terms."""
        return sum(self.terms.values())

    def __add__(self, other):
        """Of two models in one process, this one loaded before the other: what models share counts once."""
        mine = [row for row in self.rows if row.about != OF_ALL]
        shared = sorted((row for row in self.rows + other.rows if row.about == OF_ALL), key=lambda row: row.nbytes)
        theirs = [row for row in other.rows if row.about != OF_ALL and row.name not in (FREE, PROCESS)]
        return MemoryUse([*mine, *theirs, *{row.name: row for row in shared}.values()], self.process, self.title)

    def without_tokenizer(self):
        """Of a draft model, which reads the token ids of another."""
        return MemoryUse([row for row in self.rows if row.name != TOKENIZER], self.process, self.title)

    @property
    def devices(self):
        """{device: {term: bytes}} of devices with memory of their own."""
        found = {}
        for row in self.rows:
            if row.device != HOST:
                of_device = found.setdefault(row.device, {})
                of_device[row.name] = of_device.get(row.name, 0) + row.nbytes
        return found

    def filled(self):
        """The same use of memory after every page of it was written to."""
        def full(row):
            return row if row.device != HOST or row.name in COUNTED else dataclasses.replace(
                row, **{"file" if row.about == MAPPED else "anonymous": row.nbytes})
        return MemoryUse([full(row) for row in self.rows], self.process, self.title)

    def as_dict(self):
        """The values for JSON."""
        return {"anonymous": self.anonymous, "file": self.file, "total": self.total, "terms": self.terms,
                "devices": self.devices, "process": self.process and dataclasses.asdict(self.process)}

    def table(self):
        """Lines of text, in columns."""
        lines = [(row.name if row.device == HOST else f"{row.name} in {row.device}", mib(row.anonymous), mib(row.file),
                  mib(row.nbytes), row.about) for row in self.rows]
        lines.append(("the model", mib(self.anonymous), mib(self.file), "", ""))
        whole = [sum(getattr(row, kind) for row in self.rows) for kind in ("anonymous", "file")]
        lines.append(("together", *map(mib, whole), "", ""))
        if self.process is not None:
            p = self.process
            lines.append(("this process now", mib(p.anonymous), mib(p.file), "", f"at most {mib(p.high_water)} so far"))
        return lines

    def __str__(self):
        lines = [HEAD, *self.table()]
        width = [max(len(line[k]) for line in lines) for k in range(4)]
        text = [self.title] * bool(self.title)
        for line in lines:
            cells = [line[0].ljust(width[0]), *(c.rjust(w) for c, w in zip(line[1:4], width[1:], strict=True)), line[4]]
            text.append("  ".join(cells).rstrip())
        return "\n".join(text)

    def __repr__(self):
        return f"<MemoryUse anonymous={mib(self.anonymous)} file={mib(self.file)}>"

    def _repr_html_(self):
        def row(cells, tag):
            left, right = "text-align:left", "text-align:right;white-space:nowrap"
            return "<tr>" + "".join(f"<{tag} style='{left if k in (0, 4) else right}'>"
                                    f"{html.escape(c)}</{tag}>" for k, c in enumerate(cells)) + "</tr>"
        title = f"<b>{html.escape(self.title)}</b>" * bool(self.title)
        return f"{title}<table>{row(HEAD, 'th')}{''.join(row(line, 'td') for line in self.table())}</table>"


# ---------------------------------------------------------------- what is in memory
def term_of(name, arrays, device=HOST, about=""):
    """The MemoryTerm of host arrays."""
    anonymous = file = 0
    for a in arrays:
        n_anonymous, n_file = resident(a) or (a.nbytes, 0)
        anonymous, file = anonymous + n_anonymous, file + n_file
    return MemoryTerm(name, sum(a.nbytes for a in arrays), anonymous, file, device, about)


def terms_of_buffers(name, buffers, about=""):
    """A MemoryTerm for each device that holds some of these buffers.  about: of those in host memory."""
    host, elsewhere = [], {}
    for buf in buffers:
        if buf.alive and buf._arena is not None:
            host.append(buf._arena)
        elif buf.alive:
            elsewhere[buf.buft.name] = elsewhere.get(buf.buft.name, 0) + buf.size
    return [term_of(name, host, about=about),
            *(MemoryTerm(name, nbytes, device=device) for device, nbytes in elsewhere.items())]


def terms_of_leaves(name, leaves):
    """As terms_of_buffers, of tensors alone."""
    host, elsewhere = [], {}
    for t in leaves:
        if t.buffer._arena is not None:
            host.append(t.buffer._arena[t.offs:t.offs + t.nbytes])
        else:
            elsewhere[t.buffer.buft.name] = elsewhere.get(t.buffer.buft.name, 0) + t.nbytes
    return [term_of(name, unique_memory(host)),
            *(MemoryTerm(name, nbytes, device=device) for device, nbytes in elsewhere.items())]


def unique_memory(arrays):
    """The flat uint8 arrays that lie inside no other one, so that shared memory counts once."""
    out, end = [], 0
    for first, array in sorted(((a.__array_interface__["data"][0], a) for a in arrays if a.nbytes),
                               key=lambda x: (x[0], -x[1].nbytes)):
        if first + array.nbytes > end:
            out.append(array[max(end - first, 0):])
            end = first + array.nbytes
    return out


class HandedOut:
    """Arrays that users were given, while they hold them."""

    def __init__(self):
        self._refs = {}                 # id of an array -> weak reference; the end of an array takes its own out

    def add(self, array):
        refs, key = self._refs, id(array)
        refs[key] = weakref.ref(array, lambda ref: refs.pop(key, None))
        return array

    def arrays(self):
        return [a for a in (ref() for ref in list(self._refs.values())) if a is not None]


class Growth:
    """What the process grew by inside `with` blocks, less what is said to be known: (anonymous, file) bytes.  What is
    taken from memory that was free on the heap is growth, too.

        with growth:
            growth.known(array.nbytes)
    """

    def __init__(self, since=None):
        """since: taken_now() of a block that began before."""
        self.anonymous = self.file = 0
        self._depth, self._since = 0, since

    def __enter__(self):
        if not self._depth:
            self._since = taken_now()
        self._depth += 1
        return self

    def __exit__(self, *exc):
        self._depth -= 1
        if not self._depth:
            self.end()

    def end(self):
        anonymous, file, free = np.subtract(taken_now(), self._since).tolist()
        self.known(free - anonymous, -file)

    def known(self, anonymous=0, file=0):
        """So many bytes of the growth are counted elsewhere."""
        self.anonymous, self.file = self.anonymous - anonymous, self.file - file

    @contextlib.contextmanager
    def without(self, term):
        """Leave the growth of another term inside the block out, since it is counted there: term() -> MemoryTerm."""
        before = term()
        yield
        after = term()
        self.known(after.anonymous - before.anonymous, after.file - before.file)

    def term(self, name):
        anonymous, file = max(self.anonymous, 0), max(self.file, 0)
        return MemoryTerm(name, anonymous + file, anonymous, file)

    def terms_with_free(self, name, before):
        """[MemoryTerm] of the growth, and of what is free on the heap beyond what was before, by taken_now(): memory
        that was held for a moment.  Where less is free, the growth had that much of what the process held."""
        free = heap_free() - before[2]
        anonymous, file = max(self.anonymous + min(free, 0), 0), max(self.file, 0)
        return [MemoryTerm(name, anonymous + file, anonymous, file),
                MemoryTerm(FREE, max(free, 0), max(free, 0), about="on the heap, for what comes next")]


def process_term(before):
    """What the process held before a model was loaded, by taken_now()."""
    before = before[:2]
    return MemoryTerm(PROCESS, sum(before), *before, about="before the model was loaded")



# ---------------------------------------------------------------- what will be in memory
def expected(m, graph, arenas, work_nbytes, n_logits, before):
    """[MemoryTerm] of the network `m`, loaded on NULL devices, once it has run `graph`, its largest, and handed out
    logits of n_logits tokens.

    arenas: {device, None for the host: bytes}; before: (anonymous, file) bytes of the process before it is loaded.
    """
    file, weights, adapters = m.file, m.weights, weights_of_adapters(m)
    header = getattr(file, "data_offs", 0)
    mine = {x.id for b in (weights, *adapters) for x in b.ctx.tensors}
    inputs = {x.buffer.id: x.buffer for x in graph.leafs if x.base.id not in mine and x.buffer is not None}
    anonymous, of_file = tokenizer_nbytes(file)
    repacked = weights.repacked_nbytes

    def host(name, nbytes, about=""):
        return MemoryTerm(name, nbytes, nbytes, about=about)
    return [MemoryTerm("weights", weights.nbytes + header, 0, header + read_nbytes(m, [graph, *m.other_graphs()]),
                       about=MAPPED),
            MemoryTerm("repacked weights", repacked, 0, repacked, about=MAPPED) if weights.maps_layout else
            host("repacked weights", repacked), *expected_in("weights", weights.moved, m),
            *(MemoryTerm("adapters", w.nbytes, 0, w.nbytes) for w in adapters),
            *m.expected_kept(),
            *(host("compute", n) if device is None else MemoryTerm("compute", n, device=device)
              for device, n in arenas.items()),
            host(WORK, work_nbytes, OF_ALL),
            host("inputs", sum(a.nbytes for a in unique_memory(
                b._arena for b in inputs.values() if b._arena is not None))),
            host("code", KERNELS_NBYTES, OF_ALL),
            host("code", plans_nbytes(len(graph), m.n_plans) + PACKING_NBYTES * weights.maps_layout),
            host("logits", n_logits * m.n_vocab * F32.nbytes, "while the caller uses them"),
            MemoryTerm(TOKENIZER, anonymous + of_file, anonymous, of_file), process_term(before)]


def plans_nbytes(n_nodes, n_plans):
    """Anonymous bytes that so many plans, and kernels for them, are expected to take; nothing is compiled."""
    return FIRST_NODE_NBYTES * n_nodes + max(n_plans * NODE_NBYTES * n_nodes - FREE_NBYTES, 0)


def expected_in(name, buffers, m):
    """A MemoryTerm for each NULL device that buffers lie on; those of the host will be anonymous memory."""
    sizes = {}
    for buf in buffers:
        device = buf.buft.device
        sizes[device] = sizes.get(device, 0) + buf.size
    return [MemoryTerm(name, n, n) if device is m.backend.device else MemoryTerm(name, n, device=device.name)
            for device, n in sizes.items()]


def weights_of_adapters(m):
    return [a._weights for a in m.weights.adapters if a._weights is not None]


def read_by_rows(file, name, nbytes, n_rows):
    """Bytes of a table in the file that come into memory with so many different rows, those around each included."""
    pieces = np.maximum(_pieces(file, name, nbytes), AROUND)
    return nbytes * float(np.mean(1 - (1 - np.minimum(pieces / max(nbytes, 1), 1)) ** n_rows))


def _pieces(file, name, nbytes):
    """How many bytes of a table come with a byte of it, at some places: the system holds files in pieces of many sizes.
    Places that the system holds anyway are read, and given back: nothing is read from the disk."""
    info = file.tensors.get(name)
    mapped = file.parts[info.part].map() if info else None
    if mapped is None or not mapped.flags.c_contiguous or nbytes < N_TOUCHED * AROUND or resident(mapped[:1]) is None:
        return np.array([AROUND])
    table, found = mapped[info.offs:info.offs + nbytes], []
    before = resident(table)[1]
    for at in range(nbytes // N_TOUCHED // 2, nbytes, nbytes // N_TOUCHED):
        if not is_cached(table[at:]):
            continue
        table[at:at + 1].sum()
        now = resident(table)[1]
        found.append(now - before or max(found, default=AROUND))        # it had come with another place
        before = now
    give_back(table)
    return np.array(found or [AROUND])


def read_nbytes(m, graphs):
    """Bytes of the file's pages that computing `graphs` brings into memory: all tensors but repacked ones; of tables
    that only rows are taken from, what n_ctx different tokens read at most."""
    rows_only, whole = set(), set()
    for t in itertools.chain(*(graph.nodes for graph in graphs)):
        for x in t.src:
            if x is not None:
                (rows_only if t.op is OP.GET_ROWS and x is t.src[0] else whole).add(x.base.id)
    total = 0
    for t in m.weights.ctx.tensors:
        if t.id in m.weights.repacked or t.buffer not in m.weights.buffers:
            continue
        if t.id in rows_only - whole:
            total += read_by_rows(m.file, t.name, t.nbytes, min(m.n_ctx, t.ne[1]))
        elif t.id in whole:
            total += t.nbytes
    return int(total)
