"""LEDGER.md names a test or a reason for every row of parts A2-A8 and A12-A15, and the tests it names exist."""
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
PARTS = {2: 12, 3: 27, 4: 8, 5: 20, 6: 12, 7: 11, 8: 9, 12: 11, 13: 17, 14: 16, 15: 9}


def test_the_ledger_is_complete_and_true():
    rows = dict(re.findall(r"^\| (A\d+\.\d\d) \| (.+) \|$", (HERE / "LEDGER.md").read_text(encoding="utf-8"), re.M))
    assert set(rows) == {f"A{p}.{k:02d}" for p, n in PARTS.items() for k in range(1, n + 1)}
    assert all(len(text) > 8 or text.startswith("as A") for text in rows.values())


def test_every_named_test_exists():
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", (HERE / "LEDGER.md").read_text(encoding="utf-8")))
    assert len(named) > 60
    missing = [(f, t) for f, t in named if f"def {t}(" not in (HERE / f).read_text(encoding="utf-8")]
    assert not missing
