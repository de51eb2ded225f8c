"""Every family beside llama.cpp on the same file: a prompt, and tokens one by one.  One thread, processor time.

    python -m benchmarks.families [NAME ...] [--sample 6] [--type Q8_0] [--prompt 64] [--tokens 12] [--rounds 3]

Files hold random weights, with embeddings of 1024 in 4 layers (some families: the sizes that their tensors need).  The
two engines take turns; each figure is the best round.  NAME: entries of tests/helpers/arch_files.py; without one,
--sample of them, drawn by --seed.  Needs the xllamacpp wheel, and the tools of the reference data (GGJIT_SHARED).
"""
import argparse
import os
import pathlib
import random
import sys
import tempfile

from benchmarks.worker import ROOT, EngineError, Worker
from ggjit.models.families.registry import DECODERS, ENCODERS

DECODE_TARGET, PREFILL_TARGET = 1.0, 2.0        # our speed over llama.cpp's
SIZES = {"embd": 1024, "ff": 2816, "heads": 16, "vocab": 8192, "ctx": 512}
EXPERT_SIZES = {"ffx": 704, "ffs": 704}
HEADLINE = "| family | MB | prompt, tokens/s | llama.cpp | ratio | decode, tokens/s | llama.cpp | ratio |"


def sizes_of(name, arch_files):
    """What arch_files.write takes."""
    if name in arch_files.ROUND:
        return {"vocab": SIZES["vocab"], "ctx": SIZES["ctx"]}
    without = {"heads"} if name in ("mamba", "mamba2", "mamba-rms", "rwkv7") else set()
    more = {"ranks": 64} if name.startswith("qwen35") else {}           # heads of 32 that fill twice the embedding
    return {k: v for k, v in (SIZES | EXPERT_SIZES | more).items() if k not in without}


def measured(ours, peer, measure, n, rounds):
    """(our tokens a second, llama.cpp's): the best of rounds taken in turn."""
    for engine in (ours, peer):
        engine.ask("warm", measure, n)
    seconds = [[engine.ask(measure, n, seed) for engine in (ours, peer)] for seed in range(rounds)]
    return [n / min(s) for s in zip(*seconds, strict=True)]


def row(name, path, ours, peer, args):
    """A line of the table, and whether it meets the targets."""
    encoder = name in ENCODERS or name == "bert" or name.startswith(tuple(ENCODERS))
    for engine in (ours, peer):
        engine.ask("load", path, n_threads=1, n_ctx=512, embed=encoder)
    try:
        pp = measured(ours, peer, "embed" if encoder else "pp", args.prompt, args.rounds)
        tg = None if encoder else measured(ours, peer, "tg", args.tokens, args.rounds)
    finally:
        for engine in (ours, peer):
            engine.ask("unload")
    cells = [f"{pp[0]:.0f}", f"{pp[1]:.0f}", f"{pp[0] / pp[1]:.2f}"]
    cells += ["", "", ""] if tg is None else [f"{tg[0]:.1f}", f"{tg[1]:.1f}", f"{tg[0] / tg[1]:.2f}"]
    met = pp[0] >= PREFILL_TARGET * pp[1], tg is None or tg[0] >= DECODE_TARGET * tg[1]
    return f"| {name} | {path.stat().st_size / 1e6:.0f} | {' | '.join(cells)} |", met


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.families", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*")
    p.add_argument("--sample", type=int, default=6)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--type", default="Q8_0", help="of the matrices")
    p.add_argument("--prompt", type=int, default=64)
    p.add_argument("--tokens", type=int, default=12)
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args(argv)
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import arch_files
    tools = pathlib.Path(os.environ.get("GGJIT_SHARED", ROOT.parent / "shared"), "tools")
    if not tools.is_dir():
        p.error(f"{tools} is not there; GGJIT_SHARED names the folder of the reference data")
    drawn = sorted({*DECODERS, *ENCODERS} - {"gptj"})               # of which llama.cpp has no network
    names = args.names or sorted(random.Random(args.seed).sample(drawn, args.sample))
    ours, peer = Worker("engines.ours", OMP_NUM_THREADS="1"), Worker("engines.peer", OMP_NUM_THREADS="1")
    for engine in (ours, peer):
        engine.ask("use_clock", "cpu")
    print(f"{HEADLINE}\n|{'---|' * HEADLINE.count(' | ')}---|", flush=True)
    results = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.gguf")
            for name in names:
                arch_files.write(tools, name, path, kind=args.type, **sizes_of(name, arch_files))
                try:
                    line, met = row(name, path, ours, peer, args)
                except EngineError as e:
                    print(f"| {name} | not measured: {e} |", flush=True)
                    continue
                results.append(met)
                print(line, flush=True)
    finally:
        ours.close()
        peer.close()
    pp, tg = (sum(each) for each in zip(*results, strict=True)) if results else (0, 0)
    print(f"\nof {len(results)}: {pp} with at least {PREFILL_TARGET:g} x llama.cpp's prompt, "
          f"{tg} with at least {DECODE_TARGET:g} x its decode")


if __name__ == "__main__":
    main()
