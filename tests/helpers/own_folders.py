"""A pytest plugin: a run of the tests leaves the user's machine as it was.

    .pytest_cache/d/ggjit-USER/     (`-o cache_dir=...` moves it)
        cache/                      GGJIT_CACHE_DIR of the run: its kernels serve the next, what it measured does not
        home/                       HOME of the run and its processes

Kernels are named by their sources, compiler and processor, so those of an earlier run are what this one would compile.
Measured times are not: tests run beside each other, and what they measure must steer no later run.

After a run of the whole suite the user's home and ggjit's cache in it are compared with what they were: a difference
fails the run.  Selected tests are not looked at, because a developer works beside them.
"""
import os
import pathlib
import shutil
import tempfile

import pytest

XDG = {"XDG_CACHE_HOME": ".cache", "XDG_CONFIG_HOME": ".config", "XDG_DATA_HOME": ".local/share",
       "XDG_STATE_HOME": ".local/state"}
NAMED = ["", *XDG.values()]             # folders of the home in which programs make a file or folder of their name
_RUN = pytest.StashKey()


def names(folder):
    """Of what is in it; nothing where there is no folder, or another user's."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def listing(home, cache):
    """{path: what changes when it is written}: names in the home's folders, and every file in ggjit's cache."""
    found = {str(home / folder / name): "" for folder in NAMED for name in names(home / folder)}
    for p in cache.rglob("*"):
        try:
            if not p.is_dir():
                found[str(p)] = p.stat().st_mtime_ns, p.stat().st_size
        except FileNotFoundError:       # removed meanwhile, by another program
            continue
    return found


def changes(before, after):
    """Lines that say what differs."""
    new, gone = after.keys() - before.keys(), before.keys() - after.keys()
    both = {p for p in after.keys() & before.keys() if before[p] != after[p]}
    return [f"{what}: {p}" for what, paths in (("new", new), ("removed", gone), ("written", both))
            for p in sorted(paths)]


class OwnFolders:
    """The folders of a run, and the user's before it."""

    def __init__(self, config):
        import platformdirs
        self.home = pathlib.Path(os.path.expanduser("~"))
        self.cache = pathlib.Path(os.environ.get("GGJIT_CACHE_DIR") or platformdirs.user_cache_dir("ggjit", False))
        self.whole = config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword
        self.before = listing(self.home, self.cache) if self.whole else None
        try:
            folder = config.cache.mkdir(f"ggjit-{os.getuid()}").resolve()
            (folder / "cache").mkdir(exist_ok=True)
            writable = os.access(folder / "cache", os.W_OK)
        except (OSError, AttributeError):                   # -p no:cacheprovider, or a checkout that is read only
            writable = False
        if not writable:
            folder = pathlib.Path(tempfile.mkdtemp(prefix="ggjit-tests-"))
            config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        for measured in (folder / "cache").glob("**/*.json"):
            measured.unlink(missing_ok=True)
        (folder / "home").mkdir(exist_ok=True)
        set_ = {"HOME": folder / "home", "GGJIT_CACHE_DIR": folder / "cache",
                **{name: folder / "home" / sub for name, sub in XDG.items()}}
        was = {name: os.environ.get(name) for name in set_}
        os.environ.update({name: str(path) for name, path in set_.items()})
        config.add_cleanup(lambda: [os.environ.pop(k, None) if v is None else os.environ.update({k: v})
                                    for k, v in was.items()])

    def changed(self):
        return changes(self.before, listing(self.home, self.cache)) if self.whole else []


def pytest_configure(config):
    if not hasattr(config, "workerinput"):                  # a process of xdist has its parent's environment
        config.stash[_RUN] = OwnFolders(config)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    run = session.config.stash.get(_RUN, None)
    found = run.changed() if run else []
    if found:
        session.exitstatus = max(int(session.exitstatus), int(pytest.ExitCode.TESTS_FAILED))
        session.config.stash[_RUN].found = found


def pytest_terminal_summary(terminalreporter, config):
    found = getattr(config.stash.get(_RUN, None), "found", [])
    if found:
        terminalreporter.write_sep("=", "the user's folders changed during the tests", red=True)
        for line in found[:20]:
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"{len(found)} changes, by a test that left its own folders, or by another program")
