"""Trains the model that the package includes: a small llama with its own tokenizer, on Jane Austen's six novels.

    apt-get download r-cran-janeaustenr && dpkg-deb -x r-cran-janeaustenr_*.deb austen
    python -m ggjit.tools.embedded_model austen/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb models/austen.gguf

Texts may also be given as text files.  The same texts, seed and machine give the same file.  docs/austen.md says what
came out.

    texts -> paragraphs -> byte-level BPE (tokenizers) -> ids -> gg.train.fit, AdamW -> Q8_0 GGUF
"""
import argparse
import json
import math
import pathlib
import re
import struct
import tempfile
import time
import zlib

import numpy as np

import ggjit as gg
from ggjit.models.files.save import save_gguf
from ggjit.models.networks.load import load_model
from ggjit.models.networks.parts.training import TokenLoss
from ggjit.ops.core.errors import extra

N_VOCAB, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_LAYER, N_CTX = 2048, 128, 352, 4, 2, 4, 256
ROWS_PER_STEP, PEAK_RATE, N_WARM_UP = 4, 3e-3, 100
END = "<|endoftext|>"                   # stands between two texts
ARCH = {"context_length": N_CTX, "embedding_length": N_EMBD, "block_count": N_LAYER, "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD, "attention.head_count_kv": N_HEAD_KV,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "rope.dimension_count": N_EMBD // N_HEAD,
        "vocab_size": N_VOCAB}


# ---------------------------------------------------------------- texts
def read_texts(path):
    """The texts of a file: an R data file of character vectors, or one text."""
    raw = pathlib.Path(path).read_bytes()
    return list(_r_texts(raw)) if str(path).endswith(".rdb") else [raw.decode()]


def _r_texts(raw):
    """R's lazy-load file: (u32 length, zlib stream) of each object; a serialized vector of lines is one text."""
    while raw:
        stream = zlib.decompressobj()
        data, at = stream.decompress(raw[4:]), 14               # after "X\n" and three versions
        raw = stream.unused_data
        at += 4 + struct.unpack_from(">i", data, at)[0]         # after the name of the encoding
        n, at, lines = struct.unpack_from(">i", data, at + 4)[0], at + 8, []
        for _ in range(n):
            flags, n_bytes = struct.unpack_from(">ii", data, at)
            lines.append(data[at + 8:at + 8 + n_bytes].decode("utf-8" if flags & 0x8000 else "latin-1"))
            at += 8 + n_bytes
        yield "\n".join(lines)


def paragraphs(text):
    """A text with one line a paragraph, without marks of emphasis."""
    found = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text))
    return "\n".join(p for p in found if p).replace("--", " - ").replace("_", "")


# ---------------------------------------------------------------- tokenizer
def train_tokenizer(texts):
    """(tokens, merges) of a byte-level BPE; the last token is END."""
    tokenizers = extra("tokenizers", "models")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=N_VOCAB - 1, initial_alphabet=alphabet,
                                                                  show_progress=False))
    words = bpe.get_vocab()
    merges = json.loads(bpe.to_str())["model"]["merges"]
    return [*sorted(words, key=words.get), END], [m if isinstance(m, str) else " ".join(m) for m in merges]


def metadata(tokens, merges):
    end, key = tokens.index(END), "tokenizer.ggml."
    return {"general.architecture": "llama", "general.name": "Austen", "general.license": "mit",
            **{f"llama.{name}": value for name, value in ARCH.items()},
            key + "model": "gpt2", key + "pre": "gpt-2", key + "tokens": tokens, key + "merges": merges,
            key + "token_type": np.array([1] * end + [3], np.int32), key + "bos_token_id": end,
            key + "eos_token_id": end, key + "add_bos_token": False}


# ---------------------------------------------------------------- weights
def first_weights(seed):
    """{name: float32 array}: normal, those that add to the residual stream smaller."""
    rng, small = np.random.default_rng(seed), 0.02 / math.sqrt(2 * N_LAYER)
    n_kv = N_EMBD // N_HEAD * N_HEAD_KV
    shapes = {"attn_q": (N_EMBD, N_EMBD), "attn_k": (n_kv, N_EMBD), "attn_v": (n_kv, N_EMBD),
              "attn_output": (N_EMBD, N_EMBD), "ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD),
              "ffn_down": (N_EMBD, N_FF)}
    found = {"token_embd.weight": 0.02 * rng.standard_normal((N_VOCAB, N_EMBD), np.float32),
             "output_norm.weight": np.ones(N_EMBD, np.float32)}
    for i in range(N_LAYER):
        for name, shape in shapes.items():
            spread = small if name in ("attn_output", "ffn_down") else 0.02 if "attn" not in name else 0.05
            found[f"blk.{i}.{name}.weight"] = (spread * rng.standard_normal(shape)).astype(np.float32)
        for name in ("attn_norm", "ffn_norm"):
            found[f"blk.{i}.{name}.weight"] = np.ones(N_EMBD, np.float32)
    return found


def rate(n_steps):
    """Learning rate: up for N_WARM_UP steps, down along a cosine, in the last quarter straight down to little."""
    def at(step):
        slow = 0.55 + 0.45 * math.cos(math.pi * (step / (1.5 * n_steps)))
        last = max(0.0, step / n_steps - 0.75) / 0.25
        return PEAK_RATE * min(1.0, step / N_WARM_UP) * slow * (1 - 0.95 * last)
    return at


def train(texts, seed, n_epochs, checkpoint=None):
    """(metadata, {name: float32 array}, History) of a training on `texts`."""
    tokens, merges = train_tokenizer(texts)
    about = metadata(tokens, merges)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "first.gguf"
        save_gguf(path, first_weights(seed), about)
        with load_model(path, n_threads=1, n_ctx=N_CTX, repack=False, reserve=False) as m:
            m.weights.unfreeze()
            ids = [i for text in texts for i in (*m.tokenize(text), tokens.index(END))]
            part = TokenLoss(m, N_CTX, chunk=N_CTX)
            rows = part.rows(ids)
            n_steps = int(len(rows[0]) * 0.98) // ROWS_PER_STEP * n_epochs
            print(f"{len(ids)} tokens of {sum(map(len, texts))} characters, {n_steps} steps", flush=True)
            start = time.perf_counter()

            def show(history):
                n = len(history.steps)
                if n % 100 == 0 or n < 4:
                    print(f"step {n}: loss {np.mean(history.steps[-100:]):.3f}, {time.perf_counter() - start:.0f} s",
                          flush=True)
            history = gg.train.fit(
                (part.tokens, part.targets), part.loss, gg.train.Dataset(list(rows)), loss="mean",
                optimizer=gg.train.AdamW(lr=rate(n_steps), beta2=0.95, weight_decay=0.05), epochs=n_epochs,
                batch=ROWS_PER_STEP, val_split=0.02, seed=seed, clip=1.0, backend=m.backend, checkpoint=checkpoint,
                callback=show, progress=False)
            return about, {t.name: t.numpy().copy() for t in m.weights._leaves.values()}, history


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("texts", nargs="+", help="R data files or text files")
    parser.add_argument("out", help="the GGUF to write")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", help="written after every epoch, gone on from")
    args = parser.parse_args()
    texts = [paragraphs(text) for path in args.texts for text in read_texts(path)]
    about, weights, history = train(texts, args.seed, args.epochs, args.checkpoint)
    with gg.Context() as ctx:
        kept = {name: gg.from_numpy(ctx, w) if w.ndim == 1 else gg.from_numpy(ctx, w, type=gg.Q8_0)
                for name, w in weights.items()}
        save_gguf(args.out, kept, about)
    print(f"loss {history.loss}, held out {history.val_loss}, {sum(history.seconds):.0f} s")


if __name__ == "__main__":
    main()
