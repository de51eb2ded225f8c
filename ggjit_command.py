"""The `ggjit` command starts here, outside the package: what `import ggjit` refuses is one line too.

A bad GGJIT_CPU or GGJIT_DEBUG raises ParamError while the package is imported, before any code inside could catch it.

Python's search for garbage rests where there is none to find: while modules are imported and at the end, when hundreds
of thousands of objects would be visited once more, a fifth of a second.
"""
import gc
import sys


def main():
    """Exit status of the command; 2 when a setting in the environment cannot be used."""
    gc.disable()                # until the arguments are parsed: commands are modules
    try:
        return _status()
    finally:
        gc.freeze()


def _status():
    try:
        from ggjit.tools.command.main import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as e:
        if all(c.__name__ != "GgjitError" for c in type(e).__mro__):     # by name: `ggjit` itself failed to import
            raise
        print(f"ggjit: {e}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
