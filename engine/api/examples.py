"""An example for every op builder, in two lines: the leaves, then the call with the same formula in NumPy.

`with_example` puts it at the end of the builder's docstring, where `help(gg.soft_max)`, editors and docs/ops.md show it;
a test runs all of them.  An in-place builder has the example of its twin.

    = a = gg.tensor(...)            the first line of the examples below
    op(arguments) | NumPy           the second line, in short
"""
import inspect

# ruff: noqa: E501
_TEXT = r"""
= a = gg.tensor([[1.0, -2.0, 3.0, 0.5]])
abs(a) | np.abs(a)
neg(a) | -a
sgn(a) | np.sign(a)
step(a) | (a > 0) * 1.0
tanh(a) | np.tanh(a)
elu(a) | np.where(a > 0, a, np.expm1(a))
relu(a) | np.maximum(a, 0)
sigmoid(a) | 1 / (1 + np.exp(-a))
gelu(a) | a / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
gelu_quick(a) | a / (1 + np.exp(-1.702 * a))
gelu_erf(a) | a / 2 * (1 + erf(a / np.sqrt(2)))
silu(a) | a / (1 + np.exp(-a))
hardswish(a) | a * np.clip((a + 3) / 6, 0, 1)
hardsigmoid(a) | np.clip((a + 3) / 6, 0, 1)
exp(a) | np.exp(a)
expm1(a) | np.expm1(a)
softplus(a) | np.log1p(np.exp(a))
floor(a) | np.floor(a)
ceil(a) | np.ceil(a)
round(a) | np.trunc(a + np.copysign(0.5, a))
trunc(a) | np.trunc(a)
sqr(a) | a * a
sin(a) | np.sin(a)
cos(a) | np.cos(a)
unary(a, 6) | np.maximum(a, 0): 6 is UNARY.RELU
xielu(a, 0.8, 0.8, 0.5, -1e-6) | two branches by the sign of a
leaky_relu(a, 0.1) | np.where(a > 0, a, 0.1 * a)
clamp(a, -1.0, 1.0) | np.clip(a, -1, 1)
scale(a, 2.0) | 2 * a
scale_bias(a, 2.0, 1.0) | 2 * a + 1
fill(a, 7.0) | np.full_like(a, 7)
dup(a) | a.copy()
cont(a) | np.ascontiguousarray(a)
cont_1d(a, 4) | a.reshape(4)
cont_2d(a, 2, 2) | a.reshape(2, 2): sizes are in ggml's order
cont_3d(a, 2, 1, 2) | a.reshape(2, 1, 2)
cont_4d(a, 2, 1, 1, 2) | a.reshape(2, 1, 1, 2)
cast(a, "F16") | a.astype(np.float16)
sum(a) | a.sum()
sum_rows(a) | a.sum(-1, keepdims=True)
mean(a) | a.mean(-1, keepdims=True)
cumsum(a) | np.cumsum(a, -1)
argmax(a) | a.argmax(-1)
argsort(a, 0) | np.argsort(a, -1)
argsort_top_k(a, 2) | np.argsort(-a, -1)[:, :2]
top_k(a, 2) | np.argsort(-a, -1)[:, :2], in any order
norm(a, 1e-5) | (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-5)
rms_norm(a, 1e-5) | a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5)
l2_norm(a, 1e-5) | a / np.maximum(np.sqrt((a * a).sum(-1, keepdims=True)), 1e-5)
soft_max(a) | e / e.sum(-1, keepdims=True), e = np.exp(a - a.max(-1, keepdims=True))
soft_max_ext(a, None, 0.5, 0.0) | the same of 0.5 * a
reshape_1d(a, 4) | a.reshape(4)
reshape_2d(a, 2, 2) | a.reshape(2, 2): sizes are in ggml's order
reshape_3d(a, 2, 1, 2) | a.reshape(2, 1, 2)
reshape_4d(a, 2, 1, 1, 2) | a.reshape(2, 1, 1, 2)
view_1d(a, 2, 4) | a.reshape(-1)[1:3]: 4 is a number of bytes
view_2d(a, 2, 2, 8, 0) | a.reshape(2, 2)
view_3d(a, 2, 1, 2, 8, 8, 0) | a.reshape(2, 1, 2)
view_4d(a, 2, 1, 1, 2, 8, 8, 8, 0) | a.reshape(2, 1, 1, 2)
view_tensor(a) | a[...]
transpose(a) | a.swapaxes(-1, -2)
permute(a, 1, 0, 2, 3) | a.swapaxes(-1, -2): dimension i goes to place axis<i>
repeat_4d(a, 8, 2, 1, 1) | np.tile(a, (2, 2))
pad(a, 1, 0, 0, 0) | np.pad(a, ((0, 0), (0, 1)))
pad_circular(a, 1, 0, 0, 0) | np.pad(a, ((0, 0), (0, 1)), mode="wrap")
pad_ext(a, 1, 2, 0, 0, 0, 0, 0, 0) | np.pad(a, ((0, 0), (1, 2)))
pad_ext_circular(a, 1, 2, 0, 0, 0, 0, 0, 0) | np.pad(a, ((0, 0), (1, 2)), mode="wrap")
pad_reflect_1d(a, 1, 2) | np.pad(a, ((0, 0), (1, 2)), mode="reflect")
roll(a, 1, 0, 0, 0) | np.roll(a, 1, -1)
upscale(a, 2, 0) | a.repeat(2, -1).repeat(2, -2)
upscale_ext(a, 8, 1, 1, 1, 0) | a.repeat(2, -1)
interpolate(a, 8, 1, 1, 1, 0) | a.repeat(2, -1)
pool_1d(a, 0, 2, 2, 0) | a.reshape(1, 2, 2).max(-1)
glu(a, 2) | silu(a[:, :2]) * a[:, 2:]: 2 is GLU.SWIGLU
reglu(a) | relu(a[:, :2]) * a[:, 2:]
geglu(a) | gelu(a[:, :2]) * a[:, 2:]
swiglu(a) | silu(a[:, :2]) * a[:, 2:]
geglu_erf(a) | gelu_erf(a[:, :2]) * a[:, 2:]
geglu_quick(a) | gelu_quick(a[:, :2]) * a[:, 2:]
reglu_swapped(a) | relu(a[:, 2:]) * a[:, :2]
geglu_swapped(a) | gelu(a[:, 2:]) * a[:, :2]
swiglu_swapped(a) | silu(a[:, 2:]) * a[:, :2]
geglu_erf_swapped(a) | gelu_erf(a[:, 2:]) * a[:, :2]
geglu_quick_swapped(a) | gelu_quick(a[:, 2:]) * a[:, :2]
timestep_embedding(a[0], 8, 10000) | np.concatenate([np.cos(a.T * f), np.sin(a.T * f)], -1)

= a = gg.tensor([[1.0, 2.0, 4.0]])
log(a) | np.log(a)
sqrt(a) | np.sqrt(a)

= a, b = gg.tensor([[1.0, 2.0], [3.0, 4.0]]), gg.tensor([[0.5, -1.0]])
add(a, b) | a + b
sub(a, b) | a - b
mul(a, b) | a * b
div(a, b) | a / b
concat(a, b, 1) | np.concatenate([a, b], -2): dimension 1 is the last but one
repeat(b, a) | np.tile(b, (2, 1))
repeat_back(a, b) | a.sum(0, keepdims=True)
mul_mat(a, b) | b @ a.T
acc(a, b, 8, 8, 8, 0) | c = a.copy(); c[:1] += b
set(a, b, 8, 8, 8, 0) | c = a.copy(); c[:1] = b
set_1d(a, b[0], 8) | c = a.copy(); c.reshape(-1)[2:4] = b[0]: 8 is a number of bytes
set_2d(a, b, 8, 8) | c = a.copy(); c[1:] = b
solve_tri(a, gg.transpose(b), True, True, False) | np.linalg.solve(np.tril(a), b.T)

= a, b = gg.tensor([[1.0, 2.0], [3.0, 4.0]]), gg.tensor([[0.5, -1.0], [2.0, 0.0]])
reglu_split(a, b) | relu(a) * b
geglu_split(a, b) | gelu(a) * b
swiglu_split(a, b) | silu(a) * b
geglu_erf_split(a, b) | gelu_erf(a) * b
geglu_quick_split(a, b) | gelu_quick(a) * b
glu_split(a, b, 2) | silu(a) * b: 2 is GLU.SWIGLU
swiglu_oai(a, b, 1.702, 7.0) | x / (1 + np.exp(-1.702 * x)) * (np.clip(b, -7, 7) + 1), x = np.minimum(a, 7)
swiglu_clamp(a, b, 7.0) | silu(np.minimum(a, 7)) * np.clip(b, -7, 7)
cpy(a, b) | b[...] = a
reshape(a, b) | a.reshape(b.shape)
out_prod(a, b) | b.T @ a
silu_back(a, b) | a * s * (1 + b * (1 - s)), s = 1 / (1 + np.exp(-b))
rms_norm_back(a, b, 1e-5) | the gradient for b of rms_norm(b), where that of the result is a
soft_max_ext_back(a, b, 1.0, 0.0) | (a - (a * b).sum(-1, keepdims=True)) * b
cross_entropy_loss(a, b) | -(b * log_softmax(a)).sum() / len(a)
cross_entropy_loss_back(gg.tensor([1.0]), a, b) | (softmax(a) - b) / len(a)
diag_mask_inf(a, 0) | np.where(np.tri(2) > 0, a, -np.inf)
diag_mask_zero(a, 0) | np.tril(a)
tri(a, 3) | np.tril(a, -1)
mul_mat_set_prec(gg.mul_mat(a, b), 10) | b @ a.T
mul_mat_set_hint(gg.mul_mat(a, b), 0) | b @ a.T

= a, b = gg.tensor([[1.0, 2.0], [3.0, 4.0]]), gg.tensor([0.5])
add1(a, b) | a + b
diag(a[:1]) | np.diag(a[0])

= a, ids = gg.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), gg.tensor([2, 0])
get_rows(a, ids) | a[ids]
set_rows(a, gg.tensor([[7.0, 8.0], [9.0, 9.5]]), ids) | a[ids] = [[7, 8], [9, 9.5]]
get_rows_back(gg.tensor([[7.0, 8.0], [9.0, 9.5]]), ids, a) | np.add.at(np.zeros_like(a), ids, [[7, 8], [9, 9.5]])
count_equal(ids, gg.tensor([2, 1])) | (ids == [2, 1]).sum()

= ctx = gg.Context()
arange(ctx, 0.0, 3.0, 0.5) | np.arange(0, 3, 0.5)

= x, half = gg.tensor([[1.0, 2.0], [3.0, 4.0]]), lambda dst, *a: np.divide(a[0], 2, out=dst)
map_custom1(x, half, 1) | x / 2
map_custom2(x, x, half, 1) | x / 2
map_custom3(x, x, x, half, 1) | x / 2
custom("F32", (2, 2), [x], half, 1) | x / 2
custom_4d("F32", 2, 2, 1, 1, [x], lambda dst, a, ith, nth: dst.reshape(-1).fill(1), 1) | np.ones((1, 1, 2, 2))
custom_inplace(x, [], lambda dst, a, ith, nth: dst.fill(1), 1) | x.fill(1)

= a = gg.tensor([[[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]])
group_norm(a, 2, 1e-5) | (a - m) / np.sqrt(v + 1e-5), mean m and variance v of each of the 2 groups of channels
pool_2d(a, 0, 2, 2, 2, 2, 0.0, 0.0) | a.max((-1, -2), keepdims=True)
win_part(gg.reshape_3d(a, 2, 2, 2), 2) | one window of 2 x 2

= a, b = gg.tensor([[[[1.0, 0.0], [0.0, -1.0]]]], type="F16"), gg.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]]])
conv_2d(a, b, 1, 1, 0, 0, 1, 1) | b[..., :2, :2] - b[..., 1:, 1:]
conv_2d_sk_p0(a, b) | the same for patches side by side
conv_2d_s1_ph(a, b) | the same with half padding
conv_2d_direct(a, b, 1, 1, 0, 0, 1, 1) | as conv_2d, without patches in memory
conv_2d_dw(a, b, 1, 1, 0, 0, 1, 1) | as conv_2d, each channel by itself
conv_2d_dw_direct(a, b, 1, 1, 0, 0, 1, 1) | as conv_2d, each channel by itself
im2col(a, b, 1, 1, 0, 0, 1, 1, True, "F32") | np.lib.stride_tricks.sliding_window_view(b, (2, 2), (-2, -1))
conv_transpose_2d_p0(a, b, 1) | each element of b spread by the kernel a

= a, b = gg.tensor([[[1.0, -1.0]]], type="F16"), gg.tensor([[1.0, 2.0, 4.0, 8.0]])
conv_1d(a, b, 1, 0, 1) | b[:, :-1] - b[:, 1:]
conv_1d_ph(a, b, 1, 1) | the same of b with a zero on both sides
conv_1d_dw(a, b, 1, 0, 1) | the same, each channel by itself
conv_1d_dw_ph(a, b, 1, 1) | the same of b with a zero on both sides
conv_transpose_1d(a, b, 1, 0, 1) | np.convolve(b[0], [1, -1])

= a, b = gg.tensor([[1.0, 2.0]], type="F16"), gg.tensor([[0.5, -1.0]])
add_cast(a, b, "F32") | a.astype(np.float32) + b

= one = lambda *shape: gg.tensor(np.ones(shape, np.float32))
rope(one(3, 2, 4), gg.tensor([0, 1, 2]), 4, 0) | pairs of each head turned by position * 10000**(-2 i / 4)
rope_ext(one(3, 2, 4), gg.tensor([0, 1, 2]), None, 4, 2, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0) | element i turned with i + 2
rope_ext_back(one(3, 2, 4), gg.tensor([0, 1, 2]), None, 4, 2, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0) | turned back
rope_multi(one(3, 2, 8), gg.tensor([0, 1, 2] * 4), None, 8, (1, 1, 1, 1), 8, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0) | rope_ext, four positions a token
rope_multi_back(one(3, 2, 8), gg.tensor([0, 1, 2] * 4), None, 8, (1, 1, 1, 1), 8, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0) | turned back
rope_set_offset(gg.rope(one(3, 2, 8), gg.tensor([0, 1, 2]), 4, 0), 2) | elements 2 to 5 of each head turned
flash_attn_ext(one(2, 3, 64), one(2, 256, 64), one(2, 256, 64), None, 0.125) | softmax(0.125 * q @ k.swapaxes(1, 2)) @ v
flash_attn_ext_set_prec(gg.flash_attn_ext(one(2, 3, 64), one(2, 256, 64), one(2, 256, 64)), 10) | the same attention
flash_attn_ext_add_sinks(gg.flash_attn_ext(one(2, 3, 64), one(2, 256, 64), one(2, 256, 64)), one(2)) | one more score a head
flash_attn_paged(one(2, 3, 64), one(2, 128, 64), one(2, 128, 64), gg.tensor(np.zeros((3, 64)), type="F16"), None, gg.tensor([[1]]), 0.125) | rows 64 to 127 are the keys
soft_max_add_sinks(gg.soft_max_ext(one(2, 3, 4), None, 1.0, 0.0), one(2)) | one more score a head, that is left out
mul_mat_id(one(3, 4, 8), one(2, 1, 8), gg.tensor([[0, 2], [1, 0]])) | np.einsum("tumk,tuk->tum", as_[ids], b)
add_id(one(2, 2, 4), one(3, 4), gg.tensor([[0, 2], [1, 0]])) | a + b[ids]
conv_3d(one(1, 2, 2, 2), one(1, 3, 3, 3), 1, 1, 1, 1, 0, 0, 0, 1, 1, 1) | sums of windows of 2 x 2 x 2
conv_3d_direct(one(1, 2, 2, 2), one(1, 3, 3, 3), 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1) | sums of windows of 2 x 2 x 2
im2col_3d(one(1, 2, 2, 2), one(1, 3, 3, 3), 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, "F32") | windows of 2 x 2 x 2 as rows
im2col_back(one(1, 2, 2, 4), one(1, 1, 2, 2), (3, 3, 1, 1), 1, 1, 0, 0, 1, 1, True) | windows added up where they came from
col2im_1d(one(3, 4), 1, 2, 0) | rows added up, one step on each
pool_2d_back(one(1, 1, 1, 1), one(1, 1, 2, 2), 1, 2, 2, 2, 2, 0.0, 0.0) | each mean spread over its window
win_unpart(one(1, 2, 2, 3), 2, 2, 2) | windows put together again
ssm_conv(one(1, 4, 6), one(4, 3)) | x[t:t + 3] times c, summed, for every t
opt_step_sgd(gg.set_param(one(2, 3)), one(2, 3), gg.tensor([0.1, 0.0])) | a -= 0.1 * grad
opt_step_adamw(gg.set_param(one(2, 3)), one(2, 3), one(2, 3), one(2, 3), gg.tensor([0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 1.0])) | one step of AdamW
dsv4_hc_pre(one(2, 4, 8), one(2, 4)) | (x * weights[..., None]).sum(1)
dsv4_hc_pre_gated(one(2, 4, 8), one(2, 4, 8), 0.5) | (x / (1 + np.exp(-gate))).sum(1) * scale
dsv4_hc_post(one(2, 8), one(2, 4, 8), one(2, 4)) | x[:, None] * post[..., None] + residual
dsv4_hc_comb(one(2, 24), one(3), one(24), 1e-6, 4) | 4 x 4 matrices whose rows and columns sum to 1
get_rel_pos(gg.tensor(np.ones((3, 4)), type="F16"), 2, 2) | a[i - j + 1] for i, j < 2
add_rel_pos(one(1, 4, 4), one(1, 2, 2, 2), one(1, 2, 2, 2)) | pw along rows and ph along columns added
rwkv_wkv6(one(3, 2, 4), one(3, 2, 4), one(3, 2, 4), one(2, 4), one(3, 2, 4), one(1, 32)) | out, then the state
rwkv_wkv7(one(3, 2, 4), one(3, 2, 4), one(3, 2, 4), one(3, 2, 4), one(3, 2, 4), one(3, 2, 4), one(1, 32)) | out, then the state
gated_linear_attn(one(3, 2, 4), one(3, 2, 4), one(3, 2, 4), one(3, 2, 4), one(1, 32), 0.5) | out, then the state
gated_delta_net(one(1, 3, 2, 4), one(1, 3, 2, 4), one(1, 3, 2, 4), one(1, 3, 2, 1), one(1, 3, 2, 1), one(1, 2, 4, 4)) | out, then the state
ssm_scan(one(1, 2, 4, 8), one(1, 3, 2, 4), one(1, 3, 2), one(2, 1), one(1, 3, 1, 8), one(1, 3, 1, 8), gg.tensor([0])) | y, then the state
lightning_indexer(one(1, 3, 2, 64), gg.tensor(np.ones((1, 5, 1, 64)), type="F16"), one(1, 1, 3, 2), gg.tensor(np.zeros((1, 1, 3, 5)), type="F16")) | scores of 5 keys for 3 tokens
"""
LINE = 100                      # columns up to which the NumPy expression stands beside the call


def _parsed():
    """{builder's name: (first line, call, NumPy)}"""
    found, first = {}, ""
    for line in _TEXT.splitlines():
        if line.startswith("= "):
            first = line[2:]
        elif line:
            call, _, numpy = line.rpartition(" | ")
            found[call.partition("(")[0]] = (first, call, numpy)
    return found


EXAMPLES = _parsed()
# builders that always raise: what to write instead, in two lines, and what that is
INSTEAD = {"flash_attn_back": (
    """q, k, v = (gg.set_param(gg.tensor(np.ones((4, 4)), type="F32")) for _ in "qkv")
gg.compute(*gg.grad(gg.sum(gg.mul_mat(v, gg.soft_max_ext(gg.mul_mat(k, q), None, 0.5, 0.0))), [q, k, v]))""",
    "gradients of softmax(q @ k.T / 2) @ v.T: flash_attn_back itself raises")}


def example(name):
    """(code of two lines, what it is in NumPy) of a builder, or None."""
    if name in INSTEAD:
        return INSTEAD[name]
    base = name if name in EXAMPLES else name.removesuffix("_inplace")
    if base not in EXAMPLES:
        return None
    first, call, numpy = EXAMPLES[base]
    return f"{first}\ngg.compute(gg.{name}({call.partition('(')[2]})", numpy


def with_example(builder):
    """The builder, with its example at the end of its docstring."""
    found = example(builder.__name__)
    if found is not None and builder.__doc__:           # python -OO removes docstrings
        code, numpy = found
        first, call = code.splitlines()
        beside = f"{call:<46}  # NumPy: {numpy}"
        call = beside if len(beside) <= LINE else f"{call}\n    # NumPy: {numpy}"
        builder.__doc__ = f"{inspect.cleandoc(builder.__doc__)}\n\nExample:\n\n    {first}\n    {call}\n"
    return builder
