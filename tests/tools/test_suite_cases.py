"""The cases of ggml's suite: as many as in ggml, of as many types and strides as ever, each said once."""
import collections

import numpy as np
from helpers.suite_list import N_CASES, N_CLASSES, OWN_OPS

import ggjit as gg
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.spec import Inputs, all_specs
from ggjit.tools.suite.cases.case import Maker, all_cases, vars_of

N_KINDS = 550, 1010, 1287        # (op, types, strides) of the ops' own cases, of the suite's, of both
PER_CLASS = dict(unary=168, get_rows=119, set_rows=703, im2col_3d=2051, conv_2d=3140, cpy=581, bin_bcast=372,
                 mul_mat=1563, mul_mat_id=872, mul_mat_vec_fusion=432, out_prod=1415, soft_max=212, rope=870,
                 argsort=98, top_k=445, flash_attn_ext=5158, topk_moe=320, lightning_indexer=156)


# ---------------------------------------------------------------- the list
def test_the_list_is_ggmls():
    n = collections.Counter(c.family for c in all_cases()[:N_CASES])
    assert len(n) == N_CLASSES
    assert {f: n[f] for f in PER_CLASS} == PER_CLASS
    assert [c.index for c in all_cases()] == list(range(len(all_cases())))


def test_ops_without_a_case_of_ggmls_bring_their_own():
    own = all_cases()[N_CASES:]
    assert {c.op for c in own} == {"ADD1", "DIAG_MASK_ZERO", "WIN_PART", "WIN_UNPART", "GET_REL_POS", "ADD_REL_POS",
                                   "IM2COL_BACK", "POOL_2D_BACK", *OWN_OPS}
    assert len(own) >= 49 and not {c.family for c in own} & {c.family for c in all_cases()[:N_CASES]}


# ---------------------------------------------------------------- what the cases are of
def order(t):
    """How a tensor lies, whatever its size: the order of its strides, which of them leave no gap."""
    return (t.type, tuple(np.argsort(t.nb, kind="stable").tolist()), t.nb[0] == t.type.nbytes,
            all(t.nb[i + 1] == t.nb[i] * t.ne[i] for i in (1, 2)))


def kinds(builds):
    """{(op, types, strides)} of the nodes these make."""
    found = set()
    for build in builds:
        with gg.Context() as ctx:
            try:
                nodes = gg.Graph(build(ctx)).nodes
            except gg.GgjitError:               # what ggml has and ggjit has not
                continue
        found |= {(t.op, t.view_src is None, order(t), *(None if s is None else order(s) for s in t.src))
                  for t in nodes if t.op not in VIEW_OPS}
    return found


class Shapes(Inputs):
    """Leaves without values."""
    def new(self, type, ne, values=None, lo=-1.0, hi=1.0):
        return self.ctx.new_tensor(type, ne)


def test_the_cases_are_of_as_many_types_and_strides_as_ever():
    rng = np.random.default_rng(0)
    own = [lambda ctx, c=c: c.build(Shapes(ctx, rng)) for spec in all_specs().values() if spec.cases
           for c in spec.cases()]
    suite = [lambda ctx, c=c: c.build(Maker(ctx)) for c in all_cases()]
    n_own, n_suite, n_all = (len(kinds(builds)) for builds in (own, suite, own + suite))
    assert n_own >= N_KINDS[0] and n_suite >= N_KINDS[1] and n_all >= N_KINDS[2], (n_own, n_suite, n_all)


def test_cases_are_said_once():
    """No case in an op's own file is one of ggml's list again: the same op and types with the same strides."""
    def seen(build, leaves):
        with gg.Context() as ctx:
            try:
                t = build(leaves(ctx))
            except gg.GgjitError:               # what ggml has and ggjit has not
                return None
        function = t.op_params[0] if t.op in (OP.UNARY, OP.GLU) else None
        return t.op, function, *((x.type, x.nb) for x in (t, *t.src) if x is not None)
    ggmls = {seen(c.build, Maker) for c in all_cases()[:N_CASES]}
    again = [(spec.op, c.name) for spec in all_specs().values() if spec.cases and not spec.calls_python
             for c in spec.cases() if seen(c.build, lambda ctx: Shapes(ctx, np.random.default_rng(0))) in ggmls]
    assert not again, again


def test_parameters_read_as_ggml_prints_them():
    assert vars_of(type=gg.Q4_0, ne=(5, 7), scale=1.5, v=True, s="avg") == "type=q4_0,ne=[5,7],scale=1.500000,v=1,s=avg"
    case = next(c for c in all_cases() if c.family == "mul_mat")
    assert str(case) == ("MUL_MAT(type_a=f32,type_b=f32,m=16,n=1,k=256,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,"
                         "src_overlap=0)")
