"""JSON Schema -> GBNF: the texts that are JSON of a schema, with the blanks that llama.cpp allows.

    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        root ::= "{" space "\\"a\\"" space ":" space integer "}" space

Properties come in the order of the schema; without additionalProperties there are no others.  Keywords that no grammar
of this kind can hold a text to (a number's minimum, uniqueItems ...) are warned of.  Source: llama.cpp's
json_schema_to_grammar for what is accepted, https://json-schema.org for what it means.
"""
import json
import math
import re
import urllib.parse

from ggjit.models.text.json_pattern import MAX_DEPTH, Pattern, in_class, literal, repetition
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.user_warnings import warn

CHAR = r'[^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})'
PRIMITIVES = {
    "space": r'| " " | "\n"{1,2} [ \t]{0,20}',
    "char": CHAR,
    "string": r'"\"" char* "\"" space',
    "boolean": '("true" | "false") space',
    "null": '"null" space',
    "integral-part": "[0] | [1-9] [0-9]{0,15}",
    "number": '"-"? integral-part ("." [0-9]{1,16})? ([eE] [-+]? integral-part)? space',
    "integer": '"-"? integral-part space',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" space (string ":" space value ("," space string ":" space value)*)? "}" space',
    "array": '"[" space (value ("," space value)*)? "]" space',
    "date": '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [1-2] [0-9] | "3" [0-1])',
    "time": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})? '
            '("Z" | [+-] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])',
    "uuid": '[0-9a-fA-F]{8} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{12}'}
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
FORMATS = {"date": "date", "time": "time", "date-time": 'date "T" time'} | {f"uuid{n}": "uuid" for n in ("", *"12345")}
MAX_DIGITS = 16                 # of an integer
# keywords that do not restrict the text, or are read together with another keyword
SILENT = {"title", "description", "default", "examples", "$schema", "$id", "$anchor", "$comment", "$defs",
          "definitions", "deprecated", "readOnly", "writeOnly", "type", "required", "additionalProperties"}
_REFERENCE = re.compile("[a-z][a-z-]*")


def to_gbnf(schema):
    """GBNF text of a schema: a dict, True, or JSON text of one.  Errors: ParamError with the place in the schema."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as e:
            raise ParamError(f"json_schema is not JSON: {e}") from None
        except RecursionError:
            raise ParamError(f"json_schema: more than {MAX_DEPTH} values in each other") from None
    return _Schema(schema).text()


class _Schema:
    def __init__(self, schema):
        self.schema, self.rules, self.refs, self.depth = schema, {}, {}, 0
        self.rules["root"] = None                       # no other rule may take this name
        self.rules["root"] = self.visit(schema, "root")

    def text(self):
        todo, used = [*self.rules.values()], dict(self.rules)
        while todo:                                     # the primitives that are used, directly or by others
            for name in _REFERENCE.findall(re.sub(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', " ", todo.pop())):
                if name in PRIMITIVES and name not in used:
                    used[name] = PRIMITIVES[name]
                    todo.append(PRIMITIVES[name])
        return "".join(f"{name} ::= {rule}\n" for name, rule in used.items())

    def rule(self, name, expression):
        """The name of a rule for an expression."""
        name = self.free(name)
        self.rules[name] = expression
        return name

    def free(self, name):
        """The name, changed where another rule has it."""
        name = base = re.sub("[^a-zA-Z0-9-]+", "-", name)
        n = 0
        while name in self.rules or name in PRIMITIVES:
            name, n = f"{base}{n}", n + 1
        return name

    def fail(self, at, words):
        raise ParamError(f"json_schema, {at.replace('root', '#', 1)}: {words}")

    # ---------------------------------------------------------------- schemas
    def visit(self, s, at):
        """The expression of a schema.  at: where it is, "root-properties-a"."""
        if s is True:
            return "value"
        if not isinstance(s, dict):
            self.fail(at, f"{repr(s)[:60]} is not a schema that a text can fit; expected an object, as "
                          '{"type": "string"}')
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(at[:60], f"more than {MAX_DEPTH} schemas in each other")
        try:
            return self.expression(s, at)
        except (TypeError, AttributeError, ValueError) as e:
            if isinstance(e, ParamError):
                raise
            self.fail(at, f"a keyword has a value of another kind than it should ({e})")
        finally:
            self.depth -= 1

    def expression(self, s, at):
        """That of a schema that is an object: by its reference, its alternatives, its values or its type."""
        kind = s.get("type")
        for keyword, read in (("$ref", self.reference), ("oneOf", self.union), ("anyOf", self.union)):
            if keyword in s:
                self.unread(s, {keyword}, at)
                return read(s[keyword], f"{at}-{keyword}")
        if isinstance(kind, list):
            return self.union([s | {"type": t} for t in kind], at)
        if kind is not None and kind not in TYPES:
            self.fail(at, f"no type {kind!r}; there are {', '.join(TYPES)}")
        if "const" in s:
            return f"{literal(_json(s['const']))} space"
        if "enum" in s:
            if not s["enum"]:
                self.fail(at, "enum has no values")
            return f"({' | '.join(literal(_json(v)) for v in s['enum'])}) space"
        if kind is None:
            kind = next((k for k, words in (
                ("object", ("properties", "additionalProperties", "allOf")), ("array", ("items", "prefixItems")),
                ("string", ("pattern", "format"))) if any(w in s for w in words)), None)
        if kind in ("object", "array", "string", "integer"):
            return getattr(self, kind)(s, at)
        self.unread(s, set(), at)
        return kind or ("value" if s else "object")

    def unread(self, s, read, at):
        """Warn of keywords that are ignored."""
        left = [k for k in s if k not in SILENT | read]
        if left:
            self.warn(at, left, "cannot be held to by a grammar; the text may break it")

    def warn(self, at, names, what):
        """Names and places come with requests: of long ones the first characters, of many the first few."""
        shown = ", ".join(name if len(name) <= 40 else f"{name[:40]}..." for name in names[:4])
        warn(f"json_schema, {at.replace('root', '#', 1)[:80]}: {shown}{', ...' * (len(names) > 4)} {what}")

    def union(self, schemas, at):
        if not isinstance(schemas, list) or not schemas:
            self.fail(at, "expected a list of schemas")
        return "(" + " | ".join(self.rule(f"{at}-{i}", self.visit(s, f"{at}-{i}")) for i, s in enumerate(schemas)) + ")"

    def reference(self, pointer, at):
        if pointer not in self.refs:
            target = self.target(pointer, at)
            name = self.refs[pointer] = self.free("ref" + pointer.lstrip("#"))
            self.rules[name] = None                     # a schema may refer to itself
            self.rules[name] = self.visit(target, name)
        return self.refs[pointer]

    def target(self, pointer, at):
        """The schema at "#/a/b"."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            self.fail(at, f"{pointer!r} is not a place in this schema; references begin with #/")
        found = self.schema
        for key in pointer.split("/")[1:]:
            key = urllib.parse.unquote(key).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                self.fail(at, f"{pointer!r} leads nowhere: there is no {key!r}")
        return found

    # ---------------------------------------------------------------- objects and arrays
    def object(self, s, at):
        """{"a": ..., "b": ...}: the names in the order of the schema, then others where they are allowed."""
        s = self.joined(s, at)
        if "enum" in s:
            return self.expression({"enum": s["enum"]}, at)
        self.unread(s, {"properties"}, at)
        properties, more = s.get("properties", {}), s.get("additionalProperties", False)
        required = self.required(s, at)
        left = [name for name in required if name not in properties]
        if left:
            self.warn(at, left, "of required is not one of the properties; the text may leave it out")
        if not properties and (more is True or not {"properties", "additionalProperties"} & {*s}):
            return "object"         # with empty properties, the arguments of a function without any, it is "{}"
        names = {key: self.rule(f"{at}-{key}-kv", f'{literal(_json(key))} space ":" space '
                                + self.rule(f"{at}-{key}", self.visit(value, f"{at}-{key}")))
                 for key, value in properties.items()}
        needed = [names[key] for key in properties if key in required]
        optional = [(names[key], "?") for key in properties if key not in required]
        if more is not False:
            value = self.rule(f"{at}-additional", self.visit(more, f"{at}-additional"))
            key = self.rule(f"{at}-other-key", _other_string(properties)) if properties else "string"
            optional.append((self.rule(f"{at}-additional-kv", f'{key} ":" space {value}'), "*"))
        return '"{" space ' + self.members(needed, optional, at) + ' "}" space'

    def required(self, s, at):
        """The names that have to be there."""
        names = s.get("required", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.fail(at, f"required is {names!r}, expected a list of names")
        return names

    def members(self, needed, optional, at):
        """What is between the braces: all of `needed`, then some of `optional`, with commas between."""
        rest, firsts = "", []                           # rest: a rule for the later ones, each with a comma before it
        for name, times in reversed(optional):
            again = f' ("," space {name})*' if times == "*" else ""
            firsts.insert(0, f"{name}{again} {rest}".rstrip())
            rest = self.rule(f"{at}-rest", f'("," space {name}){times} {rest}'.rstrip())
        if needed:
            return ' "," space '.join(needed) + (f" {rest}" if rest else "")
        return f"({' | '.join(firsts)})?" if firsts else ""

    def joined(self, s, at):
        """The schema with those of its allOf: their properties together, what all enums have in common."""
        parts = s.get("allOf")
        if parts is None:
            return s
        if at.count("-allOf-") > MAX_DEPTH:
            self.fail(at[:60], f"more than {MAX_DEPTH} allOf in each other")
        out = {k: v for k, v in s.items() if k != "allOf"}
        self.check_types([s, *parts], at)
        for i, part in enumerate(parts):
            for options in ([(p, False) for p in part["anyOf"]] if "anyOf" in part else [(part, True)]):
                self.join(out, *options, f"{at}-allOf-{i}")
        return out

    def check_types(self, schemas, at):
        """Refuse an allOf whose types exclude one another: nothing fits it."""
        stated = [s["type"] for s in schemas if isinstance(s, dict) and isinstance(s.get("type"), str | list)]
        stated = [{t} if isinstance(t, str) else {x for x in t if isinstance(x, str)} for t in stated]
        wide = [t | {"integer"} if "number" in t else t for t in stated]
        if wide and not set.intersection(*wide):
            self.fail(at, f"allOf asks for types that exclude one another: {', '.join(sorted(set.union(*stated)))}")

    def join(self, out, part, is_needed, at):
        """Add a part of an allOf to the schema `out`.  is_needed: are its properties required where it does not say?"""
        seen = set()
        while "$ref" in part and part["$ref"] not in seen:
            seen.add(part["$ref"])
            part = self.target(part["$ref"], at)
        part = self.joined(part, at)
        if "enum" in part:
            out["enum"] = [v for v in out.get("enum", part["enum"]) if v in part["enum"]]
        out["properties"] = out.get("properties", {}) | part.get("properties", {})
        if is_needed:
            out["required"] = [*out.get("required", ()), *part.get("required", part.get("properties", ()))]
        if "additionalProperties" in part:
            out.setdefault("additionalProperties", part["additionalProperties"])
        self.unread(part, {"properties", "enum"}, at)

    def array(self, s, at):
        """The grammar of an array: one schema for all items, or one schema for each."""
        self.unread(s, {"items", "prefixItems", "minItems", "maxItems"}, at)
        items = s.get("items", s.get("prefixItems"))
        if "prefixItems" in s or isinstance(items, list):
            items = s.get("prefixItems", items)
            members = [self.rule(f"{at}-{i}", self.visit(item, f"{at}-{i}")) for i, item in enumerate(items)]
            return '"[" space ' + ' "," space '.join(members) + ' "]" space'
        low, high = int(s.get("minItems", 0)), s.get("maxItems")
        if items is None and not low and high is None:
            return "array"
        item = self.rule(f"{at}-item", self.visit(True if items is None else items, f"{at}-item"))
        if high is not None and int(high) < low:
            self.fail(at, f"minItems {low} is above maxItems {high}")
        if high is not None and int(high) == 0:
            return '"[" space "]" space'
        more = f'("," space {item})' + repetition(max(low - 1, 0), None if high is None else int(high) - 1)
        return '"[" space ' + (f"{item} {more}" if low else f"({item} {more})?") + ' "]" space'

    # ---------------------------------------------------------------- strings and numbers
    def string(self, s, at):
        """"...": of a pattern, a format or a length."""
        if "pattern" in s:
            self.unread(s, {"pattern"}, at)
            return rf'"\"" {Pattern(s["pattern"], lambda words: self.fail(at, words)).expression} "\"" space'
        if s.get("format") in FORMATS:
            self.unread(s, {"format"}, at)
            return rf'"\"" {FORMATS[s["format"]]} "\"" space'
        self.unread(s, {"minLength", "maxLength"}, at)
        low, high = int(s.get("minLength", 0)), s.get("maxLength")
        if high is not None and int(high) < low:
            self.fail(at, f"minLength {low} is above maxLength {high}")
        return rf'"\"" char{repetition(low, None if high is None else int(high))} "\"" space'

    def integer(self, s, at):
        """A whole number within its bounds."""
        bounds = {"minimum": 0, "exclusiveMinimum": 1, "maximum": 0, "exclusiveMaximum": -1}
        self.unread(s, set(bounds), at)
        if not bounds.keys() & s.keys():
            return "integer"
        for k in bounds.keys() & s.keys():
            if type(s[k]) not in (int, float) or not abs(s[k]) < math.inf:
                self.fail(at, f"{k} is {s[k]!r}, expected a number")
        most = 10 ** MAX_DIGITS - 1
        # ceil for the lower, floor for the upper ones: bounds may be numbers with decimals
        low = max([-most, *(-(-s[k] // 1) + n if k == "minimum" else s[k] // 1 + 1
                            for k, n in bounds.items() if k in s and "inimum" in k)])
        high = min([most, *(s[k] // 1 if k == "maximum" else -(-s[k] // 1) - 1
                            for k in bounds if k in s and "aximum" in k)])
        if low > high:
            self.fail(at, f"no integer is at least {low} and at most {high}")
        return f"({_integers(int(low), int(high))}) space"


def _json(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _other_string(names):
    """A JSON string that is not one of `names`."""
    trie = {}
    for name in names:
        node = trie
        for c in _json(name)[1:-1]:
            node = node.setdefault(c, {})
        node[""] = {}                                   # marks that a name ends at this node

    def after(node):
        children = [c for c in node if c]
        ways = [f"[{in_class(ord(c))}] ({after(node[c])})" for c in children]
        ways.append(rf'[^"\\\x7F\x00-\x1F{"".join(in_class(ord(c)) for c in children)}] char*')
        if "\\" not in children:
            ways.append(r'"\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) char*')
        return " | ".join(ways) + (" | " if "" not in node else "")
    return rf'"\"" ({after(trie)}) "\"" space'


# ---------------------------------------------------------------- integers
def _integers(low, high):
    """Decimal texts of the integers from low to high."""
    ways = []
    if low < 0:
        ways.append(f'"-" ({_naturals(max(-high, 1), -low)})')
    if high >= 0:
        ways.append(_naturals(max(low, 0), high))
    return " | ".join(ways)


def _naturals(low, high):
    ways = []
    for n in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (n - 1) if n > 1 else 0), min(high, 10 ** n - 1)
        ways.append(_digits(str(first), str(last)))
    return " | ".join(ways)


def _digits(low, high):
    """Texts of as many digits from `low` to `high`."""
    n = len(low) - 1
    if low == high:
        return f'"{low}"'
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return f"[{low[0]}-{high[0]}]" + (f" [0-9]{{{n}}}" if n else "")
    if low[0] == high[0]:
        return f'"{low[0]}" ({_digits(low[1:], high[1:])})'
    ways = [f'"{low[0]}" ({_digits(low[1:], "9" * n)})']
    if int(low[0]) + 1 < int(high[0]):
        ways.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] [0-9]{{{n}}}")
    return " | ".join([*ways, f'"{high[0]}" ({_digits("0" * n, high[1:])})'])
