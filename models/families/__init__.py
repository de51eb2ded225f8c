"""The architectures served: `general.architecture` -> a function from HParams to Description.

One file per family.  A description reads the metadata it depends on; what it does not read, and what changes the
result, is refused by networks/base/strict.py.  registry.py collects them.
"""
