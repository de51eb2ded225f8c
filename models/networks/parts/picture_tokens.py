"""Pictures among the tokens of a text: ids behind the vocabulary's, each a vector of a vision network.

    ids       0 ... n_vocab - 1 | n_vocab ... of the first picture | of the next | ...
    vectors                     | (n, n_embd)                      | (n, n_embd) |

So all that works on ids works with pictures, too: a text that begins with one that was read is not read again, and
texts with pictures join a batch.  The same picture has the same ids.  Those used last are kept, MAX_NBYTES of vectors.
"""
import bisect
import collections
import hashlib

import numpy as np

from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.locks import ForkLock

MAX_NBYTES = 1 << 28
MAX_ID = (1 << 31) - 1


class PictureTokens:
    """`ids_of(vectors)`, and `fill(ids, vectors, is_text)` for a batch of them."""

    def __init__(self, n_vocab):
        self.n_vocab = self.end = n_vocab           # ids from n_vocab to end - 1 stand for vectors of pictures
        self._kept = collections.OrderedDict()      # {digest: (first id, vectors)}, the one used last behind
        self._lock = ForkLock()
        self._firsts = []                           # (first id, digest), ascending

    def ids_of(self, vectors):
        """int32 ids of the vectors (n, n_embd) of one field of a picture."""
        digest = hashlib.blake2b(vectors.tobytes(), digest_size=16).digest()
        with self._lock:
            return self._ids_of(digest, vectors)

    def _ids_of(self, digest, vectors):
        if digest in self._kept:
            self._kept.move_to_end(digest)
            first = self._kept[digest][0]
        else:
            if self.end + len(vectors) > MAX_ID:
                raise ParamError("no ids are left for more pictures; load the model again")
            first = self.end
            self.end += len(vectors)
            self._kept[digest] = first, vectors
            self._firsts.append((first, digest))
            self._forget()
        return np.arange(first, first + len(vectors), dtype=np.int32)

    def _forget(self):
        while sum(v.nbytes for _, v in self._kept.values()) > MAX_NBYTES and len(self._kept) > 1:
            self._kept.popitem(last=False)
        self._firsts = [pair for pair in self._firsts if pair[1] in self._kept]

    def runs(self, ids):
        """[(start, end), ...]: runs of consecutive ids of one picture."""
        out = []
        for i in np.flatnonzero(ids >= self.n_vocab).tolist():
            if out and out[-1][1] == i and self._first(ids[i])[0] == self._first(ids[i - 1])[0]:
                out[-1][1] = i + 1
            else:
                out.append([i, i + 1])
        return out

    def _first(self, id):
        """(first id, vectors) of the picture that an id is of.  Errors: ParamError where it was forgotten."""
        with self._lock:
            at = bisect.bisect_right(self._firsts, (int(id), b"\xff" * 17)) - 1
            first, vectors = self._kept[self._firsts[at][1]] if at >= 0 else (0, ())
        if not first <= id < first + len(vectors):
            raise ParamError("a picture of this text was forgotten, since others were looked at after it; give the "
                             "prompt with its pictures again")
        return first, vectors

    def fill(self, ids, vectors, is_text):
        """The inputs of a batch: vectors (n, n_embd), zeros for tokens of text; is_text (n, 1), 1 or 0."""
        is_text[:, 0] = ids < self.n_vocab
        vectors[:] = 0
        for start, end in self.runs(ids):
            first, kept = self._first(ids[start])
            vectors[start:end] = kept[ids[start:end] - first]
