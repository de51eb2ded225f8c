"""llama.cpp, asked from a test: functions of llamacpp_oracle.py, and the logits of a model file."""
import json
import subprocess
import sys

import numpy as np
import pytest

from helpers.paths import ROOT, TESTS
from helpers.requirements import shared

_LOGITS = """
import json, sys
import numpy as np
from benchmarks.worker import Worker
from ggjit.models import load_model
path, n_vocab = sys.argv[1:]
ids = np.random.default_rng(3).integers(0, int(n_vocab), 40).tolist()
nmse = []
with Worker("engines.peer") as peer, load_model(path, n_threads=1, n_ctx=64) as m:
    peer.ask("load", path, n_threads=1, n_ctx=64)
    ours = m.logits(ids).astype(float)
    for n in (1, 7, 40):
        theirs = np.array(peer.ask("logits", ids[:n]))
        nmse.append(((ours[n - 1] - theirs) ** 2).sum() / (theirs ** 2).sum())
print(json.dumps(nmse))
"""


def asked(*jobs):
    """llama.cpp's answers to jobs, (function of llamacpp_oracle.py, its arguments); skips where it is not installed."""
    pytest.importorskip("xllamacpp")
    r = subprocess.run([sys.executable, TESTS / "helpers" / "llamacpp_oracle.py"], input=json.dumps(jobs), text=True,
                       capture_output=True, timeout=300)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout)


def computed(helper, name, folder, results, *options):
    """What llama.cpp computes with a small file, as NumPy loads it: `helpers/<helper>.py` writes the file and `results`
    to the folder, in a process of its own, so that no two ggml libraries meet."""
    command = [sys.executable, "-m", f"helpers.{helper}", str(shared("tools")), name, str(folder), *options]
    r = subprocess.run(command, cwd=TESTS, text=True, capture_output=True, timeout=300)
    assert r.returncode == 0, r.stderr[-2000:]
    return np.load(folder / results)


def nmse_of_logits(path, n_vocab):
    """[NMSE of our logits against llama.cpp's, of the same file] after 1, 7 and 40 random tokens."""
    r = subprocess.run([sys.executable, "-c", _LOGITS, str(path), str(n_vocab)], cwd=ROOT, text=True,
                       capture_output=True, timeout=600)
    assert r.returncode == 0, r.stderr[-2000:]
    return json.loads(r.stdout.splitlines()[-1])


def loads(path):
    """Does llama.cpp load that model?"""
    code = ("import sys\nfrom benchmarks.worker import Worker\nwith Worker('engines.peer') as peer:\n"
            "    try:\n        peer.ask('load', sys.argv[1], n_threads=1, n_ctx=64)\n    except Exception:\n"
            "        print('refused')\n    else:\n        print('loaded')")
    r = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert r.returncode == 0, r.stderr[-2000:]
    return r.stdout.split()[-1] == "loaded"
