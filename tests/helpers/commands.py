"""The command line as a process of its own, and what a command prints as JSON."""
import json
import os
import subprocess
import sys

from helpers.paths import ROOT

START = ROOT / "ggjit_command.py"          # where the installed command starts


def ggjit(*args, **env):
    return subprocess.run([sys.executable, "-m", "ggjit.tools.command.main", *map(str, args)], text=True,
                          capture_output=True,
                          timeout=300, env={**os.environ, **env})


def result(run, *args):
    r = run(*args, "--json")
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout)
