"""A decoder as graphs, as functions of a Decoder `m`: its weights, the cache of what was read, parts of its graphs.

The graph of a batch depends on a few numbers only, so it is planned once and replayed: how many tokens, how many cache
rows are looked at (rounded up, the mask hides the rest), how many logit rows are wanted.  Positions, cache row numbers
and the masks are inputs; attention layers with windows share a mask per window.  A batch holds tokens of one text or of
several (parts/kv_cells.py).
"""

import numpy as np

import ggjit as gg
from ggjit.core.buffer import MultiBuffer
from ggjit.core.placing import place_tensors
from ggjit.models.blocks.description import CacheSizes, Loader, linear, mask_name, pages_name, rows_name
from ggjit.models.blocks.hparams import MAX_CTX
from ggjit.models.core.checks import integer
from ggjit.models.networks.parts.kv_cells import PAGE
from ggjit.ops.core import machine
from ggjit.ops.core.errors import ModelError, ParamError
from ggjit.ops.core.host_memory import empty, oom_guard
from ggjit.ops.core.user_warnings import warn
from ggjit.tensors.context import Context

DEFAULT_N_CTX = 4096
CONTEXT_NBYTES = 32                     # of a token of the context, beside the cache: masks by distance, rows of texts
LAYER_INPUT = "input of layer"          # in Scope.shared, with the number of the layer


def context_size(m):
    n = m.options.n_ctx
    if n is None:
        return min(m.n_ctx_train, DEFAULT_N_CTX)
    return integer("n_ctx", n, 1, MAX_CTX)


def check_kv_type(m):
    for block in m.description.blocks:
        for type_, names in ((m.kv_type, ("d_head", "d_index")), (m.v_type, ("d_head_v",))):
            wrong = [n for n in (getattr(block.mixer, name, 0) for name in names) if n % type_.block]
            if not wrong:
                continue
            raise ParamError(f"kv_type {type_!r} stores blocks of {type_.block}, the heads of this "
                             f"model have {wrong[0]}; use F16 or F32")


def check_positions(m):
    """ParamError where the network cannot tell the positions of the context apart; a warning where it was not
    trained for so many."""
    about, path = m.description, m.file.path
    if m.rope_changes and not any(getattr(piece, "rope", None) for piece in about.pieces):
        raise ParamError(f"{path} has no RoPE; leave {', '.join(m.rope_changes)} out")
    if m.n_ctx <= m.n_ctx_train:
        return
    if about.positions:
        raise ParamError(f"n_ctx must be an integer from 1 to {m.n_ctx_train}, which {path} has positions for, "
                         f"got {m.n_ctx}")
    if about.windows and not m.rope_changes:
        times = m.n_ctx / m.n_ctx_train
        warn(f"{path} was trained for contexts of {m.n_ctx_train} tokens, not of {m.n_ctx}: what "
             f"comes later may be poor (rope_scaling=\"yarn\", rope_scale={min(times, 1e6):g} may help)")


# ---------------------------------------------------------------- loading
def load_weights(m):
    file, want, d, about = m.file, m.weights.want, m.n_embd, m.description
    table = file.tensors.get("token_embd.weight")
    m.n_vocab = table.ne[1] if table and len(table.ne) > 1 else 0
    if table and not m.n_vocab:
        raise ModelError(f"{file.path}: token_embd.weight {list(table.ne)} holds no vocabulary")
    loader = Loader(m.weights, d, m.n_vocab)
    m.embd = want("token_embd.weight", d, m.n_vocab)
    m._embd_adapters = m.weights.beside("token_embd.weight")
    m.positions = want("position_embd.weight", d, m.n_ctx_train) if about.positions else None
    m.embd_norm = loader.norm(about.embd_norm, about.norm) if about.embd_norm else None
    m.out_norm = loader.norm(about.out_norm, about.norm)
    m.frame = about.frame.load(loader) if about.frame else {}
    _load_output(m, want, d)
    m.out_bias = want("output.bias", m.n_vocab) if about.output_bias else None
    m._out_adapters = [] if m.out is m.embd else m.weights.beside("output.weight")
    stored = about.stored or range(len(about.blocks))
    m.layers = [block.load(loader, f"{about.prefix}{i}.") for i, block in zip(stored, about.blocks, strict=True)]
    loader.ignore(*(f"{about.prefix}{i}.{name}.weight" for i in stored for name in about.for_pictures))
    adapters = [t for adapter in m.weights.adapters for pair in adapter.pairs.values() for t in pair]
    loader.ignore(*(name for name in file.tensors for i in range(m._n_left)
                    if name.startswith(f"{about.prefix}{m.n_layer + i}.")))
    m._weight_ids = np.array([t.base.id for t in (*m.weights._leaves.values(), *adapters)], np.int64)
    m._products = [m.out, *loader.matrices]


def _load_output(m, want, d):
    tied = m.description.tied
    m.out = None if tied else want("output.weight", d, m.n_vocab, optional=tied is None)
    if m.out is None:                    # tied to the embedding, of which a GPU gets a copy
        m.out = want("token_embd.weight", d, m.n_vocab, named="output.weight") \
            if m.offload.has("output.weight") else m.embd


def make_cache(m):
    """The caches and states of all layers, on the devices of their weights.  They are zeroed: rows that were not
    written are masked, but must not hold NaN."""
    m.kv_ctx = Context()
    m.cache, by_backend = [], {}
    for i, block in enumerate(m.description.blocks):
        m.cache.append([m.kv_ctx.new_tensor(type_, ne, f"{name} {i}") for name, type_, ne in
                           block.cache(cache_sizes(m))])
        where = m.offload.keeps(i) or m.backend
        by_backend.setdefault(where, []).extend(m.cache[-1])
    m.recurrent = any(leaf.name.startswith("state") for kept in m.cache for leaf in kept)
    m.cells.has_states = m.recurrent
    m.kv_buffer = MultiBuffer([buf for buf, _ in place_tensors(
        [(b.default_buffer_type, tensors) for b, tensors in by_backend.items()])])
    m.kv_buffer.clear()


def kept_by_kind(m):
    """{"KV cache" or "state": leaves}: what layers keep of a text."""
    found = {}
    for leaf in (leaf for kept in m.cache for leaf in kept):
        found.setdefault("state" if leaf.name.startswith("state") else "KV cache", []).append(leaf)
    return found


def cache_sizes(m):
    return CacheSizes(m.n_embd, m.kv_type, m.v_type, m.cells.n_rows, m.cells.n_state_rows)


def can_page(m):
    """Can all layers find keys by page tables, and is there room for a partly empty page of every text?  Then texts get
    rows of the caches in pages (kv_cells.py)."""
    if not m.flash or m.description.chunked or 2 * m.n_seqs * PAGE > m.n_cells:
        return False
    if m.backend.device.name not in ("CPU", "NULL") or m.options.devices is not None or m.options.n_gpu_layers:
        return False
    return all(getattr(block.mixer, "pages", False) and not 0 < block.mixer.window < m.n_ctx
               for block in m.description.blocks)


def mask_values(m):
    """{window: array}: the mask's value for each distance of key and query; the mask of position p is the part that
    begins at n_ctx - 1 - p."""
    bias = m.description.alibi()
    with oom_guard(f"the masks of a context of {m.n_ctx} (less with a smaller n_ctx)"):
        if 0 < machine.available_nbytes() < CONTEXT_NBYTES * m.n_ctx:
            raise MemoryError                           # the system would promise it, then end the process
        n_more = m.n_cells - m.n_ctx + PAGE         # masks may be wider than the context
        return {window: seen(m, window or m.n_ctx, bias, n_more) for window in m.description.windows}


def seen(m, window, bias, n_more=0):
    """The values of one mask by distance: 0 or ALiBi's bias for the keys a token sees, from window - 1 positions before
    it to its own; -inf elsewhere."""
    values = np.full(2 * m.n_ctx + n_more, -np.inf, _mask_dtype(m))
    n = min(window, m.n_ctx)
    values[m.n_ctx - n:m.n_ctx] = np.arange(1 - n, 1) if bias else 0
    return values


def _mask_dtype(m):
    # F16 holds no whole numbers above 2048, which ALiBi needs
    return np.float32 if m.description.alibi() else np.float16


# ---------------------------------------------------------------- parts of a graph
def inputs(m, n_tokens, n_kv, n_out, n_seqs, n_tables=0, pictures=False):
    """n_tables: of pages; 0: rows are looked at as they lie in the cache.  pictures: are there any among the tokens?"""
    inputs = {"tokens": np.zeros(n_tokens, np.int32), **m.description.constants}
    if pictures:
        inputs |= {"picture": np.zeros((n_tokens, m.n_embd * (1 + m.description.n_deep)), np.float32),
                   "is_text": np.ones((n_tokens, 1), np.float32)}
        if m.description.has_grid:
            inputs["parts"] = np.zeros(4 * n_tokens, np.int32)          # of positions: time, row, column, 0
    if m.description.rotates:
        inputs["positions"] = np.zeros(n_tokens, np.int32)
    for window, n_rows in m.cells.n_rows.items():
        inputs[rows_name(window)] = np.zeros(n_tokens, np.int64)
        width = n_kv if n_tables else min(n_kv, n_rows)
        inputs[mask_name(window)] = mask_room(m, window, n_tokens, width)
        if n_tables:
            inputs[pages_name(window)] = np.zeros((n_tables, n_kv // PAGE), np.int32)
    for more in m.description.inputs:
        inputs |= more.arrays(n_tokens, n_kv)
    if m.description.temperature:
        inputs["temperature"] = np.ones((n_tokens, 1, 1), np.float32)
    if m.recurrent:
        inputs |= {"state_row": np.zeros(n_seqs, np.int32), "next_state_row": np.ones(n_seqs, np.int64)}
    if n_out < n_tokens:
        inputs["out_rows"] = np.zeros(n_out, np.int32)
    return inputs


def mask_room(m, window, n_tokens, n_kv):
    """[n_tokens, n_kv] for a mask.  Every batch writes all of its mask and graphs run one after the other, so those of
    one window lie in the same memory."""
    n = n_tokens * n_kv
    room = m._mask_memory.get(window)
    if room is None or room.size < n:
        most = min(m.n_batch, m.n_ctx) * m.cells.n_rows[window]
        room = m._mask_memory[window] = empty(max(n, most), _mask_dtype(m),
                                                "a mask (less with a smaller n_ctx or n_batch)")
    return room[:n].reshape(n_tokens, n_kv)


def embedded(m, g):
    about = m.description
    x = gg.get_rows(m.embd, g.leaf["tokens"])
    for low, up, factor in m._embd_adapters:
        x = gg.add(x, gg.scale(gg.mul_mat(up, gg.get_rows(low, g.leaf["tokens"])), factor))
    if about.embd_scale:
        x = gg.scale(x, about.embd_scale)
    if "picture" in g.leaf:
        x = gg.add(gg.mul(x, g.leaf["is_text"]), picture_vectors(m, g, 0))
    if m.positions is not None:
        x = gg.add(x, gg.get_rows(m.positions, g.leaf["positions"]))
    return gg.set_name(x if m.embd_norm is None else g.norm(x, about.norm, m.embd_norm), "embd")


def picture_vectors(m, g, k):
    """[n_embd, n_tokens]: what a picture's vectors add before the first layer (k = 0), or behind layer k - 1."""
    leaf = g.leaf["picture"]
    return gg.view_2d(leaf, m.n_embd, leaf.ne[1], leaf.nb[1], k * m.n_embd * leaf.nb[0])


def through_blocks(m, g, x, rows=None):
    """rows: of the tokens, those that are wanted: after the last layer no others are read."""
    about, last = m.description, m.n_layer - 1
    x = g.shared["embd"] = about.frame.before(g, x, m.frame) if about.frame else x
    for i, (block, w) in enumerate(zip(about.blocks, m.layers, strict=True)):
        g.shared[LAYER_INPUT, i] = x
        x = behind_layer(m, g, block.build(g, x, w, i, rows if i == last else None), i)
    g.shared[LAYER_INPUT, last + 1] = x if rows is None else None
    return about.frame.after(g, x, m.frame, rows) if about.frame else x


def behind_layer(m, g, x, i):
    """What a layer gives on, with what is added to it."""
    if i in m.control:
        x = gg.set_name(gg.add(x, m.control[i]), f"controlled-{i}")
    if "picture" in g.leaf and i < m.description.n_deep:
        x = gg.add(x, picture_vectors(m, g, i + 1))
    return x


def layer_input(m, g, i, rows):
    """[n_embd, n_tokens]: what layer i reads of all tokens; i = n_layer: what the last one gives.

    rows: of the tokens, those that are wanted.  The last layer computes the others beside them, so that these keep the
    bits that they have alone.
    """
    if i == m.n_layer and rows is not None:
        x = m.description.blocks[-1].build(g, g.shared[LAYER_INPUT, i - 1], m.layers[-1], i - 1)
        return behind_layer(m, g, x, i - 1)
    return g.shared[LAYER_INPUT, i]


def states(m, g, x, rows):
    """Normed states of all tokens; x: those that are wanted, `rows` of the tokens."""
    if rows is not None:
        x = g.norm(layer_input(m, g, m.n_layer, rows), m.description.norm, m.out_norm)
    return gg.set_output(gg.set_name(x, "states"))


def logits(m, x):
    about = m.description
    y = linear((m.out, m.out_bias, *m._out_adapters), x)
    if about.logit_scale:
        y = gg.scale(y, about.logit_scale)
    if about.softcap:
        y = gg.scale(gg.tanh(gg.scale(y, 1.0 / about.softcap)), about.softcap)
    return gg.set_name(without(y, *about.no_text) if any(about.no_text) else y, "logits")


def without(y, first, end):
    """Logits [n_vocab, n], those of the ids from `first` up to `end` the lowest number there is."""
    def rows(a, b):
        return gg.view_2d(y, b - a, y.ne[1], y.nb[1], a * y.nb[0])
    hidden = gg.fill(gg.cont(rows(first, end)), float(np.finfo(np.float32).min))
    return gg.concat(gg.concat(gg.cont(rows(0, first)), hidden, 0), gg.cont(rows(end, y.ne[0])), 0)
