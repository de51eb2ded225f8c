"""Python and `ggjit` processes of their own, and what a command prints as JSON."""
import json
import os
import subprocess
import sys

from helpers.paths import ROOT

START = ROOT / "ggjit_command.py"          # where the installed command starts


def python(code, *args, timeout=300, **env):
    """Run `code` in a fresh interpreter; returns CompletedProcess with text output."""
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], text=True, capture_output=True,
                          timeout=timeout, env={**os.environ, **env})


def ggjit(*args, **env):
    """Run the command; returns the same."""
    return subprocess.run([sys.executable, "-m", "ggjit.tools.command.main", *map(str, args)], text=True,
                          capture_output=True, timeout=300, env={**os.environ, **env})


def result(run, *args):
    r = run(*args, "--json")
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout)
