"""Random JSON Schemas of what both llama.cpp and ggjit turn into grammars, and values that mostly fit them.

Left out is what llama.cpp takes less exactly: `\\d` and `.` in patterns, classes with quotes in them, lower bounds
above 99.
"""
import json

WORDS = ["", "a", "ab", "x y", "ä", "1", '"', "\\", "2024-12-31", "aab", "b1"]
NAMES = ["a", "b", "ab", "c d", "ä"]
SCALARS = "string", "number", "integer", "boolean", "null"
PATTERNS = {"^a+b?$": ["ab", "aa", "abb"], "^[a-c]{2,3}$": ["cab", "a", "bcc"], "^(ab|b)1*$": ["ab11", "b", "a1"],
            "^[^\"\\\\a]?b$": ["b", "xb", "ab"]}           # with texts that do and do not match
FORMATS = {"date": ["2024-12-31", "2024-13-01"], "time": ["23:59:59Z", "23:59:59.500+01:00", "25:00:00Z"],
           "date-time": ["2024-12-31T23:59:59Z", "2024-12-31"], "uuid": ["01234567-89ab-cdef-0123-456789abcdef", "0"]}
BOUNDS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def schema(rng, depth=2):
    kind = rng.choice([*SCALARS, "enum", "const", "lengths", "bounds", "pattern", "format",
                       *["array", "tuple", "object", "one of", "types"] * 2 * (depth > 0)])
    if kind in SCALARS:
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["a", "ab", 1, 2.5, None, True, "x y", [1], {"a": 1}], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["a", 3, None, False, [1, "a"]])}
    if kind in ("pattern", "format"):
        return {"type": "string", kind: rng.choice([*(PATTERNS if kind == "pattern" else FORMATS)])}
    if kind == "types":
        return {"type": rng.sample(SCALARS, 2)}
    if kind == "one of":
        return {rng.choice(["anyOf", "oneOf"]): [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "object":
        return _object(rng, depth)
    low = rng.randint(-99, 99) if kind == "bounds" else rng.randint(0, 2)
    ends = [(rng.choice(BOUNDS[0]), low), (rng.choice(BOUNDS[1]), low + rng.randint(2, 200))] if kind == "bounds" else \
        [("minLength", low), ("maxLength", low + rng.randint(0, 3))] if kind == "lengths" else \
        [("minItems", low), ("maxItems", low + rng.randint(0, 2))]
    of = {"bounds": {"type": "integer"}, "lengths": {"type": "string"}}.get(kind)
    return (of or {"type": "array", "items": schema(rng, depth - 1)}) | dict(e for e in ends if rng.random() < 0.7)


def _object(rng, depth):
    names = rng.sample(NAMES, rng.randint(0, 3))
    found = {"type": "object", "properties": {name: schema(rng, depth - 1) for name in names}}
    if names and rng.random() < 0.7:
        found["required"] = rng.sample(names, rng.randint(1, len(names)))
    if rng.random() < 0.6:
        found["additionalProperties"] = rng.choice([True, False, schema(rng, 0)])
    return found


def anything(rng, depth=2):
    kind = rng.choice(["text", "number", "literal", *["array", "object"] * (depth > 0)])
    if kind == "array":
        return [anything(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == "object":
        return {rng.choice([*NAMES, "z"]): anything(rng, depth - 1) for _ in range(rng.randint(0, 3))}
    return rng.choice({"text": WORDS, "number": [0.5, -2.25, 1e10, 0, -1, 17, 99, 250], "literal": [True, None]}[kind])


def value(rng, s):
    if rng.random() < 0.12:
        return anything(rng)
    if "enum" in s or "const" in s:
        return rng.choice(s.get("enum") or [s["const"]])
    for key in ("anyOf", "oneOf"):
        if key in s:
            return value(rng, rng.choice(s[key]))
    kind = s["type"] if isinstance(s["type"], str) else rng.choice(s["type"])
    if kind == "array" and "prefixItems" in s:
        return [value(rng, item) for item in s["prefixItems"]]
    if kind == "array":
        return [value(rng, s["items"]) for _ in range(rng.randint(s.get("minItems", 0), s.get("maxItems", 2)))]
    if kind == "string":
        return rng.choice(PATTERNS.get(s.get("pattern")) or FORMATS.get(s.get("format")) or WORDS)
    if kind == "integer":
        low, high = (next((s[name] for name in names if name in s), None) for names in BOUNDS)
        return rng.choice([x + d for x in (low, high) if x is not None for d in (-1, 0, 1, 7)] or [0, 12, -5])
    if kind != "object":
        return {"number": rng.choice([0.5, -2.25, 1e10, 3]), "boolean": rng.random() < 0.5, "null": None}[kind]
    found = {n: value(rng, of) for n, of in s["properties"].items() if n in s.get("required", ()) or rng.random() < 0.5}
    more = s.get("additionalProperties")
    if more and rng.random() < 0.6:
        found[rng.choice(["z", "abc", "a b"])] = anything(rng, 1) if more is True else value(rng, more)
    return found


def texts(rng, s, n):
    """n JSON texts, most of which fit the schema, in several ways of writing."""
    ways = [{"separators": (",", ":")}, {}, {"indent": 2}]
    return sorted({json.dumps(value(rng, s), ensure_ascii=False, **rng.choice(ways)) for _ in range(n)})
