"""llamacpp_oracle.py, asked from a test."""
import json
import subprocess
import sys

import pytest

from helpers.paths import TESTS


def asked(*jobs):
    """llama.cpp's answers to jobs, (function of llamacpp_oracle.py, its arguments); skips where it is not installed."""
    pytest.importorskip("xllamacpp")
    r = subprocess.run([sys.executable, TESTS / "helpers" / "llamacpp_oracle.py"], input=json.dumps(jobs), text=True,
                       capture_output=True, timeout=300)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout)
