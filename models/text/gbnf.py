"""GBNF, llama.cpp's notation for grammars: text -> rules.

    root  ::= "[" ws (item ("," ws item)*)? "]"         # literals, groups, repetitions
    item  ::= [0-9]+ | [^\\x00-\\x1f"]{2,5} | .           # classes, ranges, any character
    ws    ::= " "* <[7]> !<|end|>                        # a token by id or text; any token but this one

Every repetition and group becomes a rule: x* is r ::= x r | (nothing).  A rule is a list of alternates, an alternate a
list of Chars, Token and Ref.  Source: llama.cpp, the notes in its folder
of grammars.
"""
import bisect
from typing import NamedTuple

from ggjit.core.arguments import nearest
from ggjit.ops.core.errors import ParamError

MAX_REPEATS = 2000              # llama.cpp's limit
MAX_ELEMENTS = 20_000           # most elements that one repetition may stand for
MAX_NESTING = 100               # groups in groups
LAST = 0x10FFFF
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX = {"x": 2, "u": 4, "U": 8}


class Chars(NamedTuple):
    """One character out of ranges, ((first, last), ...): ascending, none touching the next."""
    ranges: tuple


class Token(NamedTuple):
    """One token: the one with this id, or any other if the element is negated."""
    id: int
    other: bool


class Ref(NamedTuple):
    """A reference to a rule: it matches what that rule matches."""
    rule: str


class GrammarRule:
    """`alternates`: lists of elements; `line`: where it is in the text; `name`: the rule of the text it belongs to."""

    def __init__(self, name, line):
        self.name, self.line, self.alternates = name, line, []


def parse(text, token_id, root="root"):
    """{name: GrammarRule} of a grammar, checked: it has a root, every rule is defined, can end, and is not
    left-recursive.

    token_id(text): the id of "<[7]>" or "<text>", None if there is none.  Errors: ParamError with line and rule.
    """
    if not isinstance(text, str):
        raise ParamError(f"grammar is {type(text).__name__}, expected GBNF text")
    parser = _Parser(text, token_id)
    parser.rules_()
    rules = parser.rules
    if root not in rules:
        raise ParamError(f"grammar: there is no rule {root!r}; the text is matched against it; "
                         f"rules are {', '.join(n for n, r in rules.items() if n == r.name) or 'none'}")
    for name, line, where in parser.refs:
        if name not in rules:
            raise ParamError(f"grammar, line {line}: rule {where!r} uses {name!r}, which is not defined"
                             f"{nearest(name, [n for n, r in rules.items() if n == r.name])}; write {name} ::= ...")
    _check_ends(rules, root)
    _check_left_recursion(rules)
    return rules


# ---------------------------------------------------------------- the text
class _Parser:
    """Recursive descent; `at` is the place in the text."""

    def __init__(self, text, token_id):
        self.text, self.at, self.token_id = text + "\0", 0, token_id        # "\0" ends it
        self.rules, self.refs, self.depth = {}, [], 0
        self._lines = [i for i, c in enumerate(text) if c == "\n"]

    def fail(self, words):
        line = self.line()
        found = self.text[self.at:self.at + 20].split("\n")[0].rstrip("\0")
        raise ParamError(f"grammar, line {line}: {words}, found {found!r}" if found else
                         f"grammar, line {line}: {words}, found the end of the "
                         f"{'line' if self.text[self.at] != chr(0) else 'text'}")

    def line(self):
        return bisect.bisect_left(self._lines, self.at) + 1

    def look(self, words):
        return self.text.startswith(words, self.at)

    def skip(self, words, why):
        if not self.look(words):
            self.fail(f"expected {why}")
        self.at += len(words)

    def space(self, newlines):
        """Blanks and comments; line ends only inside of groups and between rules."""
        while self.text[self.at] in (" \t\r\n#" if newlines else " \t#"):
            if self.text[self.at] == "#":
                while self.text[self.at] not in "\r\n\0":
                    self.at += 1
            else:
                self.at += 1

    def name(self):
        start = self.at
        while self.text[self.at].isascii() and (self.text[self.at].isalnum() or self.text[self.at] == "-"):
            self.at += 1
        if start == self.at:
            self.fail("expected the name of a rule (letters, digits, -)")
        return self.text[start:self.at]

    def whole(self):
        start = self.at
        while self.text[self.at] in "0123456789":
            self.at += 1
        if start == self.at:
            self.fail("expected a number")
        return int(self.text[start:self.at])

    def rules_(self):
        """name ::= alternates, line after line, into `rules`."""
        self.space(True)
        while self.at < len(self.text) - 1:
            rule = GrammarRule(self.name(), self.line())
            self.space(False)
            self.skip("::=", f"::= after {rule.name}")
            self.space(True)
            self.rules[rule.name] = rule                    # the last of equal names counts
            self.alternates(rule, rule, False)
            if self.text[self.at] not in "\r\n" and self.at < len(self.text) - 1:
                self.fail(f"expected an element of rule {rule.name!r} or the next line")
            self.space(True)

    def alternates(self, rule, owner, nested):
        rule.alternates = [self.sequence(owner, nested)]
        while self.look("|"):
            self.at += 1
            self.space(True)
            rule.alternates.append(self.sequence(owner, nested))

    def sequence(self, owner, nested):
        """Elements with their repetitions, up to | or ) or the end of the rule."""
        out, last = [], None                                # last: what a repetition would repeat
        while True:
            c = self.text[self.at]
            if c in "*+?{":
                if last is None:
                    self.fail(f"expected something to repeat before {c}")
                low, high = self.repetition()
                if low > MAX_REPEATS:
                    self.fail(f"at most {MAX_REPEATS} repetitions can be asked for")
                high = None if high is None or high > MAX_REPEATS else high
                if len(last) * max(low, high or 0) > MAX_ELEMENTS:
                    self.fail(f"more than {MAX_ELEMENTS} elements to repeat")
                out += last * low + self.repeated(owner, last, low, high)
                last = None
                self.space(nested)
                continue
            found = self.element(owner, c)
            if found is None:
                return out + (last or [])
            out += last or []
            last = found
            self.space(nested)

    def repetition(self):
        """(low, high) of * + ? {m} {m,} {m,n}; high None: no limit."""
        c = self.text[self.at]
        self.at += 1
        if c != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[c]
        self.space(True)
        low = high = self.whole()
        self.space(True)
        if self.look(","):
            self.at += 1
            self.space(True)
            high = self.whole() if self.text[self.at] in "0123456789" else None
            self.space(True)
        self.skip("}", "}")
        if high is not None and high < low:
            self.fail(f"a repetition from {low} to {high}")
        return low, high

    def repeated(self, owner, last, low, high):
        """Elements for up to high - low more of `last`."""
        if high is None:
            name, rule = self.new(owner)
            rule.alternates = [[*last, Ref(name)], []]
            return [Ref(name)]
        more = []
        for _ in range(high - low):
            name, rule = self.new(owner)
            rule.alternates, more = [[*last, *more], []], [Ref(name)]
        return more

    def new(self, owner):
        """A rule of its own, for a part of `owner`: (name, GrammarRule)."""
        name = f"{owner.name}_{len(self.rules)}"
        self.rules[name] = GrammarRule(owner.name, self.line())
        return name, self.rules[name]

    def element(self, owner, c):
        """A list of elements, or None where the sequence ends."""
        if c == '"':
            self.at += 1
            out = []
            while not self.look('"'):
                x = self.char()
                out.append(Chars(((x, x),)))
            self.at += 1
            return out
        if c == "[":
            return [self.char_class()]
        if c == ".":
            self.at += 1
            return [Chars(((0, LAST),))]
        if c in "<!":
            return [self.token()]
        if c == "(":
            self.at, self.depth = self.at + 1, self.depth + 1
            if self.depth > MAX_NESTING:
                self.fail(f"more than {MAX_NESTING} groups in each other")
            self.space(True)
            name, rule = self.new(owner)
            self.alternates(rule, owner, True)
            self.skip(")", ")")
            self.depth -= 1
            return [Ref(name)]
        if c.isascii() and (c.isalnum() or c == "-"):
            line, name = self.line(), self.name()
            self.refs.append((name, line, owner.name))
            return [Ref(name)]
        return None

    def char(self):
        """The code point of a character or an escape."""
        c = self.text[self.at]
        if self.at >= len(self.text) - 1:
            self.fail("expected a closing \" or ]")
        self.at += 1
        if c != "\\":
            return ord(c)
        c = self.text[self.at]
        self.at += 1
        if c in _ESCAPES:
            return ord(_ESCAPES[c])
        n = _HEX.get(c, 0)
        digits = self.text[self.at:self.at + n]
        if not n or len(digits) < n or not all(d in "0123456789abcdefABCDEF" for d in digits) or int(digits, 16) > LAST:
            self.at -= 2
            self.fail("expected an escape: \\n \\r \\t \\\\ \\\" \\[ \\] \\- \\xFF \\uFFFF \\U0010FFFF")
        self.at += n
        return int(digits, 16)

    def char_class(self):
        """[a-z], [^...]"""
        self.at += 1
        negated = self.look("^")
        self.at += negated
        ranges = []
        while not self.look("]"):
            low = high = self.char()
            if self.look("-") and not self.look("-]"):
                self.at += 1
                high = self.char()
                if high < low:
                    self.fail(f"a range from {chr(low)!r} back to {chr(high)!r}")
            ranges.append((low, high))
        self.at += 1
        return Chars(_without(_merged(ranges)) if negated else _merged(ranges))

    def token(self):
        """<a token's text>, or any other one: !<...>"""
        other = self.look("!")
        self.at += other
        self.skip("<", "<, a token")
        start = self.at
        end = self.text.find(">", start)
        if end < 0:
            self.fail("expected > at the end of a token")
        words = f"<{self.text[start:end]}>"
        id = self.token_id(words)
        if id is None:
            self.fail(f"{words} is not a token of this vocabulary")
        self.at = end + 1
        return Token(id, other)


def _merged(ranges):
    out = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(high, out[-1][1])
        else:
            out.append((low, high))
    return tuple(out)


def _without(ranges):
    """All characters but those."""
    edges = [-1, *(x for r in ranges for x in r), LAST + 1]
    return tuple((a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if a + 1 <= b - 1)


# ---------------------------------------------------------------- checks
def _fixed_point(rules, holds):
    """Names of rules one of whose alternates has only elements that hold: rules among these names, and others for which
    holds(element).  Each alternate is looked at once: it is done when the last rule it waits for is found."""
    found, todo, waits = set(), [], {}              # waits: {rule: [[rule, how many rules an alternate of it needs]]}
    for name, rule in rules.items():
        for a in rule.alternates:
            refs = {e.rule for e in a if isinstance(e, Ref)}
            if all(holds(e) for e in a if not isinstance(e, Ref)):
                left = [name, len(refs)]
                for ref in refs:
                    waits.setdefault(ref, []).append(left)
                if not refs:
                    todo.append(name)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            for left in waits.get(name, ()):
                left[1] -= 1
                if not left[1]:
                    todo.append(left[0])
    return found


def _check_ends(rules, root):
    """Every rule that `root` uses matches some text of finite length."""
    ends = _fixed_point(rules, lambda e: e.ranges if isinstance(e, Chars) else True)
    refs = {name: {e.rule for a in rule.alternates for e in a if isinstance(e, Ref)} for name, rule in rules.items()}
    todo, used = [root], {}
    while todo:
        name = todo.pop()
        if name not in used:
            used[name] = None
            todo += refs[name]
    bad = [name for name in used if name not in ends]
    if bad:
        # one that does not fail because of another
        rule = rules[next((name for name in bad if refs[name] <= ends | {name}), bad[0])]
        raise ParamError(f"grammar, line {rule.line}: rule {rule.name!r} matches nothing: each of its alternates "
                         f"holds an empty class [] or needs the rule itself; add an alternate that ends")


def _check_left_recursion(rules):
    """No rule begins with itself.  An edge to the last element of an alternate is harmless: nothing is left to do after
    it (so is x* of an x that may be empty)."""
    empty = _fixed_point(rules, lambda e: False)
    edges = {name: set() for name in rules}                 # (rule, is it the last element?)
    for name, rule in rules.items():
        for a in rule.alternates:
            for i, e in enumerate(a):
                if isinstance(e, Ref):
                    edges[name].add((e.rule, i == len(a) - 1))
                if not (isinstance(e, Ref) and e.rule in empty):
                    break
    for group in _circles({n: {m for m, _ in to} for n, to in edges.items()}):
        for name in group:
            for to, last in edges[name]:
                if to in group and not last:
                    rule = rules[name]
                    raise ParamError(f"grammar, line {rule.line}: rule {rule.name!r} begins with itself, through "
                                     f"{rules[to].name!r} (left recursion); write the repetition as (...)* instead")


def _circles(graph):
    """Strongly connected components of {node: nodes} that hold an edge (Tarjan's algorithm, without recursion)."""
    index, low, stack, on, found = {}, {}, [], set(), []
    for start in graph:
        if start in index:
            continue
        work = [(start, iter(graph[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on.add(start)
        while work:
            node, rest = work[-1]
            for to in rest:
                if to not in index:
                    index[to] = low[to] = len(index)
                    stack.append(to)
                    on.add(to)
                    work.append((to, iter(graph[to])))
                    break
                if to in on:
                    low[node] = min(low[node], index[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group = {stack.pop()}
                    while node not in group:
                        group.add(stack.pop())
                    on -= group
                    if len(group) > 1 or node in graph[node]:
                        found.append(group)
    return found
