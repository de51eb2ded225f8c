"""The part of fusion (engine/cpu/fusion.py) that visits every node, in compiled code.

    describe         what has to be known of each node
    number_windows   nodes from which on all is alike: what fits one of them fits the others, but for their memory
    take_runs        from the first node to the last, the first of the tries of its window that the memory permits
    all_permitted    does the memory permit these runs?
"""
import numpy as np

from ggjit.core.table import TABLE
from ggjit.ops.core.record import FLAG_COMPUTE, MAX_SRC, T_BUFFER, T_FLAGS, T_SRC, T_VIEW_SRC, T_WORDS
from ggjit.ops.native.jit import i64s, inlined, native

# words of what is said of a node
KIND, APART, READS, USES = range(4)
WORDS = USES + 1 + MAX_SRC
FAR = 16                        # nodes of a window: nothing is fused with what is farther away
APART_WORDS = 5                 # of a row of Spots.apart
# a try: its runs, from and to; nodes that it covers.  A run: its kind; nodes that it covers, and before which node of
# the window it ends; its rows of `apart` and its nodes in `nodes`, from and to
TRY_FROM, TRY_TO, TRY_N, TRY_WORDS = range(4)
RUN_KIND, RUN_N, RUN_END, RUN_APART, RUN_APART_TO, RUN_NODES, RUN_NODES_TO, RUN_WORDS = range(8)
# of a run that was taken: the node before which it ends, nodes that it covers, its kind, its number, node of the window
TOOK_END, TOOK_N, TOOK_KIND, TOOK_RUN, TOOK_AT, TOOK_WORDS = range(6)


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def _describe(table, n_rows, graph_, n_graph, outputs_, n_outputs, ids_, kinds_, n, out_):
    t, graph, outputs = i64s(table, 1 << 40), i64s(graph_, n_graph), i64s(outputs_, n_outputs)
    ids, kinds, out = i64s(ids_, n), i64s(kinds_, n), i64s(out_, n * WORDS)
    n_reads, last = np.zeros(n_rows, np.int64), np.full(n_rows, -FAR * WORDS, np.int64)
    is_output = np.zeros(n_rows, np.uint8)
    for i in range(n_graph):
        for j in range(MAX_SRC):
            s = t[graph[i] * T_WORDS + T_SRC + j]
            if s >= 0:
                n_reads[s] += 1
    for i in range(n_outputs):
        is_output[outputs[i]] = 1
    for i in range(n):
        row, at = ids[i] * T_WORDS, i * WORDS
        out[at + KIND] = kinds[i]
        out[at + APART] = is_output[ids[i]] or t[row + T_VIEW_SRC] >= 0 or t[row + T_BUFFER] >= 0 \
            or t[row + T_FLAGS] & ~FLAG_COMPUTE != 0
        out[at + READS] = n_reads[ids[i]]
        for j in range(1 + MAX_SRC):
            x, here = ids[i] if j == 0 else t[row + T_SRC + j - 1], at + USES + j
            out[here] = -1
            if x >= 0:
                out[here] = here - last[x] if here - last[x] < FAR * WORDS else 0
                last[x] = here
    return 0


def describe(graph, ids, kinds):
    """For each node `ids`: its kind.  Must its value be stored even if only a fused kernel reads it?  How often is it
    read?  And for its result and each source: how many words before does that tensor stand last?  0: nowhere near, -1:
    there is no source.  Behind the last node stand FAR rows of -2."""
    out = np.empty((len(ids) + FAR, WORDS), np.int64)
    out[len(ids):] = -2
    _describe(TABLE.words, TABLE.n_rows, graph.node_ids, len(graph.node_ids), graph.output_ids, len(graph.output_ids),
              ids, kinds, len(ids), out)
    return out


@native("i64(i64, i64, i64, i64, i64)")
def number_windows(facts_, n, starts_, n_starts, numbers_):
    """Number the starts: equal numbers where all is equal that is said of the FAR nodes from there on."""
    facts, starts, numbers = i64s(facts_, (n + FAR) * WORDS), i64s(starts_, n_starts), i64s(numbers_, n_starts)
    mask, n_numbers, hashes = np.int64(15), np.int64(0), np.zeros(n + FAR, np.uint64)
    while mask < 2 * n_starts:
        mask = 2 * mask + 1
    for i in range(n + FAR):
        for k in range(i * WORDS, (i + 1) * WORDS):
            h = (hashes[i] ^ np.uint64(facts[k])) * np.uint64(0x9E3779B97F4A7C15)
            hashes[i] = h ^ (h >> np.uint64(32))
    held = np.full(mask + 1, -1, np.int64)
    for i in range(n_starts):
        at, h = starts[i] * WORDS, np.uint64(0)
        for k in range(FAR):
            h = (h ^ hashes[starts[i] + k]) * np.uint64(0x9E3779B97F4A7C15)
        slot = np.int64(h >> np.uint64(32)) & mask
        while held[slot] >= 0:
            other, k = starts[held[slot]] * WORDS, 0
            while k < FAR * WORDS and facts[at + k] == facts[other + k]:
                k += 1
            if k == FAR * WORDS:
                break
            slot = (slot + 1) & mask
        if held[slot] < 0:
            held[slot], numbers[i] = i, n_numbers
            n_numbers += 1
        numbers[i] = numbers[held[slot]]
    return n_numbers


@inlined
def _permits(apart, begin, end, nodes, first_node, at, uses, width, first, last):
    """Do the tensors of these rows of `apart` lie apart?  Node k of the run is at + nodes[first_node + k]; first, last:
    bytes of the tensors and their ends."""
    for r in range(begin * APART_WORDS, end * APART_WORDS, APART_WORDS):
        a = uses[(at + nodes[first_node + apart[r]]) * width + apart[r + 1]]
        b = uses[(at + nodes[first_node + apart[r + 2]]) * width + apart[r + 3]]
        if first[a] < last[b] and first[b] < last[a] and not (apart[r + 4] != 0 and first[a] == first[b]):
            return False
    return True


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def all_permitted(apart_, n_apart, runs_, n_runs, n_nodes, uses_, width, first_, last_):
    """Does the memory permit all these runs, of one kind, of n_nodes nodes each?"""
    apart, runs, uses = i64s(apart_, n_apart * APART_WORDS), i64s(runs_, n_runs * n_nodes), i64s(uses_, 1 << 40)
    first, last = i64s(first_, 1 << 40), i64s(last_, 1 << 40)
    for i in range(n_runs):
        if not _permits(apart, 0, n_apart, runs, i * n_nodes, 0, uses, width, first, last):
            return 0
    return 1


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def take_runs(starts_, windows_, n_starts, begins_, tries_, runs_, nodes_, apart_, uses_, width, bytes_, out_):
    """Write the runs taken, in order, to `out`; returns how many there are.

    begins: of each window its first try, then the end of the last; bytes: addresses of the tensors' first bytes and of
    their ends, 0: every tensor has memory of its own.
    """
    starts, windows, begins = i64s(starts_, n_starts), i64s(windows_, n_starts), i64s(begins_, 1 << 40)
    tries, runs, nodes = i64s(tries_, 1 << 40), i64s(runs_, 1 << 40), i64s(nodes_, 1 << 40)
    apart, uses, out, n, done = i64s(apart_, 1 << 40), i64s(uses_, 1 << 40), i64s(out_, 1 << 40), 0, 0
    where = i64s(bytes_, 2)
    first, last = i64s(where[0], 1 << 40), i64s(where[1], 1 << 40)
    for i in range(n_starts):
        at = starts[i]
        for t in range(begins[windows[i]] * TRY_WORDS, begins[windows[i] + 1] * TRY_WORDS, TRY_WORDS):
            permitted = at >= done
            for r in range(tries[t + TRY_FROM] * RUN_WORDS, tries[t + TRY_TO] * RUN_WORDS, RUN_WORDS):
                permitted = permitted and (where[0] == 0 or _permits(
                    apart, runs[r + RUN_APART], runs[r + RUN_APART_TO], nodes, runs[r + RUN_NODES], at, uses, width,
                    first, last))
            if not permitted:
                continue
            for r in range(tries[t + TRY_FROM], tries[t + TRY_TO]):
                run, took = r * RUN_WORDS, n * TOOK_WORDS
                out[took + TOOK_END] = at + runs[run + RUN_END]
                out[took + TOOK_N] = runs[run + RUN_N]
                out[took + TOOK_KIND] = runs[run + RUN_KIND]
                out[took + TOOK_RUN] = r
                out[took + TOOK_AT] = at
                n += 1
            done = at + tries[t + TRY_N]
    return n
