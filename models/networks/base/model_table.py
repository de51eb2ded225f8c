"""The table that shows a model at the end of a notebook cell: sizes, types, layers, context, memory, speed."""
import collections
import math

from ggjit.core.html_repr import size_text
from ggjit.display.html import facts, folded, table


def model_html(m):
    """HTML of a network."""
    file = m.file
    name = file.metadata.get("general.name") or file.metadata.get("general.basename") or ""
    about = facts(f"{type(m).__name__} {name or file.arch}", [
        ("file", file.path), ("architecture", file.arch), ("parameters", f"{n_params(m):,}"), *_layers(m), *_text(m),
        ("weights", size_text(m.weights.nbytes)), ("KV cache", _bytes(m, "kv_nbytes")),
        ("memory for computing", _bytes(m, "compute_nbytes")), ("on", repr(m.scheduler or m.backend)),
        ("adapters", len(m.weights.adapters) or None), ("speed here", speed_text(m))])
    return about + folded("weights by type", _types(m)) + folded(f"{len(m.weights)} weights", m.weights._repr_html_())


def n_params(m):
    """How many parameters the weights have."""
    return sum(math.prod(info.ne) for info in m.file.tensors.values())


def _layers(m):
    description = getattr(m, "description", None)
    if description is None:
        return [("layers", m.n_layer)] if hasattr(m, "n_layer") else []
    return [("layers", str(description)), ("width", getattr(m, "n_embd", None))]


def _text(m):
    trained = getattr(m, "n_ctx_train", None)
    context = f"{m.n_ctx:,} tokens" + (f" (trained for {trained:,})" if trained else "")
    return [("context", context), ("vocabulary", f"{m.n_vocab:,} tokens"), ("cache type", repr(m.kv_type)
                                                                            if hasattr(m, "kv_type") else None)]


def _bytes(m, name):
    nbytes = getattr(m, name, 0)
    return size_text(nbytes) if nbytes else None


def speed_text(m):
    """Tokens a second of the last text that was generated while no kernel was compiled."""
    speed = getattr(m, "last_speed", None)
    if not speed:
        return "not measured yet: m.generate(prompt).text"
    return ", ".join(f"{what} {value:,.0f} tokens/s" for what, value in speed.items() if value)


def _types(m):
    count, nbytes = collections.Counter(), collections.Counter()
    for info in m.file.tensors.values():
        count[repr(info.type)] += 1
        nbytes[repr(info.type)] += info.nbytes
    return table([(t, count[t], f"{n:,}") for t, n in nbytes.most_common()], ("type", "weights", "bytes"), (1, 2))
