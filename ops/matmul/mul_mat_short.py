"""mul_mat for few rows and many columns: convolutions of short signals, whose patches are a and whose kernels are b.

Packing the columns, as mul_mat_tile does, would take longer than multiplying them with so few rows: here they are read
once, where they lie, and threads share the columns.

              columns of b ->
    row 0  [ .  .  .  . ][ .  .  .  . ] ...            a register tile: up to 4 rows x 4 columns
    row 1  [ .  .  .  . ][ .  .  .  . ]                d[j][0 .. m): side by side
"""
from ggjit.ops.core.record import OK
from ggjit.ops.core.traits import traits_of
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, nb, ne
from ggjit.ops.native.row_loops import over_rows
from ggjit.ops.types.shared.dot import make_dot_tile

MAX_ROWS = 8
TILE_ROWS, TILE_COLUMNS = 4, 4


def fits(a, b):
    """Few rows; both sides of one type that is multiplied as it lies, elements side by side."""
    dot = traits_of(a.type).dot
    return a.ne[1] <= MAX_ROWS and b.type is a.type and dot.tail_y_ir is not None and b.nb[0] == b.type.nbytes


def tile_rows(m):
    """Rows of a register tile: 1, 2 or 4."""
    return min(TILE_ROWS, 1 << (m - 1).bit_length())


def make_kernel(type, n_rows):
    """n_rows: tile_rows of the node."""
    tile = make_dot_tile(traits_of(type).dot, n_rows, TILE_COLUMNS)

    @inline
    def groups(node):
        b = node + SRC1
        return (ne(b, 1) + TILE_COLUMNS - 1) // TILE_COLUMNS * ne(b, 2) * ne(b, 3)

    @inline
    def one(node, r):
        a, b, d = node + SRC0, node + SRC1, node + DST
        k, m, n, n2 = ne(a, 0), ne(a, 1), ne(b, 1), ne(b, 2)
        per_matrix = (n + TILE_COLUMNS - 1) // TILE_COLUMNS
        matrix = r // per_matrix
        j = (r - matrix * per_matrix) * TILE_COLUMNS
        i3 = matrix // n2
        i2 = matrix - i3 * n2
        w = addr(a) + i2 // (n2 // ne(a, 2)) * nb(a, 2) + i3 // (ne(b, 3) // ne(a, 3)) * nb(a, 3)
        y = addr(b) + i2 * nb(b, 2) + i3 * nb(b, 3) + j * nb(b, 1)
        c = addr(d) + i2 * nb(d, 2) + i3 * nb(d, 3) + j * nb(d, 1)
        for q in range(0, m, n_rows):
            tile(w + q * nb(a, 1), nb(a, 1), n_rows * nb(a, 1), y, nb(b, 1), k, c + 4 * q, nb(d, 1), m - q, n - j)
        return OK
    return over_rows(one, groups)
