"""Context shift: tokens in the middle of a text are dropped, and later tokens move forward.

    positions   0 .. n_keep - 1 | n_keep .. n_keep + n_discard - 1 | the rest
                stay            | dropped                          | move to n_keep ...

Keys lie in the cache rotated by their positions: rotating them by -n_discard makes them those of the new ones.  Values
know no positions, and rows only change hands.  As in llama.cpp, keys and values of what stays still know the tokens
that were dropped.

Where keys cannot be rotated (states of recurrent layers, learned positions, norms after RoPE, pairs that stay still,
windows that would reach into what was dropped, positions with rows and columns of a picture), the tokens that stay are
read again with the next ones.  A picture stays whole or is dropped whole.
"""
import numpy as np

import ggjit as gg
from ggjit.models.networks.parts.kv_cells import ALL, SlotMapping
from ggjit.ops.core.errors import NotSupported

NAME = "turn"                           # of the graph's shape: (NAME, rows of each window)


def shift(m, n_keep, n_discard):
    """Drop n_discard tokens of the network's text after the first n_keep."""
    text = m.text
    first, n = n_keep + n_discard, len(text.ids)
    pictures = [] if m.pictures is None else m.pictures.runs(np.array(text.ids, np.int32))
    cut = next(((a, b) for a, b in pictures for edge in (n_keep, first) if a < edge < b), None)
    if cut is not None:
        raise NotSupported(f"dropping the tokens {n_keep} to {first - 1} would cut the picture that is tokens {cut[0]} "
                           f"to {cut[1] - 1}; drop all of it or nothing, or load the model with a larger n_ctx")
    stay = text.ids[:n_keep] + text.ids[first:]
    since = {w: max(n_keep, mapping.since - n_discard) if mapping.since or mapping.n < m.n_ctx else 0
             for w, mapping in text.mappings.items()}
    can_turn = _can_turn(m) and not (pictures and m.description.has_grid)
    turns = not text.broken and can_turn and all(max(len(stay) - w + 1, 0) >= since[w] for w in since if w)
    if turns:
        lowest = {w: max(first, mapping.since, text.written - mapping.n) for w, mapping in text.mappings.items()}
        try:
            _rotate(m, {w: mapping.at(min(lowest[w], n), n) for w, mapping in text.mappings.items()}, n_discard)
        except BaseException:
            text.broken = True          # until all keys are rotated the cache is inconsistent
            raise
        text.mappings = {w: _moved(mapping, n_keep, n_discard, n, since[w], whole=mapping.n >= m.n_ctx)
                         for w, mapping in text.mappings.items()}
        text.written = max(text.written - n_discard, len(stay))
    text.ids, text.saved = stay, (0, 0)
    text.exact = min(text.exact, n_keep)
    text.hooked = text.hooked if text.hooked <= n_keep or text.hooked == ALL else max(n_keep, text.hooked - n_discard)
    text.broken = not turns


def _can_turn(m):
    about = m.description
    return not (m.recurrent or about.positions or about.constants or
                any(getattr(p, "norm_after_rope", False) for p in about.pieces))


def _moved(mapping, n_keep, n_discard, n, since, whole):
    """The rows of a mapping, in the order of the positions after the shift."""
    rows, first = mapping.rows, n_keep + n_discard
    if whole:
        rows = np.concatenate([rows[:n_keep], rows[first:n], rows[n_keep:first], rows[n:]])
    else:
        rows = np.roll(rows, -(n_discard % mapping.n))
    return SlotMapping(rows, since)


def _rotate(m, rows, n_discard):
    """Rotate the keys in these rows, {window: rows}, by -n_discard."""
    rotated = {block.mixer.window for block in m.description.blocks if getattr(block.mixer, "rope", None)}
    rows = {w: r for w, r in rows.items() if w in rotated}
    for at in range(0, max(map(len, rows.values()), default=0), m.n_batch):
        part = {w: r[at:at + m.n_batch] for w, r in rows.items()}
        part = {w: r for w, r in part.items() if len(r)}
        step = m._step((NAME, *((w, len(r)) for w, r in part.items())))
        for w, r in part.items():
            step.inputs[f"from_{w}"][:], step.inputs[f"to_{w}"][:], step.inputs[f"back_{w}"][:] = r, r, -n_discard
        step.plan.compute()


def rotation_graph(m, ctx, counts):
    """(inputs, nodes...) of the graph that rotates the keys of so many rows, ((window, rows) ...)."""
    inputs, nodes = {}, []
    for window, n in counts:
        inputs |= {f"from_{window}": np.zeros(n, np.int32), f"to_{window}": np.zeros(n, np.int64),
                   f"back_{window}": np.zeros(n, np.int32)}
    leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
    for i, (block, w) in enumerate(zip(m.description.blocks, m.layers, strict=True)):
        rope, window = getattr(block.mixer, "rope", None), getattr(block.mixer, "window", None)
        if rope is None or not m.cache[i] or f"from_{window}" not in leaf:
            continue
        kept = m.cache[i][0]
        keys = gg.get_rows(kept, leaf[f"from_{window}"])
        rotated = block.mixer.rotated(keys, leaf[f"back_{window}"], rope.extra_rotation, w)
        nodes.append(gg.set_rows(kept, rotated, leaf[f"to_{window}"]))
        indexer = getattr(block.mixer, "indexer", None)
        if indexer and not indexer.shared:
            keys = gg.get_rows(m.cache[i][-1], leaf[f"from_{window}"])
            rotated = indexer.rotated(keys, leaf[f"back_{window}"], rope.extra_rotation)
            nodes.append(gg.set_rows(m.cache[i][-1], rotated, leaf[f"to_{window}"]))
    return inputs, *nodes
