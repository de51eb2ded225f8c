"""An engine in a process of its own, asked over a pipe with one JSON line a call.

Engines are measured one at a time: the others sleep in `read`.  Two compiled engines in one process would
share symbols and thread pools, and their spinning threads would take the other's cores.

    ours = Worker("engines.ours")                       # benchmarks/engines/ours.py, class Engine
    ours.ask("load", "model.gguf", n_threads=1)
    seconds = ours.ask("pp", 128)
"""
import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[1]


class EngineError(RuntimeError):
    """An engine failed while it was measured."""


class Missing(EngineError):
    """An engine, or something it needs, is not installed here; the text says what."""


class Worker:
    """The near end.  `about` is what the engine says of itself; Missing is raised where it cannot be started."""

    def __init__(self, engine, *args, **env):
        """engine, args: the class Engine of benchmarks.<engine>, Engine(*args); env: more environment variables."""
        self.engine = engine
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", engine, *args], cwd=ROOT, text=True, env={**os.environ, **env},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)      # Ctrl-C is the asker's
        try:
            self.about = self.ask("about")
        except BaseException:
            self.close()
            raise

    def ask(self, method, *args, **kw):
        """The engine's `method(*args, **kw)`; arguments and results are what JSON can carry."""
        try:
            self._process.stdin.write(json.dumps([method, args, kw], default=os.fspath) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineError(f"the process of {self.engine!r} ended with status {self._process.wait()}")
        kind, value = json.loads(line)
        if kind == "missing":
            raise Missing(value)
        if kind == "error":
            raise EngineError(f"{self.engine}.{method}: {value}")
        return value

    @property
    def ended(self):
        """The status its process ended with, None while it runs."""
        return self._process.poll()

    def run_on(self, cores):
        """Keep all threads of the process on these cores."""
        for tid in os.listdir(f"/proc/{self._process.pid}/task"):
            with contextlib.suppress(ProcessLookupError):           # it has ended
                os.sched_setaffinity(int(tid), cores)

    def cpu_seconds(self):
        """Processor time of all threads so far."""
        try:
            fields = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self):
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def serve(name, *args):
    """The far end: answer until the pipe closes.  The engine's own prints go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = None
    for line in sys.stdin:
        method, values, kw = json.loads(line)
        try:
            engine = engine or importlib.import_module(f"benchmarks.{name}").Engine(*args)
            answer = "ok", getattr(engine, method)(*values, **kw)
        except Missing as e:
            answer = "missing", str(e)
        except Exception as e:          # whatever it is, it belongs to the asker
            traceback.print_exc()
            answer = "error", f"{type(e).__name__}: {e}"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # benchmarks.worker, not __main__: engines raise the Missing of the imported module
    importlib.import_module("benchmarks.worker").serve(*sys.argv[1:])
