"""What a run of benchmarks.gpu has found so far, saved after every line of it, and the time that its parts may take.

    |------- ops -------|---- walk ----|--- piped ---|...      a part may take its share of the time that is left
"""
import datetime
import math
import pathlib
import re
import sys
import time

from benchmarks.report import Row, markdown
from ggjit.cuda.driver import DeviceLost


class Clock:
    """`until(share)`: when a part must begin nothing more; seconds: of the whole run, None: as long as it takes."""

    def __init__(self, seconds=None):
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def until(self, share=1.0):
        now = time.monotonic()
        return now + share * max(0.0, self._end - now) if self._end < math.inf else math.inf


def each(cases, stops):
    """The rows of all cases, (label, function) each: what falls over is a row that says so, and the next case begins.
    stops: an error is raised.  Errors: DeviceLost, after which nothing runs."""
    for label, rows in cases:
        try:
            yield from rows()
        except DeviceLost:
            raise
        except Exception as e:
            if stops:
                raise
            yield Row(f"{label} stopped", "-", f"{type(e).__name__}: {e}")


class Report:
    """The op suite's results and the rows of all measurements; `path`: the file, None: nothing is saved."""

    def __init__(self, device, path=None):
        self.device, self.path, self.rows, self.checked = device, path, [], {}
        self.sanitized = None

    def found(self, op, n, absent, wrong, n_left=0):
        """So many cases of an op were run, so many have no kernel, so many were not begun in time."""
        before = self.checked.get(op, (0, 0, [], 0))
        self.checked[op] = before[0] + n, before[1] + absent, before[2] + wrong, before[3] + n_left
        self.save()

    def add(self, row):
        print(" | ".join(map(str, row.cells())), file=sys.stderr, flush=True)
        self.rows.append(row)
        self.save()

    def part(self, name, rows, until=math.inf, stops=False):
        """The rows of a part; what it had no time for or fell over is a row, too.  stops: an error is raised."""
        try:
            for row in rows:
                self.add(row)
                if time.monotonic() > until:
                    self.add(Row(f"{name} stopped", "-", "no time left"))
                    return
        except Exception as e:                  # the rest is still worth having
            if stops:
                raise
            self.add(Row(f"{name} stopped", "-", f"{type(e).__name__}: {e}"))

    @property
    def wrong(self):
        faults = self.sanitized[1] if self.sanitized else []
        return [f"- {op} {w}" for op, (_, _, ws, _) in self.checked.items() for w in ws] + [
            f"- compute-sanitizer: {x}" for x in faults]

    def text(self):
        device, (n, n_left) = self.device, (sum(x[i] for x in self.checked.values()) for i in (0, 3))
        n_ops = sum(1 for x in self.checked.values() if x[0])
        sanitized = f"{self.sanitized[0]} ops, {len(self.sanitized[1])} with faults" if self.sanitized else "not run"
        return (f"# {device.description}, {datetime.date.today()}\n\n"
                f"Compute capability {'.'.join(map(str, device.compute_capability))}, "
                f"{device.n_multiprocessors} multiprocessors, {device.memory()[1] / 1e9:.0f} GB, "
                f"{driver_version()}.\n\n"
                f"The op suite compares the results of each kernel with float64: {n} cases of {n_ops} ops, "
                f"{len(self.wrong)} wrong"
                f"{f', {n_left} not begun in time' if n_left else ''}. compute-sanitizer: "
                f"{sanitized}.\n\n" + "\n".join(self.wrong) + "\n\n" + markdown(self.rows) + "\n")

    def save(self):
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(self.text(), encoding="utf-8")


def driver_version():
    file = pathlib.Path("/proc/driver/nvidia/version")
    found = re.search(r"\b(\d{3,}\.[\d.]+)", file.read_text()) if file.exists() else None
    return f"driver {found.group(1)}" if found else "driver unknown"
