"""A Python process that runs one piece of code after another, for tests that need another environment.

Each piece has a namespace of its own; modules and compiled helpers stay, which is what makes the next one quick.
"""
import os
import pickle
import subprocess
import sys
import threading

SERVE = """
import contextlib, io, os, pickle, sys, traceback
replies = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)                           # what anything else writes to stdout is no reply
while True:
    try:
        code, argv = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    out, error = io.StringIO(), ""
    sys.argv[1:] = argv
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, "<piece>", "exec"), {"__name__": "piece"})
    except BaseException:
        error = traceback.format_exc()
    pickle.dump((out.getvalue(), error), replies)
    replies.flush()
"""


class Interpreter:
    """`run(code, *args)` answers as a finished process would; one that crashed or hung is replaced by the next run."""

    def __init__(self, **env):
        self.env, self.process = {**os.environ, **env}, None

    def run(self, code, *args, timeout=600):
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen([sys.executable, "-c", SERVE], env=self.env, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE)
        child, patience = self.process, threading.Timer(timeout, self.process.kill)
        patience.start()
        try:
            pickle.dump((code, [str(a) for a in args]), child.stdin)
            child.stdin.flush()
            out, error = pickle.load(child.stdout)
        except (EOFError, BrokenPipeError):
            out, error = "", f"the process ended with status {child.wait()}"
        finally:
            patience.cancel()
        return subprocess.CompletedProcess(args, 1 if error else 0, out, error)

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
