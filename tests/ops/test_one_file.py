"""An op is one file: added to a folder of ops it is built, computed, differentiated, measured, documented, tested."""
import ast

from helpers.paths import ROOT

from ggjit.ops.core.record import OP

TOY = '''
"""cube: x^3 of every element."""
from ggjit.ops.core.builders import in_place_pair
from ggjit.ops.core.record import OK, own_op
from ggjit.ops.core.shape import is_contiguous, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import F32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC0, ne, param_f32, row_addr, row_index
from ggjit.ops.native.row_loops import over_rows

CUBE = own_op("CUBE")


def _cube(a: Tensor, factor: float, in_place: bool):
    """factor a^3, elementwise; a F32, contiguous; shape of a.  op params: factor.  Errors: TypeMismatch, ShapeError."""
    require_type("cube", a, (F32,))
    require(is_contiguous(a), "cube: the source must be contiguous", a, remedy="use gg.cont first")
    return a.ctx.node(CUBE, F32, a.ne, (a,), (float(factor),), view_of=a if in_place else None)


cube, cube_inplace = in_place_pair(_cube)


def reference(t, a):
    return float(t.param_floats[0]) * a ** 3


@inline
def _row(node, r):
    i1, i2, i3 = row_index(node + DST, r)
    x, d, factor = row_addr(node + SRC0, i1, i2, i3), row_addr(node + DST, i1, i2, i3), param_f32(node, 0)
    for i in range(ne(node + DST, 0)):
        v = ld_f32(x + 4 * i)
        st_f32(d + 4 * i, factor * v * v * v)
    return OK


def kernel(t, n_threads):
    return Kernel("cube", lambda: over_rows(_row), cost=0.1 * touched_nbytes(t))


def cases():
    for shape in ((5, 4, 3, 2), (64, 1, 1, 1)):
        yield Case(f"{shape}", lambda inp, s=shape: cube(inp.new(F32, s), 1.5), 1e-12)


def gradient(g, t, dy):
    return (lambda: g.mul(g.scale(g.sqr(t.src[0]), 3 * float(t.param_floats[0])), dy),)


SPECS = (Spec(op=CUBE, builders=(cube, cube_inplace), reference=reference, kernel=kernel, in_place=True,
              gradient=gradient, cases=cases, flops=lambda t: 3 * t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3]),)
'''

EVERYTHING = '''
import sys
sys.path.insert(0, {tests!r})
import ggjit.ops.elementwise
ggjit.ops.elementwise.__path__.append({folder!r})           # where files of ops are looked for
import pickle
import numpy as np
import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import all_specs
spec = all_specs()[OP.CUBE]
assert sorted((int(OP.CUBE), int(OP.FLASH_ATTN_PAGED))) == [101, 102] and OP(int(OP.CUBE)) is OP.CUBE
assert spec.module == "ggjit.ops.elementwise.cube"

# built, computed, in place
x = np.random.default_rng().uniform(-1, 1, (3, 8)).astype(np.float32)
y = gg.cube(gg.tensor(x), 2.0)
assert y.op is OP.CUBE
np.testing.assert_allclose(gg.compute(y), 2 * x ** 3, rtol=1e-6)
a = gg.add(gg.tensor(x), gg.tensor(x))
z = gg.cube(a, 1.0)
report = gg.measure(gg.Graph(z))
assert report.peak == x.nbytes, report.peak                  # the sum's memory is taken over
try: gg.cube(gg.transpose(gg.tensor(x)), 1.0)
except gg.ShapeError as e: assert "use gg.cont" in str(e)
else: raise AssertionError

# float64 reference: the project's own runner, and every node compared as it runs
from helpers.cases import nmse, run
for case in spec.cases():
    got, want, _ = run(case)
    assert nmse(got, want) <= case.max_nmse, case.name

# gradient
w = gg.set_param(gg.tensor(x))
dw, = gg.grad(gg.sum(gg.cube(w, 2.0)), [w])
np.testing.assert_allclose(gg.compute(dw), 6 * x ** 2, rtol=1e-6)

# made by hand and pickled: as the builder makes it, or refused
ctx = y.ctx
same = ctx.node(OP.CUBE, gg.F32, y.ne, (y.src[0],), (2.0,))
assert np.array_equal(gg.compute(same), gg.compute(y))
try: ctx.node(OP.CUBE, gg.F32, (4, 4), (y.src[0],), (2.0,))
except gg.ShapeError as e: assert "the builder makes" in str(e)
else: raise AssertionError
assert pickle.loads(pickle.dumps(gg.Graph(y))).nodes[0].op is OP.CUBE

# operations and bytes in a profile
with gg.profile() as p:
    gg.compute(gg.cube(gg.tensor(x), 2.0))
row, = p.by("op")
assert row.flops == 3 * x.size and row.nbytes == 2 * x.nbytes, (row.flops, row.nbytes)

# stub, page, list of ops
from ggjit.tools import stubs
assert "def cube(a: Tensor, factor: float) -> Tensor: ..." in stubs.text()
assert "def cube_inplace(a: Tensor, factor: float) -> Tensor: ..." in stubs.text()
from ggjit.tools.command.op_page import find, op_page
page = op_page(find("cube"), [gg.registry.device("CPU")])
assert "## CUBE" in page and "cube(a: Tensor, factor: float)" in page and "factor a^3" in page and "in place" in page
assert "CPU: src0 F32 -> F32" in page, page

# suite
from ggjit.tools.suite.cases.case import all_cases
from ggjit.tools.suite.runner import Runner
mine = [c for c in all_cases() if c.op == "CUBE"]
assert len(mine) == 2
for case in mine:
    outcome = Runner(gg.init_backend("CPU:n_threads=1")).run(case)
    assert outcome.status == "ok" and outcome.checked == ("float64",), outcome
print("whole")
'''


def test_an_op_is_one_file(python, tmp_path):
    (tmp_path / "cube.py").write_text(TOY)
    r = python(EVERYTHING.format(tests=str(ROOT / "tests"), folder=str(tmp_path)))
    assert r.returncode == 0 and r.stdout == "whole\n", r.stderr[-3000:]


MOST_FACTS = 36


def facts_of_ops(text):
    """Names of single ops in a source, OP.NONE left out, which is none: OP.MUL_MAT."""
    return [n.attr for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
            and n.value.id == "OP" and n.attr in OP.__members__ and n.attr != "NONE"]


def test_the_engine_knows_few_ops_by_name():
    """What is true of one op is said in its file; each name here is a place that a new op might have to be added to."""
    found = {str(p.relative_to(ROOT)): facts_of_ops(p.read_text(encoding="utf-8"))
             for p in sorted((ROOT / "engine").rglob("*.py"))}
    n = sum(map(len, found.values()))
    assert n <= MOST_FACTS, {name: ops for name, ops in found.items() if ops}
    assert facts_of_ops("if t.op == OP.ADD or t.op in (OP.NONE, OP.CPY): OP(3)") == ["ADD", "CPY"]
