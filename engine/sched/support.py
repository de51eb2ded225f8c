"""Which memory each device can read and which ops it supports: asked once, then kept as numbers.

    reads[b, k]     backend b reads buffer type k           support[s, b]   backend b computes signature s
    homes[k]        backend a buffer of type k belongs to   offload[s, b]   ... and wants it even if weights must move
"""
import numpy as np

from ggjit.core.arguments import expect
from ggjit.core.backend import Backend
from ggjit.core.buffer import BufferType
from ggjit.core.slots import checked_bool, checked_int
from ggjit.core.table import TABLE
from ggjit.ops.core.errors import ParamError
from ggjit.sched.gather import find_signatures
from ggjit.sched.rules import RULES

MEMO_SLOTS = 1 << 12


class Support:
    """Backends in order of priority, their memory, and the memo of what they support."""

    def __init__(self, backends, bufts, rules, op_offload, n_instances, keep_weights):
        backends = list(backends) if isinstance(backends, list | tuple) else [backends]
        if not backends:
            raise ParamError("Scheduler needs at least one backend")
        for b in backends:
            if not isinstance(b, Backend):
                raise ParamError(f"Scheduler takes backends (gg.init_backend), got {b!r}")
        if len({id(b) for b in backends}) < len(backends):
            raise ParamError("a backend is listed twice; make a second one with gg.init_backend")
        if not isinstance(rules, str) or rules not in RULES:
            raise ParamError(f"rules {rules!r}: expected one of {', '.join(RULES)}")
        bufts = None if bufts is None else list(expect(bufts, (list, tuple), "bufts"))
        if bufts is not None and len(bufts) != len(backends):
            raise ParamError(f"{len(bufts)} buffer types for {len(backends)} backends")
        self.backends, self.rules, self.op_offload, self.keep_weights = backends, rules, op_offload, keep_weights
        self.n_instances = n_instances
        self.own_bufts = [x.default_buffer_type if k is None else k
                          for x, k in zip(backends, bufts or [None] * len(backends), strict=True)]
        for b, k in zip(backends, self.own_bufts, strict=True):
            if not isinstance(k, BufferType):
                raise ParamError(f"{b!r}: {k!r} is not a buffer type")
            checked_int(k, "alignment"), checked_int(k, "max_size")
            if not checked_bool(b.device, "supports_buft", k):
                raise ParamError(f"{b!r} cannot compute in {k!r}, the buffer type given for it")
        self.bufts, self._numbers = [], {}
        self.buft_of = np.array([self.buft_index(k) for k in self.own_bufts], np.int64)
        # backends with equal buffer types share memory: buft_id = number of the first of them
        self.buft_ids = [self.own_bufts.index(k) for k in self.own_bufts]
        self._buft_ids_array = np.array(self.buft_ids, np.int64)
        self.is_async = [type(b).synchronize is not Backend.synchronize for b in backends]
        self.copies_async = [type(b).copy_tensor_async is not Backend.copy_tensor_async for b in backends]
        self.snapshot = np.array([n_instances > 1 and a for a in self.is_async], np.int64)
        self._scratch = {}
        self._forget()

    # ------------------------------------------------------------ memory
    def buft_index(self, buft):
        """Number of a buffer type; new ones are asked about."""
        k = self._numbers.get(id(buft))
        if k is None:
            column = [int(checked_bool(b.device, "supports_buft", buft)) for b in self.backends]
            owner = next((i for i, x in enumerate(self.own_bufts) if x is buft), -1)
            by_type = next((i for i, b in enumerate(self.backends) if checked_bool(buft, "supports_backend", b)), -1)
            reader = next((i for i, r in enumerate(column) if r), -1)
            k = self._numbers[id(buft)] = len(self.bufts)
            self.bufts.append(buft)
            old = getattr(self, "reads", np.empty((len(self.backends), 0), np.int64))
            self.reads = np.ascontiguousarray(np.column_stack([old, column]).astype(np.int64))
            home = next((i for i in (owner, by_type, reader) if i >= 0), -1)
            self.homes = np.append(getattr(self, "homes", np.empty(0, np.int64)), home)
        return k

    # ------------------------------------------------------------ working memory, kept: fresh pages are slow
    def scratch(self, name, n, words=None, dtype=np.int64):
        """An array of n (rows of) words or records with any contents; valid until asked for by name again."""
        size = n * (words or 1)
        found = self._scratch.get(name)
        if found is None or found.size < size:
            found = self._scratch[name] = np.empty(2 * size, dtype)
        return found[:size] if words is None else found[:size].reshape(n, words)

    # ------------------------------------------------------------ ops
    def answer(self, params, nodes):
        """Ask the devices about signatures that are new, then set what the passes have to know of them; valid until
        the next call or a new buffer type.  nodes: those of the rows of `params`."""
        n = len(nodes)
        self._make_room(n)
        new = self.scratch("new", n + 1)
        n_new = find_signatures(params.words, self.memo, self.memo_mask, self.n_signatures, new)
        if n_new:
            self._ask([nodes[i] for i in new[:n_new].tolist()])
        params.set(table=TABLE.words, buft_of=self.buft_of, reads=self.reads, homes=self.homes, support=self.support,
                    offload=self.offload, snapshot=self.snapshot, buft_ids=self._buft_ids_array,
                    n_backends=len(self.backends), n_bufts=len(self.bufts), n_instances=self.n_instances,
                    rule=RULES[self.rules], op_offload=int(self.op_offload), keep_weights=int(self.keep_weights))

    def _forget(self):
        nb = len(self.backends)
        self.memo_mask = MEMO_SLOTS - 1
        self.memo = np.full(3 * MEMO_SLOTS, -1, np.int64)
        self.support, self.offload = np.ones((64, nb), np.uint8), np.zeros((64, nb), np.uint8)
        self.n_signatures = 1                   # row 0 stands for views and leaves, which any backend supports

    def _make_room(self, n):
        """Room for n more signatures.  A memo that would fill up is cleared, and devices are asked again."""
        if 2 * (self.n_signatures + n + 1) > self.memo_mask:
            slots = MEMO_SLOTS
            while slots < 4 * (n + 1):
                slots *= 2
            if slots - 1 > self.memo_mask or 2 * (self.n_signatures + n + 1) > self.memo_mask:
                self._forget()
                self.memo_mask, self.memo = slots - 1, np.full(3 * slots, -1, np.int64)

    def _ask(self, nodes):
        """One node of each new signature.  If a device raises, nothing is remembered and its error comes out."""
        need = self.n_signatures + len(nodes)
        while need > len(self.support):
            self.support = np.concatenate([self.support, np.zeros_like(self.support)])
            self.offload = np.concatenate([self.offload, np.zeros_like(self.offload)])
        try:
            for k, t in enumerate(nodes, self.n_signatures):
                for b, backend in enumerate(self.backends):
                    self.support[k, b] = checked_bool(backend, "supports_op", t)
                    self.offload[k, b] = (self.op_offload and self.support[k, b]
                                          and checked_bool(backend, "offload_op", t))
        except BaseException:
            self._forget()
            raise
        self.n_signatures = need
