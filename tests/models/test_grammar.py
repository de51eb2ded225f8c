"""Grammars: what they allow, against a reference that tries everything and against llama.cpp; refusals."""
import json
import random
import re
import resource
import sys
import types

import numpy as np
import pytest
from helpers import vocabularies
from helpers.byte_tokenizer import ID, PIECES, TOKENIZER, WORDS, matches
from helpers.llamacpp import asked
from helpers.timing import processor_time
from hypothesis import given, settings
from hypothesis import strategies as st

from ggjit.models.files.gguf import GGUFFile
from ggjit.models.text.grammar import Grammar, Matcher, grammar_of, matcher
from ggjit.models.text.sampling import Sampler
from ggjit.models.text.token_trie import TokenTrie, completions, split
from ggjit.models.text.tokenizer import Tokenizer
from ggjit.ops.core.errors import ParamError


# ---------------------------------------------------------------- the notation
@pytest.mark.parametrize("text, yes, no", [
    ('root ::= "a" "bc"', ["abc"], ["", "a", "ab", "abcd"]),
    ('root ::= "a" | "b" "c" | ""', ["", "a", "bc"], ["b", "c"]),
    ("root ::= [a-c]", ["a", "b", "c"], ["d", "ab"]), ("root ::= [^a-c]", ["d", "ä"], ["a", "c", ""]),
    ("root ::= [a-]", ["a", "-"], ["b"]), (r"root ::= [\]\[\-\\]", list("][-\\"), ["^"]),
    ("root ::= .", ["a", "\n"], [""]),
    (r'root ::= "\x41\u00e4\U0001F600\n\t\r\"\\"', ["Aä😀\n\t\r\"\\"], ["A"]), ("root ::= [^]", ["a"], [""]),
    ('root ::= "ab"*', ["", "abab"], ["aba"]), ('root ::= ("a" | "b")+', ["a", "bab"], [""]),
    ("root ::= [ab]?", ["", "b"], ["ab"]),
    ('root ::= "a"{2}', ["aa"], ["a", "aaa"]), ('root ::= "a"{2,}', ["aa", "aaaa"], ["a"]),
    ('root ::= "a"{ 1 , 3 } "b"', ["ab", "aaab"], ["b", "aaaab"]), ('root ::= "a"{0,0} "b"', ["b"], ["ab"]),
    ('root ::= ("a"{2} | "b"){2}', ["bb", "aab", "aaaa"], ["aa", "ab"]), ('root ::= ("a"?)* "b"', ["b", "aab"], ["a"]),
    ('root ::= x-1 x-1\nx-1 ::= "a" |\n  "b"\n', ["ab", "bb"], ["a"]),
    ('# c\nroot ::= ( "a" # d ) "\n  "b" ) # e\n\n', ["ab"], ["a"]),
    ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)", "()"]),
    ('root ::= "a" root "b" root | ""', ["", "aabb", "abab"], ["ba"]),
    ('root::="a"\r\n\troot2 ::= "b"', ["a"], ["b"]), ("root ::= [a-zä-ü0-9_]{2}", ["aä", "_9"], ["A_", "ý1"])])
def test_the_notation(text, yes, no):
    grammar = Grammar(text, TOKENIZER)
    assert [t for t in yes if not matches(t, grammar)] == [] and [t for t in no if matches(t, grammar)] == []


@pytest.mark.parametrize("text, words", [
    (3, "grammar is int"), ("", "no rule 'root'; .* rules are none"),
    ('rot ::= "a"', "no rule 'root'; .* rules are rot"),
    ('root ::= "a"\n\n  x y', "line 3: expected ::= after x, found 'y'"), ("root ::= itm\nitem ::= root",
        r"line 1: rule 'root' uses 'itm', .*mean item\?"),
    ('root ::= "a', 'line 1: expected a closing " or ], found the end of the text'), ("root ::= [a", "closing"),
    ('root ::= "a\\q"', "line 1: expected an escape"), ('root ::= "\\x4"', "escape"),
    ('root ::= "\\UFFFFFFFF"', "escape"),
    ('root ::= ("a"', r"line 1: expected \), found the end"), ('root ::= "a" )', r"found '\)'"),
    ("root ::= *", "something to repeat"),
    ('root ::= "a"**', "something to repeat"), ('root ::= "a"{2,1}', "from 2 to 1"), ('root ::= "a"{x}', "a number"),
    ('root ::= "a"{5000}', "at most 2000"), ("root ::= [z-a]", "from 'z' back to 'a'"), ("root ::= a_b", "found '_b'"),
    ('root ::= "a"\nb ::= b "x" | "y"', "line 2: rule 'b' begins with itself"),
    ('root ::= a\na ::= b "x"\nb ::= c? a | "y"\nc ::= "z"', "rule '[ab]' begins with itself, through '[ab]'"),
    ('root ::= (root "a")? "b"', "begins with itself"), ('root ::= "a" root', "rule 'root' matches nothing"),
    ('root ::= "a" x\nx ::= []', "line 2: rule 'x' matches nothing"), ("root ::= <[999]>", r"<\[999\]> is not a token"),
    ("root ::= <none>", "<none> is not a token"), ("root ::= <ab", "expected > at"),
    ("root ::= " + "(" * 200, "more than 100 groups"),
    ('root ::= "' + "a" * 100 + '"{500}', "elements to repeat")])
def test_what_is_no_grammar(text, words):
    with pytest.raises(ParamError, match=words):
        Grammar(text, TOKENIZER)


def allowed(m):
    return {PIECES[i] for i in np.flatnonzero(m.mask())}


def test_characters_may_be_cut():
    m = Matcher(Grammar('root ::= [ä€] "b"', TOKENIZER))
    assert allowed(m) == {b"\xc3", b"\xc3\xa4", b"\xe2", b"\xe2\x82"}
    m.accept(ID[b"\xe2\x82"])
    assert allowed(m) == {b"\xac"} and not m.is_over
    m.accept(ID[b"\xac"])
    m.accept(ID[b"b"])
    assert allowed(m) == {b""} and m.is_over
    m.reset()
    m.accept(ID[b"\xc3"])
    second = m.copy()
    m.accept(ID[b"\xa4b"])
    assert m.is_over and not second.is_over and allowed(second) == {b"\xa4", b"\xa4b"}


def test_tokens_by_id_and_text():
    m = Matcher(Grammar(f"root ::= <[{ID[b'ab']}]> !<[{ID[b'a']}]> | \"aa\"", TOKENIZER))
    assert allowed(m) == {b"ab", b"a"}
    m.accept(ID[b"ab"])
    assert allowed(m) == set(PIECES) - {b"", b"a"}
    m.accept(ID[b"\xff"])
    assert m.is_over


NAMES = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize("n, last", [(12, '"q"?'), (24, '"q"?'), (24, '"q"'), (24, '("q"|"r"|"qr")*')])
def test_rules_that_double_are_refused_before_they_fill_the_memory(n, last):
    """2^n ways to read a text: the limit holds while stacks are made, and for a second caller, too."""
    text = "root ::= a\n" + "\n".join(f"{NAMES[k]} ::= {NAMES[k + 1]} {NAMES[k + 1]}" for k in range(n)) + \
        f"\n{NAMES[n]} ::= {last}"
    assert len(text) < 500
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with processor_time() as spent:
        for _ in range(2):
            try:
                m = Matcher(Grammar(text, TOKENIZER))
                for _ in range(6):
                    m.mask()
                    m.accept_text(b"q")
            except ParamError as e:
                assert "more than 5000 ways" in str(e)
            else:
                assert last == '"q"' or n == 12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10      # KiB
    assert spent.seconds < 10


def test_dead_ends():
    few = types.SimpleNamespace(n_vocab=3, stop_ids=frozenset(), piece=[b"a", b"b", b"\xc3"].__getitem__)
    m = Matcher(Grammar('root ::= "a" word\nword ::= [x-z] | "q"', TokenlessKey(few)))
    m.accept(0)
    with pytest.raises(ParamError, match=r"dead end: .*('q'|\[x-z\]) \(rule word, line 2\)"):
        m.mask()
    with pytest.raises(ParamError, match="token 1 does not fit the grammar; expected is"):
        m.accept(1)
    sampler = Sampler(grammar=Matcher(Grammar('root ::= "q"', TokenlessKey(few))), temp=0)
    with pytest.raises(ParamError, match="dead end"):
        sampler.sample(np.zeros(3))
    m = Matcher(Grammar('root ::= "a" | "b"', TOKENIZER))
    with pytest.raises(ParamError, match="logit_bias rules out"):
        Sampler(grammar=m, logit_bias={ID[b"a"]: -np.inf, ID[b"b"]: -np.inf}).sample(np.zeros(len(PIECES)))


class TokenlessKey:
    """A tokenizer of pieces alone."""
    def __init__(self, facts):
        self.n_vocab, self.stop_ids, self.piece = facts.n_vocab, facts.stop_ids, facts.piece


def test_an_ambiguous_grammar_stays_small_or_is_refused():
    m = Matcher(Grammar('root ::= (a | a | a)*\na ::= "a"* "a"', TOKENIZER))
    for _ in range(50):
        m.accept(ID[b"a"])
    assert b"ab" not in allowed(m) and b"a" in allowed(m)


def test_the_sampler_draws_within_the_grammar():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(len(PIECES))
    off = dict(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)
    sampler = Sampler(grammar=Matcher(Grammar('root ::= [ab]+ "1"', TOKENIZER)), seed=0, **off)
    ids, p = sampler.probabilities(logits)
    assert {PIECES[i] for i in ids} == {b"a", b"b", b"ab", b"ba", b"aab"}
    want = np.exp(logits[ids]) / np.exp(logits[ids]).sum()
    np.testing.assert_allclose(p, want, rtol=1e-12)
    for options in (off, dict(temp=0), dict(mirostat=2), {}):
        sampler = Sampler(grammar=matcher(TOKENIZER, 'root ::= [ab]{2,4} "12"'), seed=3, **options)
        said = b""
        while not sampler.grammar.is_over:
            said += PIECES[sampler.sample(rng.standard_normal(len(PIECES)))]
        assert said.endswith(b"12") and 2 <= len(said) - 2 <= 4 and set(said[:-2]) <= set(b"ab")
    sampler.reset()
    assert not sampler.grammar.is_over


@pytest.mark.parametrize("options", [{}, dict(temp=0), dict(top_k=3), dict(top_k=200)], ids=str)
def test_trying_the_likeliest_gives_what_the_mask_gives(options):
    """The first time in a state the likeliest tokens are tried, later there is a mask."""
    rng = np.random.default_rng(1)
    for text in ("root ::= [a-d]+", "root ::= .", 'root ::= "ab" | "b" | [ -z]', "root ::= [ä-ü] [a-z]"):
        for logits in (rng.standard_normal(len(PIECES)), rng.integers(0, 3, len(PIECES)).astype(float)):
            sampler = Sampler(grammar=Matcher(Grammar(text, TOKENIZER)), seed=1, **options)
            (ids, p), (later, q) = sampler.probabilities(logits), sampler.probabilities(logits)
            assert not sampler.grammar.is_new() and ids.tolist() == later.tolist() and p.tolist() == q.tolist()
            copied = sampler.copy()
            assert sampler.sample(logits) == copied.sample(logits) and sampler.grammar is not copied.grammar


def test_the_tree_holds_every_token():
    trie = TokenTrie(PIECES)
    texts = [""] * len(trie.code_points)
    for node in range(len(texts)):
        for child in range(trie.first_child[node], trie.first_child[node] + trie.n_children[node]):
            texts[child] = texts[node] + chr(trie.code_points[child])
    assert len(set(texts)) == len(texts)
    found = {id: texts[node].encode() for node, id in trie.ends.T} | {
        id: texts[node].encode() + split(PIECES[id])[1] for node, id, *_ in trie.tails.T}
    assert found == {i: p for i, p in enumerate(PIECES) if p and split(p)[0] is not None}
    assert {PIECES[i] for i in trie.continues} >= {b"\xa4b", b"\x82\xac", b"\x80"}
    assert len(TokenTrie([b"", b"\xff"]).code_points) == 1


@given(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), st.integers(1, 3))
def test_completions_of_cut_characters(c, n):
    data = c.encode()
    if n < len(data):
        low, high = completions(data[:n])
        assert low <= ord(c) <= high and split(b"x" + data[:n]) == ("x", data[:n])
        assert all(chr(x).encode().startswith(data[:n]) for x in (low, high))
        assert not any(0xD800 > x >= 0 and chr(x).encode().startswith(data[:n]) for x in (low - 1, high + 1))


# ---------------------------------------------------------------- against a reference
LETTERS = "abä€1"
CLASSES = {"[ab]": "ab", "[^a]": "bä€1", ".": LETTERS, "[ä-ü]": "ä", '"a"': "a", '"€"': "€", "[1a]": "1a"}


@st.composite
def expressions(draw, depth=3):
    """(GBNF, the same as a tree) of an expression without recursion."""
    kind = draw(st.sampled_from(["class"] * 3 + ["text"] + ["or", "then", "times"] * (depth > 0)))
    if kind == "class":
        text = draw(st.sampled_from(sorted(CLASSES)))
        return text, ("class", CLASSES[text])
    if kind == "text":
        text = draw(st.text(LETTERS, max_size=3))
        return f'"{text}"', ("then", *(("class", c) for c in text))
    parts = draw(st.lists(expressions(depth - 1), min_size=1, max_size=1 if kind == "times" else 3))
    if kind == "times":
        times = [(0, 1, "?"), (0, 99, "*"), (1, 99, "+"), (2, 2, "{2}"), (1, 3, "{1,3}")]
        low, high, text = draw(st.sampled_from(times))
        return f"({parts[0][0]}){text}", ("times", low, high, parts[0][1])
    return "(" + (" | " if kind == "or" else " ").join(t for t, _ in parts) + ")", (kind, *(tree for _, tree in parts))


def ends(tree, text, starts):
    """(places in the text where a match from one of `starts` may end, does one go on beyond the text?)"""
    kind, *of = tree
    if kind == "class":
        return {i + 1 for i in starts if i < len(text) and text[i] in of[0]}, len(text) in starts
    if kind == "or":
        found = [ends(t, text, starts) for t in of]
        return set().union(*(f for f, _ in found)), any(more for _, more in found)
    beyond = False
    if kind == "then":
        for t in of:
            starts, more = ends(t, text, starts)
            beyond |= more
        return starts, beyond
    low, high, inner = of
    found = set(starts) if low == 0 else set()
    for n in range(1, min(high, len(text) + 2) + 1):
        starts, more = ends(inner, text, starts)
        beyond |= more
        found |= starts if n >= low else set()
    return found, beyond


def viable(tree, text):
    """Does an allowed text begin like this?"""
    found, beyond = ends(tree, text, {0})
    return beyond or len(text) in found


def expected(tree, said):
    """The tokens that may come after the bytes `said`, if the text consists of LETTERS."""
    out = set()
    for piece in PIECES[1:]:
        text, tail = split(said + piece)
        begun = [""] if not tail else [c for c in LETTERS if c.encode().startswith(tail)]
        if text is not None and set(text) <= set(LETTERS) and any(viable(tree, text + c) for c in begun):
            out.add(piece)
    text, tail = split(said)
    return out | ({b""} if not tail and len(text) in ends(tree, text, {0})[0] else set())


def of_letters(said, pieces):
    """Those after which the text consists of whole LETTERS."""
    return {p for p in pieces if set(split(said + p)[0] or "?") <= set(LETTERS) and not split(said + p)[1]}


@given(expressions(), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_masks_are_what_trying_everything_finds(expression, rng):
    text, tree = expression
    m, said = Matcher(Grammar(f"root ::= {text}", TOKENIZER)), b""
    for _ in range(4):
        mask, may_come = allowed(m), expected(tree, said)
        assert of_letters(said, mask) == of_letters(said, may_come) and may_come <= mask, (text, said)
        assert (b"" in mask) == (b"" in may_come)
        assert all(m.allows(i) == (PIECES[i] in mask) for i in rng.sample(range(len(PIECES)), 20))
        going = sorted(may_come - {b""})
        if not going:
            break
        piece = rng.choice(going)
        m.accept(ID[piece])
        said += piece


# ---------------------------------------------------------------- against llama.cpp
def random_grammar(rng):
    """Rules that use each other, none left-recursive: each alternate begins with a character."""
    names = ["root", "x", "y-2"]

    def element(depth):
        kind = rng.choice(["class"] * 3 + ["text", "rule"] + ["group", "times"] * (depth > 0))
        if kind == "class":
            return rng.choice([*CLASSES, "[b-z]", "[\\x80-\\U0010FFFF]"])
        if kind == "text":
            return f'"{"".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 3)))}"'
        if kind == "rule":
            return f'"b" {rng.choice(names)}'
        inner = f"({' | '.join(element(depth - 1) for _ in range(rng.randint(1, 2)))})"
        return inner + rng.choice(["?", "*", "+", "{2}", "{1,3}"]) if kind == "times" else inner
    return "".join(f"{name} ::= " + " | ".join(" ".join([rng.choice(sorted(CLASSES)), element(2), element(1)])
                                              for _ in range(2)) + ' | "1"\n' for name in names)


def whole(ids, cut):
    """Without what llama.cpp is less strict about: byte 0 is no text there, bytes above 0x7F need not go on with a
    character, and a text may end in the middle of one."""
    return {i for i in ids if 0 < i < 128 or i > 257 - (not cut)}


@pytest.mark.peer
@pytest.mark.parametrize("n", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_masks_are_those_of_llama_cpp(n, tmp_path):
    """A walk through each of n random grammars."""
    words = [w for w in WORDS if split(w)[0] is not None]
    path = str(vocabularies.write_bytes(tmp_path / "m.gguf", ["<s>", "</s>"], words))
    tokenizer = Tokenizer.from_gguf(GGUFFile(path))
    rng, jobs, ours = random.Random(n), [], []
    for _ in range(n):
        text = random_grammar(rng)
        m, ids, seen = Matcher(Grammar(text, tokenizer)), [], []
        for _ in range(6):
            seen.append(np.flatnonzero(m.mask()))
            going = [i for i in seen[-1].tolist() if i < 128 or i >= 258]
            if not going or len(ids) == 5:
                break
            ids.append(rng.choice(going))
            m.accept(ids[-1])
        jobs.append(("grammar", (path, text, ids)))
        ours.append(seen)
    for seen, theirs, (_, (_, text, ids)) in zip(ours, asked(*jobs), jobs, strict=True):
        for n, (mine, other) in enumerate(zip(seen, theirs, strict=False)):
            cut = split(b"".join(map(tokenizer.piece, ids[:n])))[1]
            assert whole(mine.tolist(), cut) == whole(other, cut), (text, ids[:n])


@pytest.mark.peer
def test_lazy_grammars_are_those_of_llama_cpp(tmp_path):
    """Random texts with words, patterns and tokens that set the grammar off."""
    path = str(vocabularies.write_bytes(tmp_path / "m.gguf", ["<s>", "</s>"], [b"ab", b"xb1", b"1 b", b"yy"]))
    tokenizer, rng, jobs, ours = Tokenizer.from_gguf(GGUFFile(path)), random.Random(4), [], []
    text = 'root ::= ("b1" | "a" | "yy") [ab1]* "." | "b" [ab1]+'
    for patterns, ids in ((["b1"], []), (["x(b)", "aa(a)"], []), ([], [261]), (["b1", "(a)[ab]"], [261])):
        for _ in range(8):
            m = matcher(tokenizer, text, triggers=[*map(re.compile, patterns), *ids])
            said, seen = [], [np.arange(tokenizer.n_vocab)]
            while len(said) < 12 and len(seen[-1]):
                going = [i for i in seen[-1].tolist() if i in {97, 98, 49, 120, 46, *range(258, 262)}]
                said.append(rng.choice(going))
                try:
                    m.accept(said[-1])
                except ParamError:              # the trigger does not fit the grammar: llama.cpp ends the process
                    said.pop()
                    break
                seen.append(np.flatnonzero(m.mask()) if not m.is_over else np.zeros(0, np.int64))
            jobs.append(("grammar", (path, text, said, patterns, ids)))
            ours.append((seen, m.waits))
    assert 0 < sum(waits for _, waits in ours) < 16
    for (seen, _), theirs, (_, (*_, said, _, _)) in zip(ours, asked(*jobs), jobs, strict=True):
        for mine, other in zip(seen[:-1], theirs, strict=False):
            assert whole(mine.tolist(), False) == whole(other, False), said


@pytest.mark.parametrize("triggers, said, at", [
    (["go"], b"a go.", 3), ("go", b"xxgo", 3), (["go", "xg"], b"xgo", 1), ([re.compile("x+(g)|q")], b"axxgo", 3),
    ([re.compile("[ä€]g")], "a€go".encode(), 4), ([ID[b"12"]], b"12", 0)])
def test_a_lazy_grammar_begins_with_its_trigger(triggers, said, at):
    """`at`: the byte with which it begins to hold."""
    m = matcher(TOKENIZER, 'root ::= ("xgo" | "go" | "€go" | "g" | "12") [0-9]', triggers=triggers)
    ids = [ID[said]] if said in ID else [ID[bytes([b])] for b in said]
    for n, id in enumerate(ids):
        assert m.waits == (n <= at) and m.mask().all() == m.waits and m.allows(0) == m.waits and not m.is_over
        again = m.copy()
        m.accept(id)
        assert again.waits == (n <= at)
        if not m.waits:
            break
    assert not m.waits and not m.allows(0)
    m.reset()
    assert m.waits and m.allows(0)


def test_what_is_no_trigger():
    for bad in (5.0, [], [""], ["\ud800"], ["a", 10**6], [re.compile(b"x")], b"x", [None], [True]):
        with pytest.raises(ParamError, match="grammar_triggers is"):
            matcher(TOKENIZER, 'root ::= "a"', triggers=bad)
    with pytest.raises(ParamError, match="give grammar or json_schema"):
        matcher(TOKENIZER, triggers=["a"])
    m = matcher(TOKENIZER, 'root ::= "b"', triggers=["a"])
    m.accept(ID[b"b"])
    with pytest.raises(ParamError, match="let the grammar match the trigger, too"):
        m.accept(ID[b"a"])


# ---------------------------------------------------------------- rules and models
def test_long_chains_of_rules_are_read_at_once():
    """Each rule is looked at once, not once for every other; checked by counting what is done."""
    def steps(n):
        chain = "\n".join(f"r{i} ::= r{i + 1}" for i in range(n)).replace("r0", "root", 1)
        done = [0]

        def seen(frame, event, arg):
            done[0] += 1
            return seen
        before = sys.gettrace()
        sys.settrace(seen)
        try:
            grammar = Grammar(f'{chain}\nr{n} ::= "a"*', TOKENIZER)
        finally:
            sys.settrace(before)
        assert matches("aa", grammar)
        return done[0]
    assert steps(400) < 4.5 * steps(100)


def test_one_of_both():
    with pytest.raises(ParamError, match="both given"):
        matcher(TOKENIZER, 'root ::= "a"', {})
    assert matcher(TOKENIZER) is None
    assert grammar_of('root ::= "a"', TOKENIZER) is grammar_of('root ::= "a"', TOKENIZER)
    for n in range(20):
        grammar_of(f'root ::= "{n}"', TOKENIZER)


def test_a_model_keeps_to_its_grammar(shared):
    from ggjit.models import load_model
    with load_model(shared("data", "stories260k", "stories260K-F32.gguf"), n_threads=1, kv_type="F32") as m:
        text = m.generate("Once upon a time", -1, grammar='root ::= " there was a " ("dog" | "cat")', seed=1)
        assert "".join(text) in (" there was a dog", " there was a cat") and text.stats["stop_reason"] == "grammar"
        schema = {"properties": {"name": {"type": "string", "maxLength": 12}, "age": {
            "type": "integer", "maximum": 99}}, "required": ["name", "age"]}
        for options in (dict(temp=0), dict(seed=5)):
            text = m.generate("Lily:", 200, json_schema=schema, **options)
            said = json.loads("".join(text))
            assert [*said] == ["name", "age"] and isinstance(said["age"], int) and said["age"] <= 99
        with pytest.raises(ParamError, match="line 1"):
            m.generate("x", grammar="root ::= x")
        runs = m.generate(["One", "Two"], 20, grammar='root ::= " day" | " time"', seed=2)
        said = ["", ""]
        for i, piece in runs:
            said[i] += piece
        assert set(said) <= {" day", " time"} and all(run.stats["stop_reason"] == "grammar" for run in runs.runs)
