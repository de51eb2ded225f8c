"""A bounded reader of whisper.cpp's binary files."""
import struct

from ggjit.ops.core.errors import BadFile


class BinCursor:
    """A position in `data`.  kind: what the file should be, for messages.  Errors of all methods: BadFile."""

    def __init__(self, data, path, kind):
        self.data, self.path, self.kind, self.pos = data, path, kind, 0

    def fail(self, what):
        raise BadFile(f"{self.path}: {what}; the file is damaged or no {self.kind} in whisper.cpp's form, fetch it "
                      f"again")

    def take(self, nbytes, what):
        """Offset of the next nbytes bytes."""
        left = len(self.data) - self.pos
        if nbytes > left:
            self.fail(f"{what} needs {nbytes} bytes at {self.pos}, {left} are left")
        self.pos += nbytes
        return self.pos - nbytes

    def ints(self, n, what):
        """The next n 32-bit integers."""
        return struct.unpack_from(f"<{n}i", self.data, self.take(4 * n, what))
