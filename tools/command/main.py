"""The command line: `ggjit <command>`.  Results go to stdout (one JSON object with --json), progress to stderr.

Exit status: 0 done; 1 could not be done; 2 wrong usage, or an option or setting whose value cannot be used; 130 Ctrl-C.
1 and 2 come with a line on stderr: what is wrong, and how to mend it.
"""
import contextlib
import gc
import json
import math
import os
import sys
import warnings

from ggjit.ops.core.errors import GgjitError, ModelError, ParamError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.printable import printable
from ggjit.ops.core.user_warnings import GgjitWarning
from ggjit.tools.command.parser import Arguments, try_first


def main(argv=None):
    """Entry point of the `ggjit` command; returns the exit status."""
    if sys.stderr is None:                  # stderr was closed by the caller
        sys.stderr = open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):              # not where a notebook or a test has put another in its place
        sys.stdout.reconfigure(**_output())
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(try_first(), file=sys.stderr)
        return 2
    try:
        parsed = Arguments().parse(argv)
        gc.enable()                         # garbage collection is off until here (ggjit_command.py)
        return _status(*parsed)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _output(system=sys.platform, environment=os.environ):
    """How texts are written: a character that a terminal cannot show is shown as ?.

    Windows writes into pipes and files in the code page of the country, which lacks most characters: UTF-8 instead,
    unless PYTHONIOENCODING says otherwise.
    """
    encoding = {"encoding": "utf-8"} if system == "win32" and "PYTHONIOENCODING" not in environment else {}
    return {"errors": "replace", **encoding}


def _status(run, args):
    """Runs the command and prints its result; the exit status."""
    try:
        with oom_guard(f"ggjit {args.command}"), _warnings_as_lines(args.command):
            result = run(args)
        if getattr(args, "json", False):
            print(json.dumps(_finite(result), allow_nan=False))
        if sys.stdout is not None:
            sys.stdout.flush()              # a full disk is noticed here, where it can still be reported
    except GgjitError as e:
        _failed(args, e)                    # 2: the value of an option or of a setting in the environment
        return 2 if isinstance(e, ParamError) and not isinstance(e, ModelError) else 1
    except BrokenPipeError:                 # before OSError, its base class: the reader left, nothing more to say
        _drop_stdout()
        return 1
    except OSError as e:
        if e.filename is None:
            _drop_stdout()
        return _failed(args, f"{e.filename or 'output'}: {e.strerror}; check the path and the space there")
    if not result.get("fits", True):
        return _failed(args, f"over the capacity of {args.capacity:,} bytes: {result['verdict']}; the best layout "
                             f"found has {result['peak']:,}")
    return int(result.get("failed", False))


@contextlib.contextmanager
def _warnings_as_lines(command):
    """Context in which a GgjitWarning is printed as one line, without a place in the code."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, category, *where, **line: (
        f"ggjit {command}: warning: {message}\n" if issubclass(category, GgjitWarning)
        else before(message, category, *where, **line))
    try:
        yield
    finally:
        warnings.formatwarning = before


def _finite(x):
    """The same with null for NaN and infinities, which JSON has no form for."""
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _failed(args, words):
    print(f"ggjit {args.command}: {printable(words).removeprefix(f'{args.command}: ')}", file=sys.stderr)
    return 1


def _drop_stdout():
    """What is still buffered goes nowhere: writing it at exit would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
