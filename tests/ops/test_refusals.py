"""Builders refuse wrong shapes, types and parameters, and say what is wrong."""
import re

import pytest

import ggjit as gg


def _t(type, *ne):
    return gg.Context().new_tensor(type, ne)


def _f(*ne):
    return _t(gg.F32, *ne)


def _scan(keep=1, **changed):
    t = dict(s=_f(16, 2, 4, 3), x=_f(2, 4, 5, 3), dt=_f(4, 5, 3), A=_f(1, 4), B=_f(16, 2, 5, 3), C=_f(16, 2, 5, 3),
             ids=_t(gg.I32, 3))
    return gg.ssm_scan(*{**t, **changed}.values(), keep)


def _delta(keep=1, **changed):
    t = dict(q=_f(8, 2, 5, 3), k=_f(8, 2, 5, 3), v=_f(8, 4, 5, 3), g=_f(1, 4, 5, 3), beta=_f(1, 4, 5, 3),
             state=_f(8, 8, 4, 3))
    return gg.gated_delta_net(*{**t, **changed}.values(), keep)


HUGE = 2 ** 31
BAD = {
    "add shapes": lambda: gg.add(_f(4, 3), _f(4, 2)),
    "add types": lambda: gg.add(_f(32), _t(gg.Q8_0, 32)),
    "unary number": lambda: gg.unary(_f(4), 99),
    "unary type": lambda: gg.gelu(_t(gg.I32, 4)),
    "glu shapes": lambda: gg.swiglu_split(_f(4), _f(6)),
    "scale type": lambda: gg.scale(_t(gg.F16, 4), 2.0),
    "clamp order": lambda: gg.clamp(_f(4), 1.0, -1.0),
    "norm eps": lambda: gg.norm(_f(4), -1.0),
    "norm nan": lambda: gg.rms_norm(_f(4), float("nan")),
    "norm strides": lambda: gg.norm_inplace(gg.permute(_f(4, 3), 1, 0, 2, 3), 1e-5),
    "group_norm groups": lambda: gg.group_norm(_f(4, 3, 2), 3, 1e-5),
    "mask shape": lambda: gg.soft_max_ext(_f(8, 4), _f(8, 3), 1.0, 0.0),
    "mask type": lambda: gg.soft_max_ext(_f(8, 4), _t(gg.BF16, 8, 4), 1.0, 0.0),
    "alibi without mask": lambda: gg.soft_max_ext(_f(8, 4), None, 1.0, 8.0),
    "rope mode": lambda: gg.rope(_f(8, 2, 3), _t(gg.I32, 3), 8, 1),
    "rope dims": lambda: gg.rope(_f(8, 2, 3), _t(gg.I32, 3), 10, 0),
    "rope odd dims": lambda: gg.rope(_f(8, 2, 3), _t(gg.I32, 3), 3, 0),
    "rope positions": lambda: gg.rope(_f(8, 2, 3), _t(gg.I32, 4), 8, 0),
    "rope sections": lambda: gg.rope_multi(_f(8, 2, 3), _t(gg.I32, 12), None, 8, (0, 0, 0, 4), 8, 0, 1e4, 1.0,
                                           0.0, 1.0, 0.0, 0.0),
    "get_rows ids": lambda: gg.get_rows(_f(8, 4, 2), _t(gg.I32, 3)),
    "get_rows id type": lambda: gg.get_rows(_f(8, 4), _t(gg.I64, 3)),
    "set_rows width": lambda: gg.set_rows(_f(8, 4), _f(9, 2), _t(gg.I64, 2)),
    "set_rows ids": lambda: gg.set_rows(_f(8, 4), _f(8, 2), _t(gg.I64, 3)),
    "cpy sizes": lambda: gg.cpy(_f(8, 4), _f(8, 5)),
    "cont sizes": lambda: gg.cont_2d(_f(8, 4), 8, 5),
    "cast blocks": lambda: gg.cast(_f(33), gg.Q8_0),
    "argmax dims": lambda: gg.argmax(_f(8, 4, 2)),
    "repeat": lambda: gg.repeat_4d(_f(8, 4), 12, 4, 1, 1),
    "concat dim": lambda: gg.concat(_f(8), _f(8), 4),
    "concat sizes": lambda: gg.concat(_f(8, 2), _f(8, 3), 0),
    "concat types": lambda: gg.concat(_f(8), _t(gg.F16, 8), 0),
    "diag_mask": lambda: gg.diag_mask_inf(_f(8, 2), -1),
    "win_part": lambda: gg.win_part(_f(4, 5, 5), 0), "win_unpart": lambda: gg.win_unpart(_f(4, 2, 2, 3), 5, 5, 2),
    "get_rel_pos": lambda: gg.get_rel_pos(_t(gg.F16, 4, 6), 3, 3), "add_rel_pos": lambda: gg.add_rel_pos(
        _f(9, 4, 2), _f(3, 2, 2, 1), _f(3, 2, 2, 1)),
    "tri": lambda: gg.tri(_f(4, 5), 0), "tri type": lambda: gg.tri(_f(4, 4), 4), "diag": lambda: gg.diag(_f(4, 2)),
    "acc": lambda: gg.acc(_f(4, 4), _f(4), 16, 64, 64, 64), "set": lambda: gg.set_1d(_f(8), _f(8), 4),
    "set negative": lambda: gg.set_1d(_f(8), _f(2), -4), "set types": lambda: gg.set_1d(_f(8), _t(gg.I32, 2), 0),
    "set huge": lambda: gg.set(_f(8, 8), _f(2, 2), HUGE, 0, 0, 0),
    "add1": lambda: gg.add1(_f(8), _f(2)), "add_id": lambda: gg.add_id(_f(8, 2, 3), _f(8, 4), _t(gg.I32, 2, 2)),
    "count_equal": lambda: gg.count_equal(_t(gg.I32, 8), _t(gg.I32, 9)),
    "repeat_back": lambda: gg.repeat_back(_f(8), _f(3)), "get_rows_back": lambda: gg.get_rows_back(
        _f(8, 3), _t(gg.I32, 4), _f(8, 4)),
    "silu_back": lambda: gg.silu_back(_f(8), _f(9)), "rms_norm_back": lambda: gg.rms_norm_back(_f(8), _f(8), -1.0),
    "soft_max_back": lambda: gg.soft_max_ext_back(_f(8), _f(8), 1.0, 8.0),
    "pool k": lambda: gg.pool_1d(_f(8), 0, 9, 1, 0), "pool op": lambda: gg.pool_1d(_f(8), 2, 1, 1, 0),
    "pool s": lambda: gg.pool_2d(_f(8, 8), 0, 2, 2, 0, 1, 0, 0), "pool p": lambda: gg.pool_2d(
        _f(8, 8), 0, 2, 2, 1, 1, float("nan"), 0),
    "pool back": lambda: gg.pool_2d_back(_f(8, 8), _f(8, 8), 0, 2, 2, 1, 1, 0, 0),
    "pad": lambda: gg.pad(_f(8), -1, 0, 0, 0), "pad huge": lambda: gg.pad(_f(8), HUGE, 0, 0, 0),
    "pad reflect": lambda: gg.pad_reflect_1d(_f(8), 8, 0), "roll": lambda: gg.roll(_f(8), 8, 0, 0, 0),
    "arange": lambda: gg.arange(gg.Context(), 3, 3, 1), "arange step": lambda: gg.arange(gg.Context(), 0, 3, 0),
    "arange nan": lambda: gg.arange(gg.Context(), 0, float("nan"), 1),
    "timestep": lambda: gg.timestep_embedding(_f(3), 0, 100), "argsort": lambda: gg.argsort(_f(3), 2),
    "top_k": lambda: gg.top_k(_f(3), 4), "argsort_top_k": lambda: gg.argsort_top_k(_f(3), 4),
    "upscale mode": lambda: gg.upscale(_f(3, 3), 2, 3), "upscale antialias": lambda: gg.interpolate(
        _f(3, 3), 2, 2, 1, 1, 0x202),
    "cross_entropy": lambda: gg.cross_entropy_loss(_f(3), _f(4)), "adamw": lambda: gg.opt_step_adamw(
        _f(3), _f(3), _f(3), _f(3), _f(7)),
    "im2col channels": lambda: gg.im2col(_f(3, 3, 2), _f(9, 9, 3), 1, 1, 0, 0, 1, 1, True, gg.F32),
    "im2col type": lambda: gg.im2col(_f(3, 3, 2), _f(9, 9, 2), 1, 1, 0, 0, 1, 1, True, gg.I32),
    "conv stride": lambda: gg.conv_1d(_f(3, 2, 4), _f(9, 2), 0, 0, 1), "conv padding": lambda: gg.conv_2d_direct(
        _f(3, 3, 2, 1), _f(9, 9, 2), 1, 1, -1, 0, 1, 1),
    "conv dilation": lambda: gg.conv_2d_direct(_f(3, 3, 2, 1), _f(9, 9, 2), 1, 1, 0, 0, 5, 1),
    "conv huge": lambda: gg.conv_2d_direct(_f(3, 3, 2, 1), _f(9, 9, 2), 1, 1, HUGE, 0, 1, 1),
    "conv 3d": lambda: gg.conv_3d_direct(_f(3, 3, 3, 5), _f(9, 9, 9, 2), 1, 1, 1, 0, 0, 0, 1, 1, 1, 2, 1, 2),
    "conv transpose": lambda: gg.conv_transpose_1d(_f(3, 2, 4), _f(9, 4), 1, 1, 1),
    "conv dw": lambda: gg.conv_2d_dw_direct(_f(3, 3, 1, 4), _f(9, 9, 3), 1, 1, 0, 0, 1, 1),
    "col2im": lambda: gg.col2im_1d(_f(9, 4), 1, 2, 0), "col2im p": lambda: gg.col2im_1d(_f(8, 4), 1, 2, 4),
    "ssm_conv channels": lambda: gg.ssm_conv(_f(10, 4), _f(4, 5)),
    "ssm_conv short": lambda: gg.ssm_conv(_f(2, 4), _f(4, 4)),
    "ssm_conv type": lambda: gg.ssm_conv(_f(10, 4), _t(gg.F16, 4, 4)),
    "ssm_scan dt": lambda: _scan(dt=_f(4, 5, 2)),
    "ssm_scan A": lambda: _scan(A=_f(2, 4)),
    "ssm_scan groups": lambda: _scan(B=_f(16, 3, 5, 3), C=_f(16, 3, 5, 3)),
    "ssm_scan ids": lambda: _scan(ids=_t(gg.I64, 3)),
    "ssm_scan snapshots": lambda: _scan(keep=0),
    "ssm_scan mamba-1 snapshots": lambda: _scan(keep=2, A=_f(16, 4)),
    "wkv6 tokens": lambda: gg.rwkv_wkv6(*(_f(8, 2, 3) for _ in range(3)), _f(8, 2), _f(8, 2, 3), _f(128, 2)),
    "wkv6 bonus": lambda: gg.rwkv_wkv6(*(_f(8, 2, 4) for _ in range(3)), _f(8, 3), _f(8, 2, 4), _f(128, 2)),
    "wkv7 state": lambda: gg.rwkv_wkv7(*(_f(8, 2, 4) for _ in range(6)), _f(100, 2)),
    "gla type": lambda: gg.gated_linear_attn(*(_f(8, 2, 4) for _ in range(4)), _t(gg.F16, 128, 2), 1.0),
    "delta net q": lambda: _delta(q=_f(9, 2, 5, 3)),
    "delta net sequences": lambda: _delta(k=_f(8, 2, 5, 2)),
    "delta net gate": lambda: _delta(g=_f(2, 4, 5, 3)),
    "delta net snapshots": lambda: _delta(keep=-1),
    "solve_tri square": lambda: gg.solve_tri(_f(4, 5), _f(2, 5), True, True, False),
    "solve_tri rows": lambda: gg.solve_tri(_f(4, 4), _f(2, 5), True, True, False),
    "solve_tri right": lambda: gg.solve_tri(_f(4, 4), _f(2, 4), False, True, False),
    "indexer mask": lambda: gg.lightning_indexer(_f(8, 4, 3), _f(8, 1, 9), _f(4, 3), _t(gg.F16, 8, 3)),
    "indexer mask type": lambda: gg.lightning_indexer(_f(8, 4, 3), _f(8, 1, 9), _f(4, 3), _f(9, 3)),
    "hc_comb streams": lambda: gg.dsv4_hc_comb(_f(20, 3), _f(3), _f(24), 1e-6, 4),
    "True is no number": lambda: gg.roll(_f(4), True, 0, 0, 0),
    "hc_comb eps": lambda: gg.dsv4_hc_comb(_f(24, 3), _f(3), _f(24), -1e-6, 4),
    "hc_comb iterations": lambda: gg.dsv4_hc_comb(_f(24, 3), _f(3), _f(24), 1e-6, 0),
    "hc_pre": lambda: gg.dsv4_hc_pre(_f(8, 4, 3), _f(3, 4)),
    "hc_post": lambda: gg.dsv4_hc_post(_f(8, 3), _f(8, 4, 3), _f(4, 3), _f(4, 3, 3)),
    "out_prod": lambda: gg.out_prod(_f(8, 3), _f(8, 4)),
    "out_prod type": lambda: gg.out_prod(_f(8, 3), _t(gg.F16, 8, 3)),
    "mul_mat_id ids": lambda: gg.mul_mat_id(_f(8, 3, 4), _f(8, 1, 5), _t(gg.I32, 2, 4)),
    "mul_mat_id slots": lambda: gg.mul_mat_id(_f(8, 3, 4), _f(8, 2, 5), _t(gg.I32, 3, 5)),
    "mul_mat_id width": lambda: gg.mul_mat_id(_f(8, 3, 4), _f(9, 1, 5), _t(gg.I32, 2, 5)),
    "mul_mat_id id type": lambda: gg.mul_mat_id(_f(8, 3, 4), _f(8, 1, 5), _f(2, 5)),
    "hint number": lambda: gg.mul_mat_set_hint(gg.mul_mat(_f(8, 8), _f(8, 5)), 2),
    "hint size": lambda: gg.mul_mat_set_hint(gg.mul_mat(_f(12, 12), _f(12, 5)), 1),
    "hint op": lambda: gg.mul_mat_set_hint(_f(8, 8), 1),
    "prec": lambda: gg.mul_mat_set_prec(gg.mul_mat(_f(8, 8), _f(8, 5)), 3),
    "custom source": lambda: gg.map_custom3(_f(4), None, _f(4), lambda dst, a, b, c, ith, nth: None),
    "flash_attn_back": lambda: gg.flash_attn_back(_f(8, 4), _f(8, 4), _f(4, 8), _f(8, 4), True),
}
SAYS = {                                # words of each error
    "custom source": "map_custom3: source 1 is None",
    "add shapes": "add: b must tile a", "add types": "add: b",
    "unary number": "unary: 99 is not a UNARY number (0 to 21)", "unary type": "gelu: source",
    "glu shapes": "swiglu_split: x and g must have one shape and", "scale type": "scale: source",
    "clamp order": "clamp: min 1.0 is above max -1.0", "norm eps": "norm: eps must not be negative",
    "norm nan": "rms_norm: eps must not be negative", "norm strides": "norm: elements of a row must lie side",
    "group_norm groups": "group_norm: n_groups must be from 1 to ne2 = 2",
    "mask shape": "soft_max: mask must be [ne0, >= ne1,", "mask type": "soft_max: mask",
    "alibi without mask": "soft_max: max_bias > 0 (ALiBi) needs a mask",
    "rope mode": "rope: mode must be 0 normal, 2 neox, 8", "rope dims": "rope: n_dims must be even, 2 to ne0 = 8",
    "rope odd dims": "rope: n_dims must be even, 2 to ne0 = 8",
    "rope positions": "rope: positions must be 1 * a.ne[2] ids",
    "rope sections": "rope: four sections >= 0, not all of", "get_rows ids": "get_rows: ids must be [r, a.ne2, a.ne3]",
    "get_rows id type": "get_rows: ids", "set_rows width": "set_rows: a and b may differ in ne1 only",
    "set_rows ids": "set_rows: ids must be [b.ne1, divides", "cpy sizes": "cpy: both must have the same number of",
    "cont sizes": "cont: tensor F32 [8, 4] has 32", "cast blocks": "33",
    "argmax dims": "argmax: the source must be a matrix with", "repeat": "repeat: [12, 4, 1, 1] is not a multiple of",
    "concat dim": "concat: dim must be 0 to 3", "concat sizes": "concat: sizes may differ in dimension 0",
    "concat types": "concat: the types must be equal", "diag_mask": "diag_mask_inf: n_past must not be negative",
    "win_part": "win_part: window must be a whole number",
    "win_unpart": "win_unpart: a picture of 5 x 5 has 9 windows",
    "get_rel_pos": "get_rel_pos: the table must be [C, 2 * 3 - 1]",
    "add_rel_pos": "add_rel_pos: a must be [pw.ne0 ^ 2, pw.ne1 *", "tri": "tri: the matrices must be square",
    "tri type": "tri: type must be a whole number from", "diag": "diag: the source must have ne1 == 1",
    "acc": "acc: the window ends at byte 80,", "set": "set: the window ends at byte 36,",
    "set negative": "set: offset must be a whole number", "set types": "set: a and b must have one type",
    "set huge": "set: nb1 must be a whole number from 0", "add1": "add1: b must be one element",
    "add_id": "add_id: ids must be [a.ne1, a.ne2]", "count_equal": "count_equal: a and b must have one shape",
    "repeat_back": "repeat_back: b must tile a", "get_rows_back": "get_rows_back: ids must be a row of at most a.ne1",
    "silu_back": "silu_back: both sources must have one shape",
    "rms_norm_back": "rms_norm_back: eps must not be negative",
    "soft_max_back": "soft_max_ext_back: max_bias must be 0 (as on ggml's",
    "pool k": "pool_1d: a window of 9 does not fit into 8", "pool op": "pool_1d: op must be a whole number from 0",
    "pool s": "pool_2d: s0 must be a whole number from 1", "pool p": "pool_2d: padding must be from 0 to 2^24",
    "pool back": "pool_2d_back: the gradient must be [7, 7, 1, 1]", "pad": "pad: rp0 must be a whole number from 0",
    "pad huge": "pad: rp0 must be a whole number from 0",
    "pad reflect": "pad_reflect_1d: p0 = 8 and p1 = 0 must be below", "roll": "roll: shift0 must be a whole number",
    "arange": "arange: from 3.0 to 3.0 by 1.0 is no", "arange step": "arange: from 0.0 to 3.0 by 0.0 is no",
    "arange nan": "arange: from 0.0 to nan by 1.0 is no", "timestep": "dim must be a whole number from 1",
    "argsort": "argsort: order must be a whole number from", "top_k": "top_k: k must be a whole number from 1",
    "argsort_top_k": "argsort_top_k: k must be a whole number from 0",
    "upscale mode": "interpolate: mode must be 0, 1 or 2",
    "upscale antialias": "interpolate: mode must be 0, 1 or 2",
    "cross_entropy": "logits and labels must have one", "adamw": "opt_step_adamw: the weights must be marked as a",
    "im2col channels": "im2col: kernel and data [9, 9, 3, 1]", "im2col type": "im2col: dst_type must be one of (F32,",
    "conv stride": "im2col: s0 must be a whole number from 1",
    "conv padding": "conv_2d_direct: p0 must be a whole number from 0",
    "conv dilation": "conv_2d_direct: a kernel of 3 with dilation 5",
    "conv huge": "conv_2d_direct: p0 must be a whole number from 0",
    "conv 3d": "conv_3d_direct: ne3 of the kernel must be 2 * 2,",
    "conv transpose": "conv_transpose_1d: p0 must be 0 and d0 must be 1",
    "conv dw": "conv_2d_dw_direct: the kernel must be [KW, KH, 1, C]",
    "col2im": "col2im_1d: the source must be a matrix [K *", "col2im p": "col2im_1d: padding of 4 leaves nothing of 7",
    "ssm_conv channels": "ssm_conv: sx and c differ in d_inner",
    "ssm_conv short": "ssm_conv: rows of sx must hold d_conv - 1", "ssm_conv type": "ssm_conv: c",
    "ssm_scan dt": "ssm_scan: dt must be [n_head, n_t, n_s]",
    "ssm_scan A": "ssm_scan: A must be [1 or d_state, n_head]",
    "ssm_scan groups": "ssm_scan: n_group must divide n_head", "ssm_scan ids": "ssm_scan: ids",
    "ssm_scan snapshots": "ssm_scan: K, the number of snapshots, must",
    "ssm_scan mamba-1 snapshots": "ssm_scan: K = 2 snapshots need Mamba-2's A",
    "wkv6 tokens": "rwkv_wkv6: n_tokens must be a multiple of",
    "wkv6 bonus": "rwkv_wkv6: the bonus must hold S H values",
    "wkv7 state": "rwkv_wkv7: state must be [S S H, n_seqs]", "gla type": "gated_linear_attn: source",
    "delta net q": "gated_delta_net: q and k must be [S_v, heads, n_t,",
    "delta net sequences": "gated_delta_net: q and k must be [S_v, heads, n_t,",
    "delta net gate": "gated_delta_net: g must be [1 or S_v, H, n_t, n_s]",
    "delta net snapshots": "gated_delta_net: K, the number of snapshots, must",
    "solve_tri square": "solve_tri: a must be square", "solve_tri rows": "solve_tri: b must be [k, n, ne2, ne3] for a",
    "solve_tri right": "solve_tri: only left (a X = b) is served",
    "indexer mask": "lightning_indexer: mask must be [n_kv, n_batch, 1,",
    "indexer mask type": "lightning_indexer: mask",
    "hc_comb streams": "dsv4_hc_comb: mixes must be [24, t] (4 streams)",
    "True is no number": "roll: shift0 must be a whole number from",
    "hc_comb eps": "dsv4_hc_comb: eps must not be negative",
    "hc_comb iterations": "dsv4_hc_comb: n_iter must be a whole number",
    "hc_pre": "dsv4_hc_pre: weights must be [n_hc, t] for x", "hc_post": "dsv4_hc_post: shapes must be [n_embd, t],",
    "out_prod": "out_prod: a and b differ in the summed", "out_prod type": "out_prod: b",
    "mul_mat_id ids": "mul_mat_id: ids must have a row per token,",
    "mul_mat_id slots": "mul_mat_id: b.ne[1] must divide the experts of a token, ids.ne[0]:",
    "mul_mat_id width": "mul_mat_id: rows of as and b differ in length", "mul_mat_id id type": "mul_mat_id: ids",
    "hint number": "mul_mat_set_hint: hint must be 0 (none) or 1",
    "hint size": "mul_mat_set_hint: a Hadamard matrix is [n, n] with",
    "hint op": "mul_mat_set_hint: expected the result of mul_mat",
    "prec": "mul_mat_set_prec: prec must be 0 (default) or 10",
    "flash_attn_back": "flash_attn_back: ggml's own constructor aborts, so",
}
ERRORS = {"acc": gg.IndexRangeError, "set": gg.IndexRangeError, "solve_tri right": gg.NotSupported,
          "flash_attn_back": gg.NotSupported}


@pytest.mark.parametrize("what", BAD)
def test_builders_refuse(what):
    errors = ERRORS.get(what, (gg.ShapeError, gg.TypeMismatch, gg.ParamError))
    with pytest.raises(errors, match=re.escape(SAYS[what])) as e:
        BAD[what]()
    assert len(str(e.value)) > 20


def test_good_defaults_build():
    """The tensors that BAD changes one by one fit together."""
    assert _scan().ne == (2 * 4 * 5 * 3 + 16 * 2 * 4 * 3, 1, 1, 1) and _delta(2).ne == (32, 15 + 2 * 8 * 3, 1, 1)


def _strided(*ne):
    with gg.Context():
        return gg.permute(_f(*ne), 1, 0, 2, 3)


SEVERAL_NODES = {
    "conv_1d": lambda: gg.conv_1d(_strided(4, 3, 2), _f(9, 4), 1, 0, 1),
    "conv_1d_dw": lambda: gg.conv_1d_dw(_f(3, 1, 5), _f(9, 4), 1, 0, 1),
    "conv_1d_dw stride": lambda: gg.conv_1d_dw(_f(3, 1, 4), _f(9, 4), 0, 0, 1),
    "conv_2d": lambda: gg.conv_2d(_strided(3, 3, 2, 1), _f(9, 9, 2, 1), 1, 1, 0, 0, 1, 1),
    "conv_2d_dw": lambda: gg.conv_2d_dw(_f(3, 3, 1, 2), _f(9, 9, 3, 1), 1, 1, 0, 0, 1, 1),
    "conv_3d": lambda: gg.conv_3d(_f(2, 2, 2, 5), _f(4, 4, 4, 2), 2, 1, 1, 1, 0, 0, 0, 1, 1, 1),
    "argsort_top_k": lambda: gg.argsort_top_k(_f(4, 2), 5),
    "matmul": lambda: _f(4, 3, 2) @ _t(gg.I32, 3, 4),
    "arithmetic": lambda: _t(gg.I32, 4, 1) + _f(4, 3),
}


@pytest.mark.parametrize("build", SEVERAL_NODES.values(), ids=SEVERAL_NODES)
def test_builders_of_several_nodes_leave_none_behind(build):
    """Also while the error is looked at."""
    with gg.Context() as results, pytest.raises(gg.GgjitError, match=".") as error:
        build()
    assert results.tensors == [] and error.value.__traceback__ is not None


def test_a_negative_limit_of_swiglu():
    a = gg.Context().new_tensor(gg.F32, (8, 2))
    with pytest.raises(gg.ParamError, match="swiglu_clamp: the limit must not be negative"):
        gg.swiglu_clamp(a, a, -1.0)
    with pytest.raises(gg.ParamError, match="swiglu_oai: the limit must not be negative"):
        gg.swiglu_oai(a, a, 1.0, -1.0)
