"""Named values of a network while it runs: read, replaced, drawn, explained.

    inside              what users call: names, capture, patch, attention, ...
    hooks               how values are kept and replaced
    pictures            attention maps, hidden states, the logit lens
    attribution         gradients with respect to what a model reads
"""
