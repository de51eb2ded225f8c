"""Loads and stores of a plan's kernels on many threads, recorded without having the cores.

    traffic = record(plan)              # a Traffic: what one run of the plan does; its results are right afterwards

Kernels and the walk are compiled anew with a call before every load, store and atomic operation of the optimised code.
The threads take turns: one runs until it takes a chunk or waits, then the next one goes on.  Chunks from a counter go
round, one to a thread, and what is counted does not depend on the machine.
"""
import ctypes
import dataclasses
import functools
import re
import threading

import llvmlite.binding as llvm
import numpy as np
from numba import cfunc, types

from ggjit.cpu.walk import JOB_SHIFT, PAGE_NBYTES, S_STATUS, walk
from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.record import N_CHUNK, N_KERNEL, WORD
from ggjit.ops.native.compiler import KernelCompiler, KernelLibrary
from ggjit.ops.native.jit import CACHE, FASTMATH, address_of, i32s, i64s, inline, u8s
from ggjit.ops.native.node import LINE, S_GENERATION, S_INTERVAL

MOST_THREADS = 64                       # a word has a bit for each reader

# words of the state
_THREAD, _GENERATION, _PHASE, _ATOMICS, _ROWS, _ROWS_END, _NODE_OF, _N_SPANS = range(8)
_WRITER, _READERS, _LINE_PHASE, _LINE_WRITER, _LINES, _BYTES = range(8, 14)     # addresses of arrays
_NODES = 16                             # of each thread, the node it is at
_SPANS = _NODES + MOST_THREADS          # (first address, end, place of the first) of each stretch of memory
_MOST_SPANS = 64
_STATE = np.zeros(_SPANS + 3 * _MOST_SPANS, np.int64)
_AT, _N = _STATE.__array_interface__["data"][0], _STATE.size


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Counts of one run.

    lines      cache lines that two threads write between two barriers
    nbytes     bytes that one thread wrote last and another one reads, once for every reader
    atomics    atomic operations: chunks taken, arrivals at barriers
    barriers   meetings of all threads
    by_kernel  {name of a kernel: (lines, nbytes) of its nodes}
    """
    lines: int
    nbytes: int
    atomics: int
    barriers: int
    by_kernel: dict


# ---------------------------------------------------------------- what is called before loads, stores and atomics
@inline
def _place(a):
    """Place of an address in the arrays, -1 where nothing is recorded."""
    s = i64s(_AT, _N)
    for k in range(s[_N_SPANS]):
        if s[_SPANS + 3 * k] <= a < s[_SPANS + 3 * k + 1]:
            return a - s[_SPANS + 3 * k] + s[_SPANS + 3 * k + 2]
    return -1


def _stored(a, n):
    s = i64s(_AT, _N)
    if a == s[_GENERATION]:
        s[_PHASE] += 1
        return
    at = _place(a)
    if at < 0 or n <= 0:
        return
    me = s[_THREAD]
    writer, readers = u8s(s[_WRITER] + at, n), i64s(s[_READERS] + 8 * at, n)
    for i in range(n):
        writer[i], readers[i] = me + 1, 0
    first, count = at // LINE, (at + n - 1) // LINE - at // LINE + 1
    phases, writers = i32s(s[_LINE_PHASE] + 4 * first, count), u8s(s[_LINE_WRITER] + first, count)
    for i in range(count):
        if phases[i] != s[_PHASE]:
            phases[i], writers[i] = s[_PHASE], me + 1
        elif writers[i] != 255 and writers[i] != me + 1:
            writers[i] = 255                            # counted
            i64s(s[_LINES], s[_NODES + me] + 1)[s[_NODES + me]] += 1


def _loaded(a, n):
    s = i64s(_AT, _N)
    me = s[_THREAD]
    if s[_ROWS] <= a < s[_ROWS_END]:                    # a NODE row: so the thread is at that node
        s[_NODES + me] = i64s(s[_NODE_OF], (s[_ROWS_END] - s[_ROWS]) // WORD)[(a - s[_ROWS]) // WORD]
        return
    at = _place(a)
    if at < 0 or n <= 0:
        return
    writer, readers, moved = u8s(s[_WRITER] + at, n), i64s(s[_READERS] + 8 * at, n), 0
    for i in range(n):
        if writer[i] != 0 and writer[i] != me + 1 and readers[i] >> me & 1 == 0:
            readers[i] |= 1 << me
            moved += 1
    if moved:
        i64s(s[_BYTES], s[_NODES + me] + 1)[s[_NODES + me]] += moved


@functools.cache
def _known():
    """Makes the functions known to LLVM by name; returns what keeps them alive."""
    _ = CACHE.codegen
    recording = {name: cfunc(types.void(types.int64, types.int64), nopython=True)(f)
                 for name, f in (("ggjit_stored", _stored), ("ggjit_loaded", _loaded))}
    for name, f in recording.items():
        llvm.add_symbol(name, f.address)
    turns = {name: ctypes.CFUNCTYPE(None)(f) for name, f in (("ggjit_turn", _turn), ("ggjit_atomic", _atomic))}
    for name, f in turns.items():
        llvm.add_symbol(name, ctypes.cast(f, ctypes.c_void_p).value)
    return recording, turns


# ---------------------------------------------------------------- the code with these calls in it
_POINTER = r"((?:ptr|[^,()]*\*)(?: align \d+)?) (%[-\w.$]+|%\"[^\"]*\"|inttoptr \(i64 [^)]*\))"
_STORE = re.compile(rf"store (?:atomic )?(?:volatile )?(<[^>]*>|\S+) .*, {_POINTER}(?: \w+)?, align")
_LOAD = re.compile(rf"load (?:atomic )?(?:volatile )?(<[^>]*>|\S+), {_POINTER}(?: \w+)?(?:, align|$)")
_MASKED = re.compile(rf"call .*@llvm\.masked\.(load|store)\.v(\d+)(\w+?)\.p0.*?\((?:<.*?> \S+, )?{_POINTER}, .*")
_SPREAD = re.compile(r"call .*@llvm\.masked\.(gather|scatter)\.v(\d+)(\w+?)\.v.*<\d+ x (ptr|[^>]*\*)> (?:align \d+ )?"
                     r"(%[-\w.$]+),(?: i32 \d+,)? <\d+ x i1> (%[-\w.$]+|<[^>]*>|splat \(i1 true\))")
_MASK = re.compile(r"<\d+ x i1> (%[-\w.$]+|<[^>]*>|splat \(i1 true\)|zeroinitializer)")
_COPY = re.compile(rf"call .*@llvm\.mem(cpy|move|set)\.[\w.]*\((?:noundef )?(?:nonnull )?{_POINTER}, "
                   r"(.*), i64 ([^,]+), i1")
_ATOMIC = re.compile(r"atomicrmw |cmpxchg ")
_TURN = re.compile(r"@llvm\.x86\.sse2\.pause|@llvm\.aarch64\.isb|@sched_yield")
_UNKNOWN = re.compile(r"masked\.(expandload|compressstore)|maskstore|call .*@mem(cpy|set|move)\(")
_SHARED = re.compile(r"^define linkonce_odr(?: hidden)?( [^@]*@)([-\w.$]+|\"[^\"]*\")\(", re.M)
_NAME = re.compile(r"@([-\w.$]+|\"[^\"]*\")")
_NBYTES = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8, "f16": 2, "f32": 4, "f64": 8}


def _nbytes(type):
    if m := re.fullmatch(r"<(\d+) x (.*)>", type):
        return int(m[1]) * _nbytes(m[2])
    return 8 if type.endswith("*") else _NBYTES.get(type) or (int(type[1:]) + 7) // 8


def _apart(text):
    """The module, whose helpers have names of their own: the process's first function of a name is taken for all."""
    shared = {name for _, name in _SHARED.findall(text)}
    text = _SHARED.sub(r"define internal\1\2(", text)
    return _NAME.sub(lambda m: f'@"recorded {m[1].strip(chr(34))}"' if m[1] in shared else m[0], text)


class _Calls:
    """The lines of a module with the calls before its loads, stores and atomics."""

    def __init__(self):
        self.n, self.out = 0, []

    def _address(self, type, value):
        self.n += 1
        self.out.append(f"  %traced_{self.n} = ptrtoint {re.sub(' align.*', '', type)} {value} to i64")
        return f"%traced_{self.n}"

    def _call(self, what, pointer, n):
        self.out.append(f"  call void @ggjit_{what}(i64 {self._address(*pointer)}, i64 {n})")

    def _masked(self, kind, lanes, elem, pointer, mask):
        """A part of a vector: its first lanes, as many as the mask has."""
        self.n += 1
        k, word = self.n, f"i{lanes}"
        self.out += [f"  %traced_m{k} = bitcast <{lanes} x i1> {mask} to {word}",
                     f"  %traced_c{k} = call {word} @llvm.ctpop.{word}({word} %traced_m{k})",
                     f"  %traced_w{k} = {'zext' if int(lanes) < 64 else 'bitcast'} {word} %traced_c{k} to i64",
                     f"  %traced_b{k} = mul i64 %traced_w{k}, {_nbytes(elem)}"]
        self._call("loaded" if kind == "load" else "stored", pointer, f"%traced_b{k}")
        return word

    def _spread(self, kind, lanes, elem, pointer, pointers, mask):
        """Elements of a vector at addresses of their own, where the mask has them."""
        for i in range(int(lanes)):
            self.n += 1
            k = self.n
            self.out += [f"  %traced_p{k} = extractelement <{lanes} x {pointer}> {pointers}, i32 {i}",
                         f"  %traced_l{k} = extractelement <{lanes} x i1> {mask}, i32 {i}",
                         f"  %traced_w{k} = zext i1 %traced_l{k} to i64",
                         f"  %traced_b{k} = mul i64 %traced_w{k}, {_nbytes(elem)}"]
            self._call("loaded" if kind == "gather" else "stored", (pointer, f"%traced_p{k}"), f"%traced_b{k}")

    def of(self, text):
        words, text = set(), _apart(text)
        for line in text.splitlines():
            code = line.partition(", !")[0]
            is_code = line.startswith("  ")
            if is_code and _UNKNOWN.search(code):
                raise NotSupported(f"nothing records {code}")
            if is_code and (_ATOMIC.search(code) or _TURN.search(code)):
                self.out.append(f"  call void @ggjit_{'atomic' if _ATOMIC.search(code) else 'turn'}()")
            elif is_code and (m := _MASKED.search(code)):
                words.add(self._masked(m[1], m[2], m[3], m.group(4, 5), _MASK.search(code)[1]))
            elif is_code and (m := _SPREAD.search(code)):
                self._spread(*m.groups())
            elif is_code and (m := _COPY.search(code)):
                if m[1] != "set":
                    self._call("loaded", re.search(_POINTER, m[4]).groups(), m[5])
                self._call("stored", m.group(2, 3), m[5])
            elif is_code and re.search(r"masked\.(gather|scatter|load|store)\.", code):
                raise NotSupported(f"nothing records {code}")
            elif is_code and re.search(r"^\s+store ", code):
                if m := _STORE.search(code):
                    self._call("stored", m.group(2, 3), _nbytes(m[1]))
                elif "@" not in code:
                    raise NotSupported(f"nothing records {code}")
            elif is_code and re.search(r" = load ", code):
                if m := _LOAD.search(code):
                    self._call("loaded", m.group(2, 3), _nbytes(m[1]))
                elif "@" not in code:
                    raise NotSupported(f"nothing records {code}")
            self.out.append(line)
        self.out += [f"declare {w} @llvm.ctpop.{w}({w})" for w in sorted(words) if f"@llvm.ctpop.{w}(" not in text]
        self.out += ["declare void @ggjit_stored(i64, i64)", "declare void @ggjit_loaded(i64, i64)",
                     "declare void @ggjit_turn()", "declare void @ggjit_atomic()"]
        return "\n".join(self.out)


class _RecordingLibrary(KernelLibrary):
    """An entry point whose machine code calls the recording functions."""

    def _optimize_final_module(self):
        super()._optimize_final_module()
        name, layout = self._final_module.name, self._final_module.data_layout
        self._final_module = llvm.parse_assembly(_Calls().of(str(self._final_module)))
        self._final_module.name, self._final_module.data_layout = name, layout


class _RecordingCompiler(KernelCompiler):
    """Of entry points that are recorded."""
    library = _RecordingLibrary


_compiled = {}                  # name -> function, kept for the process


def _address(name, make):
    if name not in _compiled:
        _known()
        func = make()
        func.__name__ = func.__qualname__ = re.sub(r"\W", "_", f"recorded_{name}")
        _compiled[name] = cfunc(types.int64(*(types.int64,) * 4), nopython=True, error_model="numpy",
                                fastmath=FASTMATH, pipeline_class=_RecordingCompiler)(func)
    return _compiled[name].address


def _make_walk():
    def walk_as(first, end, who, sync):
        walk(first, end, who >> JOB_SHIFT, who & (1 << JOB_SHIFT) - 1, sync)
        return 0
    return walk_as


# ---------------------------------------------------------------- turns
class _Turns:
    """Of n threads one at a time runs; `turn` lets the next one go on."""

    def __init__(self, n, work):
        self.n, self.current, self.living = n, 0, set(range(n))
        self._locks = [threading.Semaphore(0) for _ in range(n)]
        self._threads = [threading.Thread(target=self._live, args=(i, work)) for i in range(n)]

    def run(self):
        for t in self._threads:
            t.start()
        self._give(0)
        for t in self._threads:
            t.join()

    def _live(self, i, work):
        self._locks[i].acquire()
        work(i)
        self.living.discard(i)
        if self.living:
            self._give(self._next())

    def _next(self):
        return next(j % self.n for j in range(self.current + 1, self.current + 1 + self.n) if j % self.n in self.living)

    def _give(self, i):
        self.current = _STATE[_THREAD] = i
        self._locks[i].release()

    def turn(self):
        me, after = self.current, self._next()
        if after != me:
            self._give(after)
            self._locks[me].acquire()


_turns = None


def _turn():
    _turns.turn()


def _atomic():
    _STATE[_ATOMICS] += 1
    _turns.turn()


# ---------------------------------------------------------------- recording
def record(plan):
    """Run the plan on its threads, by turns, and count what they do: a Traffic.  Errors: NotSupported."""
    global _turns
    at = np.array(plan._starts[:-1])
    own, recorded = plan.rows[at + N_KERNEL], [_address(k.name, k.make) for k in plan.kernels]
    first, end, n = plan._first, plan._first + plan._starts[-1] * WORD, plan.n_threads
    enter = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 5)(_address("walk", _make_walk))
    page, sync = _page()
    lines, nbytes, kept = _begin(plan, sync)
    try:
        plan.rows[at + N_KERNEL] = recorded
        plan.rows[at + N_CHUNK] = plan.rows[at + N_CHUNK + 1] = 0
        _turns = _Turns(n, lambda i: enter(first, end, i << JOB_SHIFT | n, sync))
        _turns.run()
        if page[(sync + S_STATUS - address_of(page)) // WORD]:
            raise RuntimeError("a kernel failed while it was recorded")
        names = [k.name for k in plan.kernels]
        by_kernel = {name: tuple(int(sum(x for x, of in zip(counts, names, strict=True) if of == name))
                                 for counts in (lines, nbytes)) for name in dict.fromkeys(names)}
        return Traffic(int(lines.sum()), int(nbytes.sum()), int(_STATE[_ATOMICS]), int(_STATE[_PHASE]), by_kernel)
    finally:
        plan.rows[at + N_KERNEL] = own
        _STATE[:] = 0
        del kept


def _page():
    """A sync page of its own: (what keeps it alive, its address).  No thread polls signals there."""
    words = np.zeros((PAGE_NBYTES + LINE) // WORD, np.int64)
    sync = -(-address_of(words) // LINE) * LINE
    words[(sync + S_INTERVAL - address_of(words)) // WORD] = 1 << 62
    return words, sync


def _begin(plan, sync):
    """Set the state up for a run: (lines, bytes) of each node, and what keeps the arrays alive."""
    spans = {b.base: b.size for b in plan._written}
    spans[plan._work.base] = max(plan.work_nbytes, spans.get(plan._work.base, 0))
    total, table = 0, []
    for base, size in spans.items():
        table += base, base + size, total + base % LINE
        total += (size + 2 * LINE) // LINE * LINE
    if plan.n_threads > MOST_THREADS or len(spans) > _MOST_SPANS:
        raise NotSupported(f"{plan.n_threads} threads and {len(spans)} buffers: at most {MOST_THREADS} and "
                                  f"{_MOST_SPANS} are recorded")
    n_lines = total // LINE + 1
    node_of = np.repeat(np.arange(len(plan.nodes)), np.diff(plan._starts))
    lines, nbytes = np.zeros((2, len(plan.nodes)), np.int64)
    arrays = {_NODE_OF: node_of, _WRITER: np.zeros(total, np.uint8), _READERS: np.zeros(total, np.int64),
              _LINE_PHASE: np.full(n_lines, -1, np.int32), _LINE_WRITER: np.zeros(n_lines, np.uint8),
              _LINES: lines, _BYTES: nbytes}
    _STATE[:] = 0
    _STATE[[_GENERATION, _ROWS, _ROWS_END, _N_SPANS]] = (sync + S_GENERATION, plan._first,
                                                         plan._first + plan._starts[-1] * WORD, len(spans))
    _STATE[_SPANS:_SPANS + len(table)] = table
    for word, array in arrays.items():
        _STATE[word] = address_of(array)
    return lines, nbytes, arrays
