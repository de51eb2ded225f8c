"""Grammars as constraints: the tokens that may come next.

    grammar -- gbnf.py --> rules -- Grammar --> states -- Matcher --> a mask of the vocabulary

A stack is what is still to be matched: the element at hand, and below it where to go on when its rule ends.  A state
is a set of stacks, all with a Chars or a Token on top, since a text may be read in several ways.  States are made when
they are first reached and numbered; characters that no rule tells apart are one class, so that a state has a row of
successors.  The tree of the vocabulary (token_trie.py) is walked with these rows, a level at a time.
"""
import functools
import re
import weakref

import numpy as np

from ggjit.models.core.checks import is_encodable
from ggjit.models.text import gbnf
from ggjit.models.text.gbnf import Chars, Ref, Token
from ggjit.models.text.json_schema import to_gbnf
from ggjit.models.text.token_trie import TokenTrie, completions, split
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.whole_numbers import is_whole

DEAD = -1                       # no state: the text is not allowed
DONE = 0                        # the stack without elements: the text may end here
MAX_STACKS = 5000               # in one state
MAX_WORK = 1_000_000            # stacks looked at for one mask or token, about a second
MAX_MASKS = 512                 # that are kept of one grammar
MAX_GRAMMARS = 8                # compiled grammars that one vocabulary keeps


_KEPT = weakref.WeakKeyDictionary()     # {tokenizer: {text: Grammar}}


def grammar_of(text, tokenizer):
    """The Grammar of a text, with the states that earlier uses of it reached; the last ones are kept."""
    kept = _KEPT.setdefault(tokenizer, {})
    found = kept.pop(text, None) if isinstance(text, str) else None
    found = found or Grammar(text, tokenizer)
    kept[text] = found
    if len(kept) > MAX_GRAMMARS:
        del kept[next(iter(kept))]
    return found


class Grammar:
    """States of a GBNF text over the vocabulary of `tokenizer`.

    Errors: ParamError with line and rule for a text that is no grammar, is left-recursive or matches nothing.
    """

    def __init__(self, text, tokenizer):
        self.trie, self.end_ids = TokenTrie.of(tokenizer), np.array(sorted(tokenizer.stop_ids), np.int64)
        rules = gbnf.parse(text, functools.partial(_token_id, tokenizer))
        edges = {0} | {x for r in rules.values() for a in r.alternates for e in a if isinstance(e, Chars)
                       for low, high in e.ranges for x in (low, high + 1)}
        # class k of characters: code points from edge k up to the next edge
        self._edges = np.array(sorted(edges))
        self._classes = self.class_of(self.trie.code_points)
        self._flatten(rules)
        self._stacks, self._tops, self._below = {}, [None], [None]      # stack 0: DONE
        self._closures, self._numbers, self._sets = {}, {}, []
        self._rows = np.empty((0, len(self._edges)), np.int32)
        self._masks, self._asked, self._work = {}, set(), 0
        self.start = self._together(self._closure(at, DONE) for at in self._starts["root"])

    def class_of(self, code_points):
        return np.searchsorted(self._edges, code_points, side="right") - 1

    def _flatten(self, rules):
        """Elements one after another, None behind each alternate."""
        self._elements, self._rules, self._starts = [], [], {}
        for name, rule in rules.items():
            self._starts[name] = []
            for alternate in rule.alternates:
                self._starts[name].append(len(self._elements))
                self._elements += [*alternate, None]
                self._rules += [rule] * (len(alternate) + 1)

    # ---------------------------------------------------------------- stacks and states
    def _stack(self, at, below):
        """The number of the stack with element `at` on top."""
        n = self._stacks.setdefault((at, below), len(self._tops))
        if n == len(self._tops):
            self._tops.append(at)
            self._below.append(below)
        return n

    def _closure(self, at, below):
        """Stacks that are reached from element `at` on top of stack `below`: those with a Chars or Token on top, and
        DONE."""
        found = self._closures.get((at, below))
        if found is not None:
            return found
        todo, seen, found = [(at, below)], set(), set()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            if len(found) > MAX_STACKS or len(seen) + self._work > MAX_WORK:
                self._refuse(found)
            at_, below_ = one
            e = self._elements[at_]
            if e is None:
                if below_ == DONE:
                    found.add(DONE)
                else:
                    todo.append((self._tops[below_], self._below[below_]))
            elif isinstance(e, Ref):
                # behind the last element of an alternate nothing is left to match, so it is not pushed
                below_ = below_ if self._elements[at_ + 1] is None else self._stack(at_ + 1, below_)
                todo += [(start, below_) for start in self._starts[e.rule]]
            else:
                found.add(self._stack(at_, below_))
        self._work += len(seen)
        found = self._closures[at, below] = frozenset(found)
        return found

    def _refuse(self, stacks):
        raise ParamError(f"grammar: the text can be read in more than {MAX_STACKS} ways; {self._expected(stacks)}; "
                         f"make it less ambiguous")

    def _union(self, found, stacks):
        """Adds a frozenset of stacks to a set of them; looked at while it grows."""
        found |= stacks
        self._work += len(stacks)
        if len(found) > MAX_STACKS or self._work > MAX_WORK:
            self._refuse(found)

    def _state(self, stacks):
        """The number of a set of stacks, DEAD for none."""
        if not stacks:
            return DEAD
        n = self._numbers.setdefault(stacks, len(self._sets))
        if n == len(self._sets):
            self._sets.append(stacks)
        return n

    def _together(self, parts):
        """The state of all stacks of some sets of them."""
        found = set()
        for stacks in parts:
            self._union(found, stacks)
        return self._state(frozenset(found))

    def row(self, state):
        """The next state for every class of characters."""
        if state >= len(self._rows):
            more = np.full((max(2 * len(self._rows), state + 16), len(self._edges)), DEAD - 1, np.int32)
            more[:len(self._rows)] = self._rows
            self._rows = more
        row = self._rows[state]
        if row[0] == DEAD - 1:
            after = {}                                          # {ranges: stacks after such a character}
            for stack in self._sets[state]:
                e = self._elements[self._tops[stack]] if stack else None
                if isinstance(e, Chars):
                    self._union(after.setdefault(e.ranges, set()),
                                self._closure(self._tops[stack] + 1, self._below[stack]))
            which = [[] for _ in self._edges]                   # of each class, the ranges it is in
            for ranges in after:
                for low, high in ranges:
                    a, b = np.searchsorted(self._edges, (low, high + 1))
                    for k in range(a, b):
                        which[k].append(ranges)
            made, new = {}, np.empty(len(self._edges), np.int32)
            for k, found in enumerate(map(tuple, which)):
                if found not in made:
                    made[found] = self._together(after[r] for r in found)
                new[k] = made[found]
            # stored when it is complete: an error may have ended the loop
            row = self._rows[state] = new
        return row

    # ---------------------------------------------------------------- texts and tokens
    def after(self, state, text):
        """The state after some characters, a token's or a trigger's."""
        self._work = 0
        for k in self.class_of([ord(c) for c in text]).tolist() if text else ():
            state = int(self.row(state)[k])
            if state == DEAD:
                break
        return state

    def may_begin(self, state, tail):
        """Is a character allowed that begins with these bytes?"""
        low, high = self.class_of(completions(tail)).tolist()
        return bool((self.row(state)[low:high + 1] != DEAD).any())

    def after_token(self, state, tail, id):
        """(state, bytes of a character that is begun) after a token; a DEAD state if it is not allowed."""
        stacks, text_state, rest, self._work = set(), DEAD, b"", 0
        if not tail:
            for stack in self._sets[state]:
                e = self._elements[self._tops[stack]] if stack else None
                if isinstance(e, Token) and (e.id == id) != e.other and not (e.other and id in self.end_ids):
                    self._union(stacks, self._closure(self._tops[stack] + 1, self._below[stack]))
        piece = self.trie.pieces[id]
        text, left = split(tail + piece) if piece else (None, b"")
        if text is not None:
            text_state, rest = self.after(state, text), left
            if text_state != DEAD and left and not self.may_begin(text_state, left):
                text_state = DEAD
        if not stacks:
            return (text_state, rest) if text_state != DEAD else (DEAD, b"")
        if text_state != DEAD and not rest:
            self._union(stacks, self._sets[text_state])
        return self._state(frozenset(stacks)), b""

    def mask(self, state, tail):
        """(n_vocab,) bool: tokens that may come after `state` and the bytes of a character that is begun."""
        kept = self._masks.get((state, tail))
        if kept is None:
            if len(self._masks) >= MAX_MASKS:
                self._masks.clear()
                self._asked.clear()
            kept = self._masks[state, tail] = np.packbits(self._within(state, tail) if tail else self._fresh(state))
        return np.unpackbits(kept, count=self.trie.n_vocab).view(bool)

    def is_new(self, state, tail):
        """Is it the first question about this state, and has the state no mask yet?"""
        key = state, tail
        if key in self._asked or key in self._masks:
            return False
        self._asked.add(key)
        return True

    def _within(self, state, tail):
        """The mask in the middle of a character: few tokens begin there, each is tried."""
        mask = np.zeros(self.trie.n_vocab, bool)
        mask[[id for id in self.trie.continues if self.after_token(state, tail, id)[0] != DEAD]] = True
        return mask

    def _fresh(self, state):
        """The mask where no character is half written.  The grammar's state at each node of the tree of tokens is found
        level by level; a token is allowed if the state at its end is not DEAD."""
        trie, self._work = self.trie, 0
        states = np.full(len(trie.code_points), DEAD, np.int32)
        states[0] = state
        nodes = np.zeros(1, np.int64)
        while len(nodes):
            for s in np.unique(states[nodes]).tolist():
                self.row(s)
            n = trie.n_children[nodes]
            children = np.repeat(trie.first_child[nodes] - np.cumsum(n) + n, n) + np.arange(n.sum())
            states[children] = self._rows[np.repeat(states[nodes], n), self._classes[children]]
            nodes = children[states[children] != DEAD]
        mask = np.zeros(trie.n_vocab, bool)
        at, ids = trie.ends
        mask[ids[states[at] != DEAD]] = True
        self._add_tails(mask, states)
        self._add_tokens(mask, state)
        if DONE in self._sets[state]:
            mask[self.end_ids] = True
        return mask

    def _add_tails(self, mask, states):
        """Tokens that end in the middle of a character."""
        at, ids, low, high = self.trie.tails
        live = states[at] != DEAD
        at, ids, low, high = states[at[live]], ids[live], self.class_of(low[live]), self.class_of(high[live])
        for s in np.unique(at).tolist():
            self.row(s)
        if len(at):
            allowed = np.zeros((len(at), len(self._edges) + 1), np.int32)
            np.cumsum(self._rows[at] != DEAD, axis=1, out=allowed[:, 1:])
            i = np.arange(len(at))
            mask[ids[allowed[i, high + 1] > allowed[i, low]]] = True

    def _add_tokens(self, mask, state):
        for stack in self._sets[state]:
            e = self._elements[self._tops[stack]] if stack else None
            if isinstance(e, Token) and not e.other:
                mask[e.id] = True
            elif isinstance(e, Token):
                others = np.ones(len(mask), bool)
                others[e.id] = others[self.end_ids] = False
                mask |= others

    def may_end(self, state):
        return DONE in self._sets[state]

    def is_over(self, state):
        """Is the end of the text the only thing that is allowed?"""
        return self._sets[state] == {DONE}

    def expected(self, state):
        """What may come next, in words."""
        return self._expected(self._sets[state])

    def _expected(self, stacks):
        tops = sorted(self._tops[s] for s in stacks if s)
        words = {f"{_described(self._elements[at])} (rule {self._rules[at].name}, line {self._rules[at].line})": 0
                 for at in tops[:100]}
        return f"expected is {' or '.join([*words][:5]) or 'the end'}" + (" ..." if len(words) > 5 else "")


def _described(e):
    if isinstance(e, Token):
        return f"{'any token but' if e.other else 'token'} {e.id}"
    if e.ranges == ((0, gbnf.LAST),):
        return "any character"
    if len(e.ranges) == 1 and e.ranges[0][0] == e.ranges[0][1]:
        return repr(chr(e.ranges[0][0]))
    return "[" + "".join(repr(chr(a))[1:-1] + ("" if a == b else f"-{chr(b)!r}"[0:1] + repr(chr(b))[1:-1])
                         for a, b in e.ranges[:4]) + ("..." if len(e.ranges) > 4 else "") + "]"


def _token_id(tokenizer, text):
    """The id of "<[7]>", or of the token whose text "<...>" is; None if there is none."""
    if text[1] == "[" and text[-2] == "]" and text[2:-2].isdecimal():
        id = int(text[2:-2])
        return id if id < tokenizer.n_vocab else None
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    return ids[0] if len(ids) == 1 else None


def matcher(tokenizer, grammar=None, json_schema=None, triggers=None):
    """The Matcher of a GBNF text or a JSON Schema; None if there is neither.  triggers: those of LazyMatcher, or None.

    Errors: ParamError for both at once, or for what cannot be read.
    """
    if grammar is None and json_schema is None:
        if triggers is not None:
            raise ParamError("grammar_triggers say where a grammar begins; give grammar or json_schema, too")
        return None
    if grammar is not None and json_schema is not None:
        raise ParamError("grammar and json_schema are both given; a text fits one of them")
    found = Matcher(grammar_of(to_gbnf(json_schema) if grammar is None else grammar, tokenizer))
    return found if triggers is None else LazyMatcher(found, tokenizer, triggers)


class Matcher:
    """The position of a text in its grammar.  `mask()`: the tokens that may come next; `accept(id)`: go on behind a
    token.

        m = Matcher(grammar_of('root ::= "yes" | "no"', tokenizer))
        logits[~m.mask()] = -inf
    """
    waits = False                   # is every token allowed, since the trigger of a LazyMatcher has not come yet?

    def __init__(self, grammar):
        self.grammar = grammar
        self.reset()

    def reset(self):
        self._state, self._tail, self.ended = self.grammar.start, b"", False

    def copy(self):
        new = object.__new__(Matcher)
        new.__dict__.update(self.__dict__)
        return new

    @property
    def is_over(self):
        """May only the end of the text come?"""
        return self.ended or not self._tail and self.grammar.is_over(self._state)

    def allows(self, id):
        """May this token come next?  Cheaper than the mask."""
        return self._next(id) is not None

    def _next(self, id):
        g = self.grammar
        if not self._tail and g.may_end(self._state) and id in g.end_ids:
            return self._state, b"", True
        state, tail = g.after_token(self._state, self._tail, id)
        return None if state == DEAD else (state, tail, False)

    @property
    def n_vocab(self):
        return self.grammar.trie.n_vocab

    def is_new(self):
        """Is this the first time that a text is in this state?  Then a mask may never be needed again."""
        return self.grammar.is_new(self._state, self._tail)

    def mask(self):
        """(n_vocab,) bool.  Errors: ParamError when no token may come: the vocabulary cannot spell what is expected."""
        mask = self.grammar.mask(self._state, self._tail)
        if not mask.any():
            raise ParamError(f"the grammar is at a dead end: no token of this vocabulary goes on; "
                             f"{self.grammar.expected(self._state)}; allow other characters there")
        return mask

    def accept(self, id):
        """Go on behind token `id`.  Errors: ParamError for one that is not allowed."""
        found = self._next(id)
        if found is None:
            raise ParamError(f"token {id} does not fit the grammar; {self.grammar.expected(self._state)}")
        self._state, self._tail, self.ended = found

    def accept_text(self, data):
        """Go on behind some bytes.  Errors: ParamError."""
        g, (text, tail) = self.grammar, split(self._tail + data)
        state = DEAD if text is None else g.after(self._state, text)
        if state == DEAD or tail and not g.may_begin(state, tail):
            raise ParamError(f"{data!r}, with which the grammar was to begin, does not fit it; "
                             f"{g.expected(self._state)}; let the grammar match the trigger, too")
        self._state, self._tail = state, tail


class LazyMatcher:
    """A Matcher that lets everything pass until a trigger comes: a tool call after free text, say.

        LazyMatcher(matcher, tokenizer, ["<tool_call>", re.compile("(?:^|\\n)(\\{)"), 151657])

    triggers: texts, compiled patterns and ids.  The grammar holds from the beginning of the trigger on: it matches the
    text, what the first group of the pattern matches (without groups, the pattern) or the token, and all that follows.
    Errors: ParamError for other triggers, and for a trigger that the grammar does not match.
    """

    def __init__(self, matcher, tokenizer, triggers):
        self.matcher, self.tokenizer = matcher, tokenizer
        given = [triggers] if isinstance(triggers, str | int | re.Pattern) else triggers
        if isinstance(given, bytes) or not hasattr(given, "__iter__"):
            raise ParamError(f"grammar_triggers is {given!r}, expected a list of texts, compiled patterns and ids")
        given = list(given)
        self._ids = {t for t in given if is_whole(t, 0, tokenizer.n_vocab - 1)}
        self._texts = [t for t in given if isinstance(t, str) and t and is_encodable(t)]
        self._patterns = [t for t in given if isinstance(t, re.Pattern) and isinstance(t.pattern, str)]
        if not given or len(self._texts) + len(self._patterns) + sum(is_whole(t) and t in self._ids for t in given) < \
                len(given):
            raise ParamError(f"grammar_triggers is {given!r}, expected texts that are not empty, compiled patterns of "
                             f"text and ids of the vocabulary, at least one of them")
        self.reset()

    def reset(self):
        self.matcher.reset()
        self._text, self.waits = b"", True      # what came before the trigger; has none come yet?

    def copy(self):
        new = object.__new__(LazyMatcher)
        new.__dict__.update(self.__dict__, matcher=self.matcher.copy())
        return new

    @property
    def is_over(self):
        return not self.waits and self.matcher.is_over

    @property
    def n_vocab(self):
        return self.matcher.n_vocab

    def is_new(self):
        return not self.waits and self.matcher.is_new()

    def allows(self, id):
        return self.waits or self.matcher.allows(id)

    def mask(self):
        return np.ones(self.n_vocab, bool) if self.waits else self.matcher.mask()

    def accept(self, id):
        """Take the token.  The one that completes a trigger gives the grammar the text from the trigger on."""
        if self.waits and id not in self._ids:
            before, self._text = len(self._text), self._text + self.tokenizer.piece(id, special=True)
            at = self._triggered(before)
            if at is None:
                return
            self.waits = False
            self.matcher.accept_text(self._text[at:])
        elif not self.waits or self.matcher.allows(id):
            self.waits = False
            self.matcher.accept(id)
        else:                                   # a special token that the grammar spells out
            self.waits = False
            self.matcher.accept_text(self.tokenizer.piece(id, special=True))

    def _triggered(self, before):
        """Where in what was said the grammar begins, in bytes; None: not yet.  before: bytes known without trigger."""
        found = [at for word in map(str.encode, self._texts)
                 if (at := self._text.find(word, max(before - len(word) + 1, 0))) >= 0]
        text = self._text.decode("utf-8", "surrogateescape") if self._patterns else ""
        for m in filter(None, (pattern.search(text) for pattern in self._patterns)):
            group = next((k for k in range(1, len(m.groups()) + 1) if m.group(k)), 0)
            found.append(len(text[:m.start(group)].encode("utf-8", "surrogateescape")))
        return min(found, default=None)
