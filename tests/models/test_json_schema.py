"""JSON Schemas as grammars: what they allow, also in llama.cpp's converter; refusals."""
import json
import random

import pytest
from helpers import random_schemas
from helpers.byte_tokenizer import TOKENIZER, matches
from helpers.llamacpp import asked

from ggjit.models.text.grammar import Grammar, matcher
from ggjit.models.text.json_schema import to_gbnf
from ggjit.ops.core.errors import ParamError

NESTED = {"$defs": {"tree": {"type": "object", "required": ["v"], "properties": {
    "v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}}, "$ref": "#/$defs/tree"}
SCHEMAS = [
    ({}, ["{}", '{"a": [1, -2.5e3, null, "x\\u00e4\\n"]}'], ["1", "{", '{"a":}', '{"a" 1}']),
    ({"type": "string"}, ['""', '"a\\"b"', '"ä"'], ["a", '"', '"\\x"', '"\n"']),
    ({"type": "number"}, ["0", "-1.5", "2e10", "1E-3"], ["01", ".5", "1.", "+1"]),
    ({"type": "boolean"}, ["true"], ["True"]),
    ({"type": "null"}, ["null"], ["nul"]), ({"type": "integer"}, ["-3", "0"], ["1.5", "-", "00"]),
    ({"type": ["string", "null"]}, ["null", '"x"'], ["1"]),
    ({"const": {"a": [1, "é"]}}, ['{"a":[1,"é"]}'], ['{"a":[1]}']),
    ({"enum": ["red", 3, None]}, ['"red"', "3", "null"], ['"blue"', "red"]),
    ({"anyOf": [{"type": "integer"}, {"enum": ["x"]}]}, ["1", '"x"'], ['"y"']),
    ({"oneOf": [{"type": "null"}]}, ["null"], ["0"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"],
     ["[]", "[1,2,3]"]),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, ["[]"], ["[null]"]),
    ({"type": "array"}, ["[1, []]"], ["[1,]"]),
    ({"items": {"type": "null"}}, ["[]", "[null, null]"], ["[1]"]),
    ({"prefixItems": [{"type": "null"}, {"type": "integer"}]},
                                                                   ["[null, 1]"], ["[1]", "[null]"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"ä\\n€"'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^[a-c]{2}(-x|\\.)?$"}, ['"ab"', '"ca-x"', '"aa."'], ['"a"', '"ab-"', '"abc"']),
    ({"type": "string", "format": "date"}, ['"2024-12-31"'], ['"2024-13-01"', '"2024-1-1"']),
    ({"type": "string", "format": "time"}, ['"23:59:59Z"', '"00:00:00.123+01:00"'], ['"24:00:00Z"']),
    ({"type": "string", "format": "date-time"}, ['"2024-12-31T23:59:59Z"'], ['"2024-12-31"']),
    ({"type": "string", "format": "uuid"}, ['"01234567-89ab-cdef-0123-456789abcdef"'], ['"0123"']),
    *(({"type": "integer", **bounds}, [str(i) for i in range(-1200, 1200, 7) if low <= i <= high],
       [str(i) for i in range(-1200, 1200, 7) if not low <= i <= high]) for bounds, low, high in (
        ({"minimum": 0}, 0, 9999), ({"minimum": 17, "maximum": 1023}, 17, 1023), ({"maximum": -5}, -9999, -5),
        ({"exclusiveMinimum": -40, "exclusiveMaximum": 40}, -39, 39),
        ({"minimum": -999, "maximum": -100}, -999, -100))),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"type": "null"}},
      "required": ["b"]}, ['{"b": null}', '{"b":null,"a":1}', '{"b": null, "a": 1, "c": null}'],
     ["{}", '{"a": 1}', '{"b": null, "d": 1}', '{"b": null,}']),
    ({"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}},
     ["{}", '{"a": 1}', '{"b": null}', '{"a":1,"b":null}'],
     ['{"b": null, "a": 1}', '{"a": "x"}', '{,}']),
    ({"properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
     ["{}", '{"ab": null}', '{"ab": null, "a": 1, "abc": 2, "b": 3}', '{"x": 1}'], ['{"ab": 1}', '{"a": null}']),
    ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
    ({"type": "object", "additionalProperties": {"type": "null"}}, ["{}", '{"x": null, "": null}'], ['{"x": 1}']),
    ({"allOf": [{"properties": {"a": {"type": "null"}}}, {"anyOf": [{"properties": {"b": {"type": "null"}}}]}]},
     ['{"a": null}', '{"a": null, "b": null}'], ["{}", '{"b": null}']),
    (NESTED, ['{"v": 1}', '{"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3}]}'], ["{}", '{"v": 1, "kids": [3]}']),
    ({"properties": {"q": {"$ref": "#/definitions/a~1b"}}, "definitions": {"a/b": {"type": "null"}}},
     ['{"q": null}'], ['{"q": 1}'])]


@pytest.mark.parametrize("schema, yes, no", SCHEMAS, ids=lambda s: json.dumps(s)[:60] if isinstance(s, dict) else "")
def test_texts_of_a_schema(schema, yes, no):
    grammar = Grammar(to_gbnf(schema), TOKENIZER)
    assert [t for t in yes if not matches(t, grammar)] == [] and [t for t in no if matches(t, grammar)] == []
    assert matches(yes[0] + "\n  ", grammar)
    for text in yes:
        json.loads(text)


@pytest.mark.peer
@pytest.mark.parametrize("n", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_schemas_allow_what_they_allow_in_llama_cpp(n):
    """Texts of n random schemas, in our grammar and in that of llama.cpp's converter."""
    rng, n_fit, n_texts = random.Random(n), 0, 0
    schemas = [random_schemas.schema(rng) for _ in range(n)]
    found = asked(*(("schema", (json.dumps(s),)) for s in schemas))
    if None in found:
        pytest.skip("the wheel's converter has other names")
    for s, theirs in zip(schemas, found, strict=True):
        grammars = [Grammar(text, TOKENIZER) for text in (to_gbnf(s), theirs)]
        for text in random_schemas.texts(rng, s, 20):
            ours, other = (state >= 0 and g.may_end(state) for g in grammars for state in [g.after(g.start, text)])
            assert ours == other, (text, s)
            n_fit, n_texts = n_fit + ours, n_texts + 1
    assert 0.2 < n_fit / n_texts < 0.9


def test_patterns_are_written_as_json():
    grammar = Grammar(to_gbnf({"pattern": r'^(\w+"|\\|[^a"\n])\d\u00e4\t?$'}), TOKENIZER)
    for text in (r'"ab\"1ä"', r'"\\2ä\t"', r'"b3ä"'):
        assert matches(text, grammar) and json.loads(text)
    assert not any(matches(t, grammar) for t in ('"a1ä"', r'"\"1ä"', '"b"1ä"', r'"\n1ä"', '"b1ä '))


@pytest.mark.parametrize("schema, words", [
    (3, "3 is not a schema"), (False, "False is not a schema"), ("{", "is not JSON"),
    ({"type": "strin"}, "#: no type 'strin'; there are object"),
    ({"properties": {"a": {"type": 3}}}, "#-a: no type 3"), ({"$ref": "#/x"}, "leads nowhere: there is no 'x'"),
    ({"enum": []}, "no values"),
    ({"$ref": "https://x"}, "not a place in this schema"), ({"$ref": "#"}, "matches nothing"),
    ({"anyOf": []}, "a list of schemas"),
    ({"pattern": "a"}, r"begin with \^"), ({"pattern": "^(a$"}, r"\( without \)"), ({"pattern": "^a)$"}, r"\) without"),
    ({"pattern": "^(?=a)$"}, "not supported"), ({"pattern": "^[b-a]$"}, "backwards"),
    ({"pattern": "^*$"}, "something to repeat"),
    ({"pattern": r"^\1$"}, r"not supported"), ({"pattern": "^a{x}$"}, "without numbers"),
    ({"pattern": 3}, "begin with"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems 3"),
    ({"type": "string", "minLength": 3, "maxLength": 1}, "minLength 3"), ({"properties": 3}, "another kind"),
    ({"type": "array", "minItems": "x"}, "another kind"), ("[" * 100_000, "values in each other"),
    ({"type": "integer", "minimum": float("nan")}, "minimum is nan"), ({"type": "integer", "maximum": True}, "is True"),
    ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "allOf in each other"),
    ({"allOf": [{"type": "string"}, {"type": ["integer", "null"]}]}, "exclude one another: integer, null, string"),
    ({"type": "object", "allOf": [{"type": "array"}]}, "exclude one another: array, object"),
    ({"properties": {"a": {}}, "required": "a"}, "required is 'a'")])
def test_what_is_no_schema(schema, words):
    with pytest.raises(ParamError, match=words):
        matcher(TOKENIZER, json_schema=schema)


def test_what_a_grammar_cannot_hold_to_is_warned_of():
    with pytest.warns(UserWarning, match="#: b of required is not one of the properties"):
        to_gbnf({"properties": {"a": {}}, "required": ["a", "b"]})
    with pytest.warns(UserWarning, match="#-a: minimum, multipleOf cannot be held to"):
        to_gbnf({"properties": {"a": {"type": "number", "minimum": 1, "multipleOf": 2, "title": "x"}}})
    with pytest.warns(UserWarning) as told:             # names come with requests to a server, which logs them
        to_gbnf({"type": "object", "x" * 10**6: 1, **{f"keyword {i}": i for i in range(100)}})
    assert len(str(told[0].message)) < 300
