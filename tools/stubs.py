"""Writes engine/all_ops.pyi: the signatures of all ops and tensor types, for type checkers and editors.

    python -m ggjit.tools.stubs           after an op was added or its arguments changed; a test compares

Builders reach `ggjit` by discovery (ops/core/spec.py), which no type checker can follow.  Types of arguments are known
by their names, which are ggml's; `_OF` holds the few names that mean different things in different ops.
"""
import inspect
import pathlib
import re

import ggjit
from ggjit.ops.core.spec import builders
from ggjit.ops.core.types import BY_NAME, Type
from ggjit.ops.core.whole_file import write_whole

_INT = set("""ne0 ne1 ne2 ne3 nb1 nb2 nb3 offset axis0 axis1 axis2 axis3 n_dims n_ctx_orig n_offs n_past n_groups n_iter
    n_tasks n_channels n_batch n_channels_out dim s d s0 s1 s2 p0 p1 p2 p3 d0 d1 d2 k0 k1 lp0 lp1 lp2 lp3 rp0 rp1 rp2
    rp3 stride scale_factor mode w0 h0 qh kh K IC oc shift0 shift1 shift2 shift3 op order prec hint
    max_period""".split())
_FLOAT = set("""eps max_bias logit_softcap min max alpha limit alpha_n alpha_p beta freq_base freq_scale ext_factor
    attn_factor beta_fast beta_slow negative_slope start stop step scale""".split())
_BOOL = set("masked is_2D swapped inplace left lower uni part".split())
_OTHER = {"type": "Type | str", "dst_type": "Type | str | None", "ctx": "Context", "ne": "Sequence[int]",
          "args": "Sequence[Tensor]", "sections": "Sequence[int]", "fun": "Callable[..., Any]", "userdata": "Any",
          "n_rows": "int | None"}
_OF = {("scale", "s"): "float", ("scale_inplace", "s"): "float", ("scale_bias", "s"): "float",
       ("scale_bias", "b"): "float", ("scale_bias_inplace", "s"): "float", ("scale_bias_inplace", "b"): "float",
       ("fill", "c"): "float", ("fill_inplace", "c"): "float", ("top_k", "k"): "int", ("argsort_top_k", "k"): "int",
       ("tri", "type"): "int", ("win_part", "w"): "int", ("win_unpart", "w"): "int", ("flash_attn_back", "d"): "Tensor",
       ("dsv4_hc_comb", "scale"): "Tensor", ("gated_delta_net", "beta"): "Tensor", ("ssm_scan", "s"): "Tensor",
       ("dsv4_hc_pre_gated", "scale"): "Tensor", ("im2col_back", "ne"): "Sequence[int]"}
_HEAD = '''"""Every op and tensor type of ggjit.  Written by `python -m ggjit.tools.stubs`; see there."""
from collections.abc import Callable, Sequence
from typing import Any

from ggjit import Context, Tensor, Type

'''


def annotation(function, name, default):
    """The type of one argument, as text."""
    if (function, name) in _OF:
        return _OF[function, name]
    for names, kind in ((_INT, "int"), (_FLOAT, "float"), (_BOOL, "bool")):
        if name in names:
            return kind
    return _OTHER.get(name) or ("Tensor | None" if default is None or name == "mask" else "Tensor")


def _argument(function, p):
    text = f"{p.name}: {annotation(function, p.name, p.default)}"
    if p.default is inspect.Parameter.empty:
        return text
    return f"{text} = {'...' if isinstance(p.default, Type) else repr(p.default)}"


def text():
    """The whole stub."""
    lines = [_HEAD]
    for name, f in sorted(builders().items()):
        arguments = ", ".join(_argument(name, p) for p in inspect.signature(f).parameters.values())
        first = f"def {name}({arguments}) -> Tensor: ..."
        lines.append(first + "\n")
    lines.append("\n")
    lines += [f"{t!r}: Type\n" for t in sorted(BY_NAME.values(), key=repr)]
    return re.sub(r"(?m)^(.{120}).*$", _wrapped, "".join(lines))


def _wrapped(match):
    """A long signature over several lines."""
    head, _, rest = match[0].partition("(")
    arguments, _, tail = rest.rpartition(")")
    out, line = [], "       "
    for a in re.split(r", (?=\w+: )", arguments):
        if len(line) + len(a) > 116:
            out.append(line)
            line = "       "
        line += f" {a},"
    return f"{head}(\n" + "\n".join([*out, line]) + f"\n){tail}"


if __name__ == "__main__":
    path = pathlib.Path(ggjit.__file__).with_name("all_ops.pyi")
    write_whole(path, text())
