"""Finds the layers of a network by the names of its tensors: prefixes `blk.3.` or `layers.3.`, suffix `-3`.

Nodes without a name belong where their weights belong, or else their readers.
"""
import collections
import re

from ggjit.ops.core.record import OP

_LAYER = re.compile(r"^(?:.*\.)?(blk|block|blocks|layer|layers|h)\.(\d+)\.|^.+-(\d+)$")
WEIGHT = re.compile(r"\.(weight|bias)$")


def layer_of_name(name):
    m = _LAYER.match(name)
    return None if m is None else f"{m[1] or 'blk'}.{m[2] or m[3]}"


def layers(nodes):
    """{tensor id: layer or None} of the nodes."""
    own, readers = {}, collections.defaultdict(set)
    for t in nodes:
        named = layer_of_name(t.name)
        weights = [s for s in t.src if s is not None and s.op == OP.NONE and WEIGHT.search(s.name)]
        of_weights = {layer_of_name(w.name) for w in weights}
        own[t.id] = named or (of_weights.pop() if len(of_weights) == 1 else None)
        for s in t.src:
            if s is not None:
                readers[s.id].add(t.id)
    # a node without name and weights belongs to the layer of its readers, if all agree
    for t in reversed(nodes):
        if own[t.id] is None and not t.name and not any(s is not None and WEIGHT.search(s.name) for s in t.src):
            theirs = {own[i] for i in readers[t.id]}
            own[t.id] = theirs.pop() if len(theirs) == 1 else None
    return own
