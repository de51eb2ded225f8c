"""flash_attn_paged: attention of several texts over one cache, whose rows lie in pages (Kwon et al. 2023, vLLM).

    key j of query i        row 64 pages[j // 64, i] + j % 64 of k and v
    pages    | 3 | 0 | 7 |  one table for all queries, of one text, or one for each
    mask     by key, as in flash_attn_ext: as wide as the longest text, however many rows the cache has

Kernels are those of flash_attn_ext.  Where every query has its own table, each is computed by itself: its bits are
those that it has alone, wherever its pages lie.
"""
import numpy as np

from ggjit.ops.attention import flash_attn
from ggjit.ops.attention.flash_attn_tiles import BK
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import own_op
from ggjit.ops.core.shape import is_contiguous, require, require_type
from ggjit.ops.core.spec import Case, Spec
from ggjit.ops.core.types import F16, F32, I32, Q8_0, Tensor

FLASH_ATTN_PAGED = own_op("FLASH_ATTN_PAGED")
PAGE = BK                               # rows of a page


def flash_attn_paged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, pages: Tensor,
                     scale: float = 1.0, logit_softcap: float = 0.0):
    """Attention over a cache in pages of 64 rows: softmax(scale q k^T + mask) v; F32 [Dv, n_head, n_batch].

    Shapes (ggml order; NumPy's is reversed):
        q      [D,  n_batch, n_head]       F32 or F16
        k, v   [D,  n_rows,  n_head_kv]    as flash_attn_ext; n_rows a multiple of 64
        mask   [64 n_pages, n_batch]       F16, contiguous; by key, -inf hides it
        sinks  [n_head] F32, or None
        pages  [n_pages, 1 or n_batch]     I32: key j of query i is row 64 pages[j // 64, i] + j % 64; entries of hidden
                                           keys name any page, 0 say
    scale, max_bias and logit_softcap as flash_attn_ext's.
    Errors: ShapeError, TypeMismatch, ParamError; IndexRangeError, when it is computed, for a page that k does not have.
    Source: none, ggml has no such op; of caches without pages it is ggml_flash_attn_ext.
    """
    flash_attn._check_types(q, k, v)
    require(q.ne[0] == k.ne[0] > 0, "flash_attn_paged: q and k must have rows of one length", q, k)
    require(k.ne[1] == v.ne[1] and k.ne[1] % PAGE == 0,
            "flash_attn_paged: k and v must have the same rows, a multiple of 64", k, v)
    require(q.ne[3] == k.ne[3] == v.ne[3] == 1, "flash_attn_paged: dim 3 of q, k and v must be 1", q, k, v)
    for name, x in (("k", k), ("v", v)):
        require(x.ne[2] > 0 and q.ne[2] % x.ne[2] == 0, f"flash_attn_paged: heads of q must be a multiple of {name}'s",
                q, x)
    require_type("flash_attn_paged", mask, (F16,), "mask")
    require_type("flash_attn_paged", pages, (I32,), "pages")
    require(is_contiguous(mask) and mask.ne == (PAGE * pages.ne[0], q.ne[1], 1, 1),
            "flash_attn_paged: the mask must be [64 n_pages, n_batch], contiguous", mask, pages, q)
    require(is_contiguous(pages) and pages.ne[1] in (1, q.ne[1]) and pages.ne[2:] == (1, 1),
            "flash_attn_paged: pages must be [n_pages, 1 or n_batch], contiguous", pages, q)
    if sinks is not None:
        require_type("flash_attn_paged", sinks, (F32,), "sinks")
        require(tuple(sinks.ne) == (q.ne[2], 1, 1, 1) and is_contiguous(sinks),
                "flash_attn_paged: sinks must hold one value per query head", q, sinks)
    for name, value in (("scale", scale), ("logit_softcap", logit_softcap)):
        if not np.isfinite(value):
            raise ParamError(f"flash_attn_paged: {name} must be a finite number, got {value!r}")
    return q.ctx.node(FLASH_ATTN_PAGED, F32, (v.ne[0], q.ne[2], q.ne[1], 1), (q, k, v, mask, sinks, pages),
                      (float(scale), 0.0, float(logit_softcap), flash_attn.PREC_DEFAULT), ndim=max(3, q.ndim))


def reference(t, q, k, v, mask, sinks=None, pages=None):
    """flash_attn_ext of every query with its rows brought together."""
    n_batch, (table,) = q.shape[2], pages.reshape(1, -1, pages.shape[-1]).astype(np.int64)
    out = []
    for i in range(n_batch):
        rows = (PAGE * table[i % len(table)][:, None] + np.arange(PAGE)).ravel()
        out.append(flash_attn.reference(t, q[:, :, i:i + 1], k[:, :, rows], v[:, :, rows], mask[:, :, i:i + 1], sinks))
    return np.concatenate(out, axis=1) if out else np.zeros((1, 0, q.shape[1], v.shape[-1]))


def kernel(t, n_threads):
    return flash_attn.kernel(t, n_threads, paged=True)


def cases():
    def make(n, lengths, kt=F16, d=64, heads=2, rep=3, n_rows=640, sinks=False, cap=0.0):
        """lengths: of one text, or of the text of each query."""
        def build(inp):
            width = -(-max(lengths) // PAGE)
            q = inp.new(F32, (d, n, heads * rep), lo=-4.0, hi=4.0)
            k, v = (inp.new(kt, (d, n_rows, heads)) for _ in range(2))
            each = lengths if len(lengths) > 1 else [lengths[0] - n + 1 + i for i in range(n)]
            mask = np.where(np.arange(width * PAGE) < np.array(each)[:, None], inp.rng.uniform(-1, 1), -np.inf)
            table = np.stack([inp.rng.permutation(n_rows // PAGE)[:width] for _ in lengths]).astype(np.int32)
            return flash_attn_paged(q, k, v, inp.new(F16, (width * PAGE, n), mask.astype(np.float16)),
                                    inp.new(F32, (heads * rep,), lo=-3.0, hi=3.0) if sinks else None,
                                    inp.new(I32, (width, len(lengths)), table), 0.125, cap)
        return build
    for name, args in (("one query", dict(n=1, lengths=[130])), ("a prompt", dict(n=40, lengths=[90])),
                       ("a short prompt", dict(n=3, lengths=[66], rep=1)),
                       ("texts", dict(n=5, lengths=[1, 64, 65, 600, 300], sinks=True, cap=5.0)),
                       ("texts Q8_0", dict(n=2, lengths=[129, 7], kt=Q8_0)),
                       ("texts F32", dict(n=3, lengths=[10, 70, 200], kt=F32, d=40, rep=1))):
        yield Case(name, make(**args), max_nmse=1e-11)


def _flops(t):
    q, _, v, mask = t.src[:4]
    return 2 * q.ne[1] * q.ne[2] * (q.ne[0] + v.ne[0]) * mask.ne[0]


SPECS = (Spec(op=FLASH_ATTN_PAGED, builders=(flash_attn_paged,), reference=reference, kernel=kernel, cases=cases,
              indexed=1, rebuild=lambda n: n.call("flash_attn_paged", *n.up_to(6), n.f[0], n.f[2]), flops=_flops),)
