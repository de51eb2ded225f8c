"""Whisper in NumPy float64, and a small random one in whisper.cpp's file form."""
import math
import struct

import numpy as np

from ggjit.models.files.mel import mel_filters

N_VOCAB, EOT, SOT, BEGIN, NO_SPEECH = 51865, 50257, 50258, 50364, 50362
SIZES = dict(n_vocab=N_VOCAB, n_audio_ctx=64, n_audio_state=128, n_audio_head=2, n_audio_layer=2, n_text_ctx=96,
             n_text_state=128, n_text_head=2, n_text_layer=2, n_mels=80)


def random_tensors(seed=0, sizes=SIZES):
    """{OpenAI's name: float32 array} of values that F16 holds."""
    rng, d, out = np.random.default_rng(seed), sizes["n_text_state"], {}

    def draw(name, *shape, scale=None, mean=0.0):
        scale = 1.5 / math.sqrt(math.prod(shape[1:]) or 1) if scale is None else scale
        out[name] = (mean + scale * rng.standard_normal(shape)).astype(np.float16).astype(np.float32)

    def norm(name):
        draw(name + ".weight", d, scale=0.3, mean=1.0)
        draw(name + ".bias", d, scale=0.1)

    def linear(name, n_in, n_out, bias=True):
        draw(name + ".weight", n_out, n_in)
        if bias:
            draw(name + ".bias", n_out, scale=0.1)

    def blocks(side, n, attentions):
        for i in range(n):
            p = f"{side}.blocks.{i}"
            for a in attentions:
                norm(f"{p}.{a}_ln")
                for c in ("query", "key", "value", "out"):
                    linear(f"{p}.{a}.{c}", d, d, c != "key")
            norm(p + ".mlp_ln")
            linear(p + ".mlp.0", d, 4 * d)
            linear(p + ".mlp.2", 4 * d, d)
    for i, n_in in ((1, sizes["n_mels"]), (2, d)):
        draw(f"encoder.conv{i}.weight", d, n_in, 3)
        draw(f"encoder.conv{i}.bias", d, 1, scale=0.1)
    draw("encoder.positional_embedding", sizes["n_audio_ctx"], d, scale=0.5)
    draw("decoder.positional_embedding", sizes["n_text_ctx"], d, scale=0.5)
    draw("decoder.token_embedding.weight", sizes["n_vocab"], d, scale=0.3)
    blocks("encoder", sizes["n_audio_layer"], ("attn",))
    blocks("decoder", sizes["n_text_layer"], ("attn", "cross_attn"))
    norm("encoder.ln_post")
    norm("decoder.ln")
    return out


def token_bytes(n=EOT):
    """256 bytes, then words; the last one is empty, as in the real file."""
    words = [bytes([b]) for b in range(256)] + [f" w{i}".encode() for i in range(256, n - 1)] + [b""]
    if n > 303:
        words[300], words[301] = b" \xe2\x99", b"\xaa"      # halves of one character
        words[302], words[303] = b"ab", b" ab"
    return words


def write_bin(path, tensors, sizes=SIZES, matrices=np.float16, tokens=None):
    """whisper.cpp's file: matrices in that dtype, the rest F32."""
    tokens = token_bytes() if tokens is None else tokens
    filters = mel_filters(sizes["n_mels"])
    with open(path, "wb") as f:
        f.write(struct.pack("<12i", 0x67676D6C, *sizes.values(), 1) + struct.pack("<2i", *filters.shape))
        f.write(filters.tobytes() + struct.pack("<i", len(tokens)))
        for t in tokens:
            f.write(struct.pack("<i", len(t)) + t)
        for name, a in tensors.items():
            f32 = a.ndim < 2 or a.shape[-1] == 1 or name.endswith("positional_embedding") or matrices is np.float32
            f.write(struct.pack("<3i", a.ndim, len(name), 0 if f32 else 1))
            f.write(struct.pack(f"<{a.ndim}i", *a.shape[::-1]) + name.encode())
            f.write(a.astype("<f4" if f32 else "<f2").tobytes())
    return path


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


_ERF = np.vectorize(math.erf, otypes=[float])
GELUS = {"exact": lambda x: 0.5 * x * (1 + _ERF(x / math.sqrt(2))),
         "ggml": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))}


class Reference:
    def __init__(self, tensors, n_head, gelu="exact"):
        self.t, self.n_head, self.gelu = {k: v.astype(float) for k, v in tensors.items()}, n_head, GELUS[gelu]
        self.n_layers = {side: len({k.split(".")[2] for k in tensors if k.startswith(side + ".blocks")})
                         for side in ("encoder", "decoder")}

    def linear(self, x, name):
        return x @ self.t[name + ".weight"].T + self.t.get(name + ".bias", 0.0)

    def norm(self, x, name):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * self.t[name + ".weight"] \
            + self.t[name + ".bias"]

    def conv(self, x, name, stride):
        w, x = self.t[name + ".weight"], np.pad(x, ((0, 0), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(x, 3, 1)[:, ::stride]
        return np.einsum("oik,itk->ot", w, windows) + self.t[name + ".bias"].reshape(-1, 1)

    def attention(self, x, y, p, mask=0.0):
        """of x to y, and the weights (heads, n, keys)"""
        q, k, v = (self.linear(z, f"{p}.{c}").reshape(len(z), self.n_head, -1).transpose(1, 0, 2)
                   for z, c in ((x, "query"), (y, "key"), (y, "value")))
        w = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]) + mask)
        return self.linear((w @ v).transpose(1, 0, 2).reshape(len(x), -1), p + ".out"), w

    def mlp(self, x, p):
        return x + self.linear(self.gelu(self.linear(self.norm(x, p + ".mlp_ln"), p + ".mlp.0")), p + ".mlp.2")

    def encode(self, mel):
        x = self.gelu(self.conv(np.asarray(mel, float), "encoder.conv1", 1))
        x = self.gelu(self.conv(x, "encoder.conv2", 2)).T
        x = x + self.t["encoder.positional_embedding"][:len(x)]
        for i in range(self.n_layers["encoder"]):
            p = f"encoder.blocks.{i}"
            h = self.norm(x, p + ".attn_ln")
            x = self.mlp(x + self.attention(h, h, p + ".attn")[0], p)
        return self.norm(x, "encoder.ln_post")

    def decode(self, encoded, tokens):
        """(logits (n, n_vocab), cross attention (layers, heads, n, frames)) of all tokens from the start"""
        n, crossed = len(tokens), []
        x = self.t["decoder.token_embedding.weight"][tokens] + self.t["decoder.positional_embedding"][:n]
        mask = np.triu(np.full((n, n), -np.inf), 1)
        for i in range(self.n_layers["decoder"]):
            p = f"decoder.blocks.{i}"
            h = self.norm(x, p + ".attn_ln")
            x = x + self.attention(h, h, p + ".attn", mask)[0]
            o, w = self.attention(self.norm(x, p + ".cross_attn_ln"), encoded, p + ".cross_attn")
            crossed.append(w)
            x = self.mlp(x + o, p)
        return self.norm(x, "decoder.ln") @ self.t["decoder.token_embedding.weight"].T, np.array(crossed)


def allowed(logits, done, timestamps=True, blank=32):
    """The rules, said another way than in decoding.py: log probabilities, -inf for what may not follow."""
    ids = np.arange(len(logits))
    time, text = ids >= BEGIN, ids <= EOT
    ok = time | text
    if not timestamps:
        ok &= ~time
    if not done:
        ok &= (ids != EOT) & (ids != blank) & (ids <= BEGIN + 50)
    elif timestamps and done[-1] >= BEGIN:
        pair = len(done) == 1 or done[-2] >= BEGIN
        ok &= ~time if pair else ids >= EOT
    past = [t for t in done if t > BEGIN]
    if past and timestamps:
        ok &= ~(time & (ids < past[-1]))
    x = np.where(ok, logits.astype(float), -np.inf)
    p = softmax(x)
    if timestamps and p[time].sum() > p[:BEGIN].max() and p[time].max() > 0:
        p = np.where(time, p, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(p)
