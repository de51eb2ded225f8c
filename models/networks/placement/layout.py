"""Chooses the weights that are stored repacked (CPU_REPACK, ops/matmul/repack): where products become faster, and
they fit.

    asked      True: all that have a layout; False: none
    encoders   all but super-blocks, whose prompts gain nothing: many columns at a time
    decoders   types that a token streams from memory and whose layout is faster there (ops/matmul/choices.py), while
               half of the free memory holds them: repacked weights are private, mapped ones come and go
"""
import collections

from ggjit.core.backend import TYPE_NULL
from ggjit.cpu.tuning import LEAST_NBYTES, tune_unknown
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.repack import layouts as repack

SUPER_BLOCK = 256


def repacked(matrices, asked, encoder, device):
    """The leaves among `matrices`, which only products and get_rows read, that shall be repacked."""
    if asked is False:
        return []
    able = [t for t in matrices if repack.takes(t.type, t.ne)]
    if asked or encoder:
        return able if asked else [t for t in able if t.type.block < SUPER_BLOCK]
    nbytes = collections.Counter()
    for t in matrices:
        nbytes[t.type] += t.nbytes
    large = [type for type, n in nbytes.items() if n >= LEAST_NBYTES]
    if device.type != TYPE_NULL:
        tune_unknown(large)
    chosen = [t for t in able if t.type in large and choices.pays_repacked(t.type)]
    fits = not chosen or device.type == TYPE_NULL or 2 * sum(t.nbytes for t in chosen) <= device.memory()[0]
    return chosen if fits else []
