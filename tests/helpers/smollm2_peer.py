"""What llama.cpp makes of SmolLM2: logits of a page, greedy texts, and the perplexity of other files.

    python -m helpers.smollm2_peer TOOLS NAME FOLDER

reads FOLDER/jobs.json: {"page": ids, "prompts": lists of ids, "files": paths}, and writes FOLDER/peer.npz: logits of
the page by the first file, `texts`, `margins` by how much each token was likelier than the next, `nll` of each file.

A process of its own, so that no two ggml libraries meet.
"""
import json
import os
import sys

import numpy as np

N_TOKENS = 24


def nll_of(logits, ids):
    """The mean of -log p of each id but the first."""
    x = logits[:-1].astype(np.float64)
    x -= x.max(1, keepdims=True)
    return float((np.log(np.exp(x).sum(1)) - x[np.arange(len(x)), ids[1:]]).mean())


def main(tools, name, folder):
    sys.path.insert(0, tools)
    from peer_llamacpp import LlamaLib
    with open(os.path.join(folder, "jobs.json")) as f:
        jobs = json.load(f)
    lib, page, logits, nll, texts, margins = LlamaLib(), jobs["page"], None, [], [], []
    for path in jobs["files"]:
        c = lib.load(path).context(n_ctx=512, threads=1)
        found = c.decode(page, all_logits=True)
        nll.append(nll_of(found, page))
        if logits is None:
            logits = found
            for prompt in jobs["prompts"]:
                c.reset()
                text, by, _ = c.greedy(prompt, N_TOKENS, stop=())
                texts.append(text)
                margins.append(by)
    np.savez(os.path.join(folder, "peer.npz"), logits=logits, texts=texts, margins=margins, nll=nll)


if __name__ == "__main__":
    main(*sys.argv[1:])
