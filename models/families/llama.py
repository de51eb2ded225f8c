"""LLaMA, and models that differ from it in one thing: Mistral and Mixtral (architecture llama), Granite, SmolLM3, Qwen
2, BitNet, Nanbeige, HRM Text, and Deci (Nemotron).

    x += Wo attention(rope(Wq n), rope(Wk n), Wv n),  n = rms_norm(x) * g
    x += Wdown (silu(Wgate m) * Wup m),               m = rms_norm(x) * h
"""
import dataclasses

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.cycles import StackEnd, TwoStacks
from ggjit.models.blocks.description import Block, Description, LoopNorm
from ggjit.models.blocks.feed_forward import Dense, Projection
from ggjit.models.blocks.hparams import MAX_LAYERS, ROPE_KINDS, ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.moe import is_mixture, mixture


def dense_or_experts(hparams, **switches):
    """The feed-forward of Mixtral: experts of the width of the dense one, where the file has them."""
    return mixture(hparams, hparams.n_ff, **switches) if is_mixture(hparams) else Dense(hparams.n_ff)


def llama(hparams, mode=ROPE_NORMAL, **switches):
    sizes = hparams.heads()
    rope = hparams.rope(mode, sizes["d_head"], kinds=ROPE_KINDS)
    block = Block(Attention(**sizes, rope=rope, **switches), dense_or_experts(hparams))
    return Description([block] * hparams.n_layer, hparams.eps())


def qwen2(hparams):
    return llama(hparams, ROPE_NEOX)


def granite(hparams):
    """LLaMA with scales: of the embeddings, the scores, what a layer adds, and the logits."""
    sizes, shared = hparams.heads(), hparams.get("expert_shared_feed_forward_length", 0, int)
    rope = hparams.rope(ROPE_NORMAL, sizes["d_head"], kinds=ROPE_KINDS)
    rope = rope if hparams.get("rope.scaling.finetuned", True, bool) else None
    feed_forward = dense_or_experts(hparams, **granite_shared(shared))
    block = Block(Attention(**sizes, rope=rope, scale=hparams.scale("attention.scale")), feed_forward,
                  residual_scale=hparams.scale("residual_scale"))
    return Description([block] * hparams.n_layer, hparams.eps(), embd_scale=hparams.scale("embedding_scale"),
                       logit_scale=1.0 / hparams.between("logit_scale", 1e-6, 1e6))


def granite_shared(n_ff):
    return {"shared": Dense(n_ff, suffix="_shexp", bias=False)} if n_ff else {}


def smollm3(hparams):
    """Every fourth layer has no RoPE."""
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NORMAL, sizes["d_head"], factors="")
    feed_forward = Dense(hparams.n_ff, bias=False)
    blocks = [Block(Attention(**sizes, rope=None if i % 4 == 3 else rope), feed_forward)
              for i in range(hparams.n_layer)]
    return Description(blocks, hparams.eps())


def bitnet(hparams):
    """Norms inside attention and feed-forward, before their last matrix."""
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), sub_norm=True,
                          scaled=True)
    block = Block(attention, Dense(hparams.n_ff, sub_norm=True, scaled=True))
    return Description([block] * hparams.n_layer, hparams.eps(), tied=True)


def deci(hparams):
    """Layers of different sizes; some have a matrix instead of attention, no attention, or nothing at all."""
    heads, blocks = hparams.heads_per_layer(may_lack=True), []
    n_heads, n_ffs = hparams.per_layer("attention.head_count"), hparams.per_layer("feed_forward_length")
    rope = hparams.rope(ROPE_NORMAL, hparams.positive("attention.key_length", hparams.n_embd // max(*n_heads, 1)),
                        kinds=ROPE_KINDS)
    for i, (sizes, n_head, n_ff) in enumerate(zip(heads, n_heads, n_ffs, strict=True)):
        mixer = Attention(**sizes, rope=rope) if sizes else Projection() if n_head else None
        if mixer and not n_ff:
            raise hparams.wrong("feed_forward_length", 0, f"a positive number at layer {i}, which has attention")
        blocks.append(Block(mixer, Dense(n_ff) if n_ff else None))
    return Description(blocks, hparams.eps())


def nanbeige(hparams):
    """LLaMA whose layers are run several times one after the other, with the last norm in between."""
    sizes, n = hparams.heads(), hparams.n_layer
    n_times = hparams.positive("num_loops", 1)
    if n * n_times > MAX_LAYERS:
        raise hparams.wrong("num_loops", n_times, f"at most {MAX_LAYERS // n}")
    block = Block(Attention(**sizes, rope=hparams.rope(ROPE_NORMAL, sizes["d_head"]), out_bias=False),
                  Dense(hparams.n_ff, bias=False))
    last = block if hparams.get("skip_loop_final_norm", False,
                                bool) else dataclasses.replace(block, output_transform=LoopNorm())
    blocks = ([block] * (n - 1) + [last]) * (n_times - 1) + [block] * n
    return Description(blocks, hparams.eps(), stored=tuple(range(n)) * n_times)


def hrm_text(hparams):
    """Two stacks of layers without weights in their norms, each passed several times: blocks/cycles.py."""
    sizes = hparams.heads()
    n, n_high, n_low = (hparams.positive(f"hrm.{name}") for name in ("layers_per_stack", "h_cycles", "l_cycles"))
    hparams.ignore("hrm.prefix_lm")                 # a prompt is read as other text is, as llama.cpp does
    if n * n_high * (n_low + 1) != hparams.n_layer:
        raise hparams.wrong("block_count", hparams.n_layer, f"{n} layers in {n_high} times {n_low} + 1 passes")
    block = Block(Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), gate="sigmoid",
                            out_bias=False), Dense(hparams.n_ff, bias=False), norm="rms bare")
    low, high = ([block] * (n - 1) + [dataclasses.replace(block, output_transform=StackEnd(is_low))]
                 for is_low in (True, False))
    blocks = [*((low * n_low + high) * n_high)[:-1], block]         # the last norm follows them
    numbers = [*range(n)] * n_low + [*range(n, 2 * n)]
    return Description(blocks, hparams.eps(), norm="rms bare", embd_scale=hparams.scale("embedding_scale"),
                       stored=tuple(numbers) * n_high, frame=TwoStacks())


DECODERS = {"llama": llama, "qwen2": qwen2, "granite": granite, "granitemoe": granite, "smollm3": smollm3,
            "bitnet": bitnet, "deci": deci, "nanbeige": nanbeige, "hrm_text": hrm_text}
