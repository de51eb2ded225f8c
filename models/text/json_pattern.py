r"""Regular expressions of JSON Schema as GBNF: the texts that match, as a JSON string writes them.

    ^a\d{2}$   ->   ([a] [0-9]{2})

What is supported: characters and classes, escapes, groups, alternatives, repetitions.  A match begins and ends with the
text, so ^ and $ are required.
"""
import re

MAX_DEPTH = 100                 # of schemas in schemas, of groups in groups


def literal(text):
    r"""GBNF's literal of a text."""
    return '"' + "".join(_ESCAPES.get(c, c) for c in text) + '"'


_ESCAPES = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


def repetition(low, high):
    """The repetition of low to high (None: any number)."""
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high)) or (
        f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}")


def in_class(c):
    """A code point as a class writes it."""
    return {0x5C: r"\\", 0x5D: r"\]", 0x2D: r"\-", 0x5E: r"\x5E", 0x22: r"\x22"}.get(c) or (
        chr(c) if 0x20 < c < 0x7F else f"\\U{c:08X}")


_SETS = {"d": [(48, 57)], "w": [(48, 57), (65, 90), (95, 95), (97, 122)], "s": [(9, 13), (32, 32)]}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_LAST = 0x10FFFF
_PLAIN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, _LAST))      # code points that a JSON string holds unescaped
# ... and those that it holds as a backslash and a letter
_SHORT = {0x22: '"', 0x5C: "\\", 10: "n", 13: "r", 9: "t", 12: "f", 8: "b"}


def _complement(ranges):
    out, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            out.append((at, low - 1))
        at = max(at, high + 1)
    return out + ([(at, _LAST)] if at <= _LAST else [])


class Pattern:
    """A regular expression, ^...$, as GBNF within a JSON string.  .expression"""

    def __init__(self, pattern, fail):
        self.fail, self.at, self.depth = lambda words: fail(f"pattern {pattern!r}: {words}"), 0, 0
        if not isinstance(pattern, str) or not re.fullmatch(r"\^.*\$", pattern, re.DOTALL):
            self.fail("it has to begin with ^ and end with $, since a text is made by it from beginning to end")
        self.text = pattern[1:-1]
        self.expression = f"({self.ways()})"
        if self.at < len(self.text):
            self.fail(") without (")

    def look(self):
        return self.text[self.at:self.at + 1]

    def take(self, why="it breaks off"):
        if self.at >= len(self.text):
            self.fail(why)
        self.at += 1
        return self.text[self.at - 1]

    def ways(self):
        out = [self.sequence()]
        while self.look() == "|":
            self.at += 1
            out.append(self.sequence())
        return " | ".join(out)

    def sequence(self):
        out = []
        while self.look() not in ("", "|", ")"):
            out.append(self.atom() + self.times())
        return " ".join(out)

    def times(self):
        """The repetition behind an atom, as GBNF writes it; "" for none."""
        c = self.look()
        if c and c in "*+?":
            self.at += 1
            words = c
        elif c == "{":
            end = self.text.find("}", self.at)
            found = re.fullmatch(r"(\d+)(,?)(\d*)", self.text[self.at + 1:end]) if end > 0 else None
            if not found:
                self.fail("{ without numbers and }")
            self.at = end + 1
            low, comma, high = found.groups()
            words = repetition(int(low), int(high) if high else None if comma else int(low))
        else:
            return ""
        if self.look() and self.look() in "?+":         # lazy and possessive ones match the same texts
            self.at += 1
        return words

    def atom(self):
        """One character, set, escape or group."""
        c = self.take()
        if c == "(":
            if self.look() == "?" and not self.text.startswith("?:", self.at):
                self.fail("(?...) other than (?:...) is not supported")
            self.at += 2 * self.text.startswith("?:", self.at)
            self.depth += 1
            if self.depth > MAX_DEPTH:
                self.fail("too many groups in each other")
            inner = self.ways()
            self.take("( without )")
            self.depth -= 1
            return f"({inner})"
        if c == ".":
            return _chars(_complement([(10, 10), (13, 13)]))
        if c == "[":
            return _chars(self.set_())
        if c in "*+?{":
            self.fail(f"{c} without something to repeat")
        if c in "^$":
            self.fail(f"{c} in the middle")
        return _chars(self.escape() if c == "\\" else [(ord(c), ord(c))])

    def escape(self):
        """Ranges of what stands behind a backslash."""
        c = self.take("a \\ at its end")
        if c.lower() in _SETS:
            return _SETS[c] if c in _SETS else _complement(_SETS[c.lower()])
        if c in "xu":
            n = 2 if c == "x" else 4
            digits = self.text[self.at:self.at + n]
            if not re.fullmatch(f"[0-9a-fA-F]{{{n}}}", digits):
                self.fail(f"\\{c} without {n} hexadecimal digits")
            self.at += n
            return [(int(digits, 16), int(digits, 16))]
        if c.isalnum() and c not in _CONTROLS:
            self.fail(f"\\{c} is not supported")
        return [(_CONTROLS.get(c, ord(c)),) * 2]

    def set_(self):
        """Ranges of the characters of [...]."""
        negated = self.look() == "^"
        self.at += negated
        ranges, first = [], True
        while first or self.look() != "]":
            first = False
            if self.look() == "]":                      # "[]" is empty in ECMA's expressions
                break
            c = self.take("[ without ]")
            found = self.escape() if c == "\\" else [(ord(c), ord(c))]
            if self.look() == "-" and self.text[self.at + 1:self.at + 2] not in ("]", "") and len(found) == 1:
                self.at += 1
                c = self.take()
                end = (self.escape() if c == "\\" else [(ord(c), ord(c))])[0][1]
                if end < found[0][0]:
                    self.fail("a range that goes backwards")
                found = [(found[0][0], end)]
            ranges += found
        self.take("[ without ]")
        return _complement(ranges) if negated else ranges


def _chars(ranges):
    """One character out of ranges, as JSON writes it within a string."""
    def has(c):
        return any(low <= c <= high for low, high in ranges)
    plain = [(max(low, a), min(high, b)) for low, high in ranges for a, b in _PLAIN if max(low, a) <= min(high, b)]
    ways = ["[" + "".join(in_class(a) if a == b else f"{in_class(a)}-{in_class(b)}" for a, b in plain) + "]"] \
        if plain else []
    ways += [literal("\\" + short) for c, short in _SHORT.items() if has(c)]
    return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})" if ways else "[]"
