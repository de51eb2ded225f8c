"""Finds files that declare something, so that adding a file adds an op, a type or a test family.

    for module in modules_below("ggjit.ops"): getattr(module, "SPECS", ())
"""
import importlib
import pkgutil

NO_OPS = ("core", "native", "types", "cuda")        # folders of ops/ in which no op is declared


def modules_below(package, skip=()):
    """Every module below `package`, folders included, imported, in the order of their names.

    skip: names of folders (at any depth) that are left out with all they contain.
    """
    path = importlib.import_module(package).__path__
    for info in sorted(pkgutil.iter_modules(path), key=lambda i: i.name):
        name = f"{package}.{info.name}"
        if not info.ispkg:
            yield importlib.import_module(name)
        elif info.name not in skip:
            yield from modules_below(name, skip)


def declared(package, attribute, skip=()):
    """(module name, item) of every item in the tuples called `attribute` below `package`."""
    for module in modules_below(package, skip):
        for item in getattr(module, attribute, ()):
            yield module.__name__, item
