"""The output of a run of the suite: failures at once, a row for each finished class, totals at the end.

Every line is flushed, so a run that was stopped shows how far it came.  `Journal` keeps the outcomes in a file from
which a later run goes on.
"""
import collections
import json
import math

from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.json_text import parse_json
from ggjit.tools.suite.runner import FAIL, NOT_SUPPORTED, OK, REFUSED, Outcome

LACKING = "lacking"                             # we refuse what ggml's CPU backend takes
COLUMNS = ("with ggml", "float64 alone", "empty", "both refuse", LACKING, FAIL)         # the first three passed
BAD = (LACKING, FAIL)
START = '{"op": "'                               # of a line of the journal


def verdict(outcome):
    """Column of the table.  empty: a result without elements."""
    if outcome.status == OK:
        return "with ggml" if "ggml" in outcome.checked else "float64 alone" if outcome.checked else "empty"
    return FAIL if outcome.status == FAIL else "both refuse" if outcome.peer else LACKING


class Report:
    """Gathers outcomes of `cases` and prints them to `stream`.  close() also prints the classes that did not end."""

    def __init__(self, cases, stream):
        self.outcomes, self.stream = [], stream
        self.left = collections.Counter(c.family for c in cases)
        self.counts, self.seconds = collections.defaultdict(collections.Counter), collections.Counter()
        self._print(f"{'class':<26}{'cases':>7}" + "".join(f"{c:>15}" for c in COLUMNS) + f"{'s':>9}")

    def add(self, outcome):
        family, column = outcome.case.family, verdict(outcome)
        self.outcomes.append(outcome)
        self.counts[family][column] += 1
        self.seconds[family] += outcome.seconds
        self.left[family] -= 1
        if column in BAD:
            self._print(f"{column}  {outcome.case}: {outcome.error}")
        if not self.left[family]:
            self._row(family, self.counts[family], self.seconds[family])

    def close(self):
        for family, n in self.counts.items():
            if self.left[family]:
                self._row(f"{family} (stopped)", n, self.seconds[family])
        self._row(f"{len(self.counts)} classes", sum(self.counts.values(), collections.Counter()), self.seconds.total())

    def summary(self):
        """Counts by status and by verdict.  gap: cases we lack although ggml's CPU backend takes them."""
        n = collections.Counter(o.status for o in self.outcomes)
        columns = sum(self.counts.values(), collections.Counter())
        return {"ok": n[OK], "fail": n[FAIL], "not_supported": n[NOT_SUPPORTED], "refused": n[REFUSED],
                "gap": columns[LACKING], "checked_by_ggml": columns["with ggml"],
                "checked_by_float64_alone": columns["float64 alone"], "seconds": self.seconds.total(),
                "classes": {family: {c: n[c] for c in COLUMNS} for family, n in sorted(self.counts.items())}}

    def _row(self, name, n, seconds):
        self._print(f"{name:<26}{n.total():>7,}" + "".join(f"{n[c]:>15,}" for c in COLUMNS) + f"{seconds:>9.1f}")

    def _print(self, line):
        print(line, file=self.stream, flush=True)


class Journal:
    """Outcomes in a file, one line of JSON each, under the settings they were made with.

    A case that is in the file with the same settings and passed is not run again.  Errors: ParamError for a file that
    holds something else, before anything is written; OSError as open() raises it.
    """

    def __init__(self, path, settings):
        self.settings, self.known = settings, {}
        self.file = open(path, "a+", encoding="utf-8")
        self.file.seek(0)
        whole, newline, torn = self.file.read().rpartition("\n")
        try:
            for line in whole.splitlines():
                row = parse_json(line)
                self.known[row["index"], row["op"], row["params"], row["settings"]] = row
            if torn[:len(START)] != START[:len(torn)]:
                raise ValueError(torn)
        except (ValueError, TypeError, KeyError):
            self.file.close()
            raise ParamError(f"{path} was not written by `ggjit ops test --resume`; name another file") from None
        if torn:                                        # the rest of a run that was killed while it wrote
            self.file.truncate(len((whole + newline).encode()))

    def passed(self, case):
        """The outcome of the case noted in the file, or None where it is to be run."""
        row = self.known.get((case.index, case.op, case.params, self.settings))
        if row is None:
            return None
        outcome = Outcome(case, row["status"], row["error"], math.inf if row["err"] is None else row["err"],
                          tuple(row["checked"]), row["peer"], row["seconds"])
        return None if verdict(outcome) in BAD else outcome

    def add(self, outcome):
        self.file.write(json.dumps({**outcome.json, "settings": self.settings}) + "\n")
        self.file.flush()

    def close(self):
        self.file.close()
