"""Chooses the register tile for a product of many columns."""
from ggjit.ops.matmul.tile import NL
from ggjit.ops.matmul.tile_bf16 import bf16_tile
from ggjit.ops.matmul.tile_codes import code_tile
from ggjit.ops.matmul.tile_float import float_tile


def tile_of(type, n=NL, exact=False):
    """The Tile of weights of the type for products of n columns; exact: columns are not rounded to the type."""
    return not exact and bf16_tile(type, n) or code_tile(type, n) or float_tile(type, n)
