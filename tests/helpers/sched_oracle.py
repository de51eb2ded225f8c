"""Worker process: the real ggml_backend_sched on made-up devices, called by ctypes out of an installed wheel.

    python sched_oracle.py WHEEL JOBS.json > answers.json

The devices are copies of the CPU backend's structs whose supports_op, supports_buft, offload_op and get_type slots are
Python functions that look the answers up; buffer types are copies of the CPU's with their own identity.  Nothing is
computed: `split_graph` needs no more.  ggml aborts the process on a failed assert, hence the worker.
"""
import ctypes as C
import json
import sys

from alloc_oracle import Graph

from ggjit.tools.suite.ggml import TP, GgmlLibrary, GgmlTensor, InitParams

VP = C.c_void_p
BOOL_OP = C.CFUNCTYPE(C.c_bool, VP, VP)
INT_FN = C.CFUNCTYPE(C.c_int, VP)
BOOL_BUFT = C.CFUNCTYPE(C.c_bool, VP)
TYPE_CPU, TYPE_GPU = 0, 1


class World:
    """n backends and n buffer types for one job."""

    # slot numbers in ggml_backend_device_i of api version 2
    GET_TYPE, SUPPORTS_OP, SUPPORTS_BUFT, OFFLOAD_OP = 3, 9, 10, 11
    DEVICE_WORDS = 17

    def __init__(self, f, job):
        self.f, self.job, self.keep = f, job, []
        self.cpu = f("ggml_backend_cpu_init", VP)()
        device = f("ggml_backend_get_device", VP, VP)(self.cpu)
        buft = f("ggml_backend_cpu_buffer_type", VP)()
        n = len(job["reads"])
        self.n, self.number, self.tensor = n, {}, {}
        words = 12
        usable = C.CDLL(None).malloc_usable_size        # of the C library: bytes of the struct that may be read
        usable.argtypes, usable.restype = [VP], C.c_size_t
        self.bufts = []
        is_host = f("ggml_backend_buft_is_host", C.c_bool, VP)
        for k in range(n):
            copy = (VP * words).from_buffer_copy((VP * words).from_address(buft))
            self._set_is_host(copy, buft, job["is_host"][k], is_host)
            self.bufts.append(copy)
        where = {C.addressof(b): k for k, b in enumerate(self.bufts)}
        self.devices, self.backends = [], []
        for b in range(n):
            d = (VP * self.DEVICE_WORDS).from_buffer_copy((VP * self.DEVICE_WORDS).from_address(device))
            slots = {
                self.GET_TYPE: INT_FN(lambda _, b=b: TYPE_CPU if b == n - 1 else TYPE_GPU),
                self.SUPPORTS_OP: BOOL_OP(lambda _, t, b=b: self.answer("supports", t, b)),
                self.SUPPORTS_BUFT: BOOL_OP(lambda _, k, b=b: bool(job["reads"][b][where[k]])),
                self.OFFLOAD_OP: BOOL_OP(lambda _, t, b=b: self.answer("offload", t, b))}
            for at, fn in slots.items():
                d[at] = C.cast(fn, VP).value
                self.keep.append(fn)
            self.devices.append(d)
            size = 32
            backend = (VP * size)()
            C.memmove(backend, self.cpu, min(C.sizeof(backend), usable(self.cpu)))
            for at in range(size):
                if backend[at] == device:
                    backend[at] = C.addressof(d)
            self.backends.append(backend)

    def answer(self, what, t, b):
        i = self.number.get(t)
        return True if i is None and what == "supports" else bool(self.job[what][i][b])

    def _set_is_host(self, copy, original, host, is_host):
        """Find the is_host slot by trying: the one whose replacement changes the answer."""
        fn = BOOL_BUFT(lambda _, host=host: host)
        self.keep.append(fn)
        for at in range(4, 9):
            before = copy[at]
            probe = BOOL_BUFT(lambda _: False)
            copy[at] = C.cast(probe, VP).value
            if not is_host(C.addressof(copy)):
                copy[at] = C.cast(fn, VP).value
                return
            copy[at] = before
        raise RuntimeError("no is_host slot found")


def build(f, job, world):
    """The job's tensors as ggml tensors; leafs with buffers of the made-up types."""
    rows = job["tensors"]
    ctx = f("ggml_init", VP, InitParams)(InitParams(400 * (len(rows) + 600) + (1 << 22), None, True))
    new = f("ggml_new_tensor", TP, VP, C.c_int, C.c_int, C.POINTER(C.c_int64))
    from_ptr = f("ggml_backend_cpu_buffer_from_ptr", VP, VP, C.c_size_t)
    set_usage = f("ggml_backend_buffer_set_usage", None, VP, C.c_int)
    tensors = []
    for i, r in enumerate(rows):
        t = new(ctx, r["type"], 4, (C.c_int64 * 4)(*r["ne"])).contents
        t.op, t.flags = r["op"], r["flags"] | (16 if i >= job["n_leafs"] else 0)
        for k in range(4):
            t.nb[k] = r["nb"][k]
        t.view_offs = r["offs"]
        tensors.append(t)
        world.number[C.addressof(t)] = i
    for t, r in zip(tensors, rows, strict=True):
        for k, s in enumerate(r["src"]):
            t.src[k] = C.pointer(tensors[s])
        if r["view"] >= 0:
            t.view_src = C.pointer(tensors[r["view"]])
        if r["buft"] >= 0:
            memory = C.create_string_buffer(4096 + 64)
            world.keep.append(memory)
            buf = from_ptr((C.addressof(memory) + 63) // 64 * 64, 4096)
            words = (VP * 24).from_address(buf)
            cpu_buft = {VP.from_address(buf + 8 * k).value: k for k in range(24)}
            at = cpu_buft.get(world.mapped_buft)
            words[at] = C.addressof(world.bufts[r["buft"]])
            set_usage(buf, 1 if r["weights"] else 0)
            t.buffer, t.data = buf, (C.addressof(memory) + 63) // 64 * 64
    graph = f("ggml_new_graph_custom", VP, VP, C.c_size_t, C.c_bool)(ctx, 4 * len(rows) + 64, False)
    g = Graph.from_address(graph)
    for i, t in enumerate(tensors):
        if i < job["n_leafs"]:
            g.leafs[g.n_leafs] = C.pointer(t)
            g.n_leafs += 1
        else:
            g.nodes[g.n_nodes] = C.pointer(t)
            g.n_nodes += 1
    return graph, tensors, ctx


def run(f, job):
    world = World(f, job)
    probe = f("ggml_backend_cpu_buffer_from_ptr", VP, VP, C.c_size_t)(64, 64)
    world.mapped_buft = f("ggml_backend_buffer_get_type", VP, VP)(probe)
    graph, tensors, ctx = build(f, job, world)
    n = world.n
    sched = f("ggml_backend_sched_new", VP, VP, VP, C.c_int, C.c_size_t, C.c_bool, C.c_bool)(
        (VP * n)(*(C.addressof(b) for b in world.backends)), (VP * n)(*(C.addressof(b) for b in world.bufts)), n,
        4 * len(tensors) + 2048, False, True)
    f("ggml_backend_sched_split_graph", None, VP, VP)(sched, graph)
    get = f("ggml_backend_sched_get_tensor_backend", VP, VP, VP)
    where = {C.addressof(b): k for k, b in enumerate(world.backends)}
    nodes = tensors[job["n_leafs"]:]
    original = {C.addressof(t) for t in tensors}
    answer = {"n_splits": f("ggml_backend_sched_get_n_splits", C.c_int, VP)(sched),
              "nodes": [where[get(sched, C.addressof(t))] for t in nodes],
              "copied": [[C.addressof(t.src[k].contents) not in original for k in range(len(r["src"]))]
                         for t, r in zip(nodes, job["tensors"][job["n_leafs"]:], strict=True)]}
    assert isinstance(nodes[0], GgmlTensor)
    return answer


def main():
    f = GgmlLibrary(sys.argv[1]).function
    with open(sys.argv[2], encoding="utf-8") as src:
        jobs = json.load(src)
    print(json.dumps([run(f, job) for job in jobs]))


if __name__ == "__main__":
    main()
