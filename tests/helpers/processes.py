"""Python processes of their own."""
import os
import subprocess
import sys


def python(code, *args, timeout=300, **env):
    """Run `code` in a fresh interpreter; returns CompletedProcess with text output."""
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], text=True, capture_output=True,
                          timeout=timeout, env={**os.environ, **env})
