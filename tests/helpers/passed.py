"""A pytest plugin: tests that passed in an earlier run are not run again.

    GGJIT_TESTS_PASSED=FILE python -m pytest        runs those that FILE does not name; adds those that passed

An environment with more packages runs what one with fewer skipped: a module that could not be collected, too.
"""
import os

_FILE = os.environ.get("GGJIT_TESTS_PASSED")
_failed, _passed = set(), set()


def _known():
    """Node ids, a line each: parameters may hold anything but an end of line, which pytest writes as \\n."""
    try:
        with open(_FILE, encoding="utf-8") as f:
            return set(f.read().splitlines())
    except FileNotFoundError:
        return set()


def pytest_collection_modifyitems(config, items):
    """In every process of xdist alike: the file is written when all have ended."""
    known = _known() if _FILE else set()
    again = [item for item in items if item.nodeid in known]
    if again:
        config.hook.pytest_deselected(items=again)
        items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logreport(report):
    """Passed: called, and no part of it failed."""
    if report.failed:
        _failed.add(report.nodeid)
    elif report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_sessionfinish(session):
    if _FILE and not hasattr(session.config, "workerinput"):
        with open(_FILE, "a", encoding="utf-8") as f:
            f.writelines(f"{name}\n" for name in sorted(_passed - _failed))
