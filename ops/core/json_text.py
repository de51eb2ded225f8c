"""Parses JSON from outside; every fault of it is a ValueError."""
import json
import math


def parse_json(text, finite=False):
    """What json.loads makes of a text.  finite: NaN, Infinity and numbers beyond float64, which no JSON can repeat, are
    errors.  Errors: ValueError, for text that nests too deeply too."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite) if finite else json.loads(text)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def _finite(text):
    x = float(text)
    if not math.isfinite(x):
        raise ValueError(f"{text[:20]} is not a finite number")
    return x
