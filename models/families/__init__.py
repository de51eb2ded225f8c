"""The architectures served: `general.architecture` -> a function from HParams to Description.

One file per family.  A description reads the metadata it depends on.  networks/base/strict.py raises an error for
metadata that would change the result and that the description does not read.  registry.py collects them.
"""
