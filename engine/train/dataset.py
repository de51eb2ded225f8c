"""Data as arrays: rows of inputs and labels that are shuffled, split and cut into batches together."""
import numbers

import numpy as np

from ggjit.ops.core.errors import ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.whole_numbers import whole


class Dataset:
    """Rows of `inputs` (an array, or several for several input tensors) and of `labels`, all of one length.

        data = gg.train.Dataset(images, digits)
        train, held_out = data.split(0.2)

    shard: so many rows stay together and in order when the data are shuffled.  The arrays are not copied; memory-mapped
    ones are read batch by batch.  Errors: ShapeError, TypeMismatch, ParamError.  Source: ggml_opt_dataset.
    """

    def __init__(self, inputs, labels=None, shard=1):
        self.inputs = tuple(map(_array, inputs)) if isinstance(inputs, tuple | list) else (_array(inputs),)
        self.labels = None if labels is None else _array(labels)
        n = {len(a) for a in (*self.inputs, *([] if labels is None else [self.labels]))}
        if len(n) != 1:
            raise ShapeError(f"Dataset: inputs and labels differ in their number of rows: {sorted(n)}; a list or tuple "
                             f"is one array for each input tensor: np.array makes one of rows")
        self.n = n.pop()
        if not self.n:
            raise ParamError("Dataset: there are no rows; at least one is needed")
        self.shard = whole(shard, "Dataset: shard")
        if not 1 <= self.shard <= self.n:
            raise ParamError(f"Dataset: shard must be from 1 to the {self.n} rows, got {shard!r}")

    def __len__(self):
        return self.n

    def __repr__(self):
        shapes = ", ".join(f"{a.dtype} {a.shape}" for a in self.inputs)
        return f"<Dataset of {self.n} rows: {shapes}" + ("" if self.labels is None else
                                                       f" -> {self.labels.dtype} {self.labels.shape}") + ">"

    def rows(self, index):
        """(inputs, labels) of the rows `index`, an array or a slice."""
        return tuple(a[index] for a in self.inputs), None if self.labels is None else self.labels[index]

    def split(self, fraction):
        """(the first rows, the last ones): the second has the share `fraction`, in whole shards."""
        if not isinstance(fraction, numbers.Real) or not 0 <= fraction < 1:
            raise ParamError(f"split: the share must be in [0, 1), got {fraction!r}")
        cut = self.n - round(self.n * fraction / self.shard) * self.shard
        cut = min(self.n, -(-cut // self.shard) * self.shard)           # whole shards; the last one may have fewer rows
        return self.first(cut), self._part(slice(cut, None))

    def first(self, n):
        """The first n rows."""
        return self._part(slice(n))

    def _part(self, rows):
        part = object.__new__(Dataset)
        (part.inputs, part.labels), part.shard = self.rows(rows), self.shard
        part.n = len(part.inputs[0])
        return part

    def order(self, seed, epoch):
        """Row numbers in the order of an epoch: shards shuffled by (seed, epoch); None: as they are."""
        if seed is None:
            return np.arange(self.n)
        n_shards = -(-self.n // self.shard)
        shards = np.random.default_rng([seed, epoch]).permutation(n_shards)
        rows = (shards[:, None] * self.shard + np.arange(self.shard)).reshape(-1)
        return rows[rows < self.n]


def as_dataset(dataset):
    """A Dataset of what fit takes: one, or (inputs, labels), or inputs alone."""
    if isinstance(dataset, Dataset):
        return dataset
    if isinstance(dataset, tuple) and len(dataset) == 2:
        return Dataset(*dataset)
    return Dataset(dataset)


def _array(a):
    try:
        array = np.asarray(a)
    except ValueError:                                  # rows of different length
        array = np.asarray(None)
    if array.dtype.kind not in "fiub" or array.ndim < 1:
        what = f"{array.dtype} of shape {array.shape}" if isinstance(a, np.ndarray) else type(a).__name__
        raise TypeMismatch(f"Dataset: arrays of numbers are needed, with rows of one shape, got {what}")
    return array
