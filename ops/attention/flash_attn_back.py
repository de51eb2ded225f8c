"""flash_attn_back: the gradient of ggml's attention before flash_attn_ext.  ggml does not compute it, and neither
does ggjit.

ggml's constructor aborts ("adapt to ggml_flash_attn_ext() changes"), so nothing can build this node: there is no
meaning to match.  The remedy is attention from ops that have gradients: mul_mat, soft_max_ext, mul_mat.
"""
from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Spec
from ggjit.ops.core.types import Tensor

REFUSAL = ("flash_attn_back: ggml's own constructor aborts, so the op has no defined result; to train, build the "
           "attention as mul_mat(v, soft_max_ext(mul_mat(k, q), mask, scale, max_bias)), whose ops have gradients")


def flash_attn_back(q: Tensor, k: Tensor, v: Tensor, d: Tensor, masked: bool):
    """Gradients of flash attention (d: that of its result, masked: causal) for q, k, v: not computed, as in ggml.

    ggml's builder aborts the process; this one raises.  Errors: NotSupported, always; the message names the remedy.
    Source: ggml_flash_attn_back.
    """
    raise NotSupported(REFUSAL)


def reference(t, *src):
    raise NotSupported(REFUSAL)


def kernel(t, n_threads):
    return None


def cases():
    return ()


SPECS = (Spec(op=OP.FLASH_ATTN_BACK, builders=(flash_attn_back,), reference=reference, kernel=kernel, cases=cases),)
