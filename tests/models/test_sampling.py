"""The sampler: distributions against the definitions in float64, and against llama.cpp; determinism, refusals."""
import numpy as np
import pytest
from helpers import sampler_reference, vocabularies
from helpers.llamacpp import asked

from ggjit.models.files.gguf import GGUFFile
from ggjit.models.text.sampling import OPTIONS, Sampler
from ggjit.models.text.tokenizer import Tokenizer
from ggjit.ops.core.errors import ParamError, ShapeError

DEFAULTS = {name: o.default for name, o in OPTIONS.items()}
OFF = dict(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)         # nothing of the default chain
CASES = [
    dict(), dict(temp=0.0), OFF, OFF | dict(temp=0.5), OFF | dict(top_k=5), OFF | dict(temp=2.0, top_p=0.6),
    OFF | dict(min_p=0.2), OFF | dict(min_p=1.0), OFF | dict(top_p=1e-9), OFF | dict(top_k=1),
    dict(temp=0.7, top_k=1000, top_p=0.9), dict(temp=1.3, top_k=7, top_p=0.5, min_p=0.1),
    OFF | dict(typical_p=0.3), OFF | dict(typical_p=0.9, top_p=0.8), OFF | dict(top_n_sigma=1.0),
    OFF | dict(top_n_sigma=0.3, typical_p=0.5), OFF | dict(xtc_probability=1.0, xtc_threshold=0.05),
    OFF | dict(xtc_probability=0.3, xtc_threshold=0.1), dict(temp=0.0, xtc_probability=0.5, xtc_threshold=0.01),
    dict(xtc_probability=1.0, xtc_threshold=0.6), OFF | dict(dynatemp_range=0.5),
    dict(temp=0.4, dynatemp_range=2.0, dynatemp_exponent=1.7), OFF | dict(repeat_penalty=1.3),
    OFF | dict(frequency_penalty=0.4), OFF | dict(presence_penalty=-0.6, penalty_last_n=3),
    OFF | dict(repeat_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.2, penalty_last_n=-1),
    OFF | dict(repeat_penalty=1.5, penalty_last_n=0), OFF | dict(dry_multiplier=0.8),
    OFF | dict(dry_multiplier=0.5, dry_base=1.2, dry_allowed_length=1, dry_penalty_last_n=-1),
    OFF | dict(dry_multiplier=0.3, dry_base=1.0, dry_allowed_length=3, dry_penalty_last_n=20),
    OFF | dict(logit_bias={0: 3.0, 1: -np.inf}), dict(temp=0.0, repeat_penalty=3.0),
    dict(repeat_penalty=1.2, dry_multiplier=0.4, top_n_sigma=2.0, typical_p=0.95, xtc_probability=0.5,
         dynatemp_range=0.3)]


def rows(rng):
    """Rows of logits with what was read before: repetitive ids."""
    for n in (1, 2, 50, 997):
        yield rng.standard_normal(n) * 3, rng.integers(0, min(n, 4), 40).tolist()


@pytest.mark.parametrize("options", CASES, ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items() if k not in OFF))
def test_probabilities_are_the_definition(options):
    for logits, last in rows(np.random.default_rng(3)):
        bias = {i: b for i, b in options.get("logit_bias", {}).items() if i + 1 < len(logits)}
        sampler = Sampler(**options | {"logit_bias": bias})
        sampler.accept(last)
        ids, p = sampler.probabilities(logits)
        expected = sampler_reference.chain(logits, DEFAULTS | options | {"logit_bias": bias}, last)
        assert sorted(ids) == sorted(expected) and (np.diff(p) <= 1e-12).all()
        np.testing.assert_allclose(p, [expected[i] for i in ids.tolist()], rtol=1e-9)


@pytest.mark.parametrize("version", (1, 2))
def test_mirostat_is_the_definition(version):
    rng, o = np.random.default_rng(5), dict(mirostat=version, temp=0.9, mirostat_tau=3.0, mirostat_eta=0.3)
    sampler, mu = Sampler(**o, seed=1), 6.0
    for _ in range(30):
        logits = rng.standard_normal(300) * 2
        expected = sampler_reference.mirostat(logits, DEFAULTS | o, mu)
        ids, p = sampler.probabilities(logits)
        assert set(ids) == set(expected)
        np.testing.assert_allclose(p, [expected[i] for i in ids.tolist()], rtol=1e-9)
        mu -= 0.3 * (-np.log2(expected[sampler.sample(logits)]) - 3.0)
    assert mu != 6.0


def test_mirostat_of_odd_rows():
    for version in (1, 2):
        for row in (np.zeros(5), [1.0], [0.0, -np.inf], [3.0, -np.inf, 3.0], np.log(1 / np.arange(1.0, 99.0))):
            assert 0 <= Sampler(mirostat=version, seed=0).sample(np.array(row)) < len(row)
        assert Sampler(mirostat=version, temp=0).sample(np.array([1.0, 3.0, 2.0])) == 1


@pytest.mark.parametrize("options", [{}, dict(xtc_probability=0.4, xtc_threshold=0.12), dict(typical_p=0.8),
                                     dict(dynatemp_range=0.9)], ids=str)
def test_draws_follow_the_probabilities(options):
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05]))
    sampler = Sampler(**OFF | options, seed=7)
    ids, p = sampler.probabilities(logits)
    n = 4000
    counts = np.bincount([sampler.sample(logits) for _ in range(n)], minlength=5)
    assert counts.sum() == counts[ids].sum()
    assert ((counts[ids] - n * p) ** 2 / (n * p)).sum() < 23.5          # at most 4 degrees of freedom, p = 1e-4


def test_filters_remove_what_they_should():
    logits = np.log(np.array([0.5, 0.3, 0.1, 0.06, 0.04]))
    for options, allowed in [(dict(top_k=2), {0, 1}), (dict(top_p=0.75), {0, 1}), (dict(min_p=0.15), {0, 1, 2}),
                             (dict(xtc_probability=1.0, xtc_threshold=0.1), {2, 3, 4}), (dict(top_n_sigma=1.0), {0, 1}),
                             (dict(logit_bias={0: -np.inf, 4: -np.inf}), {1, 2, 3})]:
        sampler = Sampler(**OFF | dict(temp=5.0, seed=1) | options)
        assert {sampler.sample(logits) for _ in range(500)} == allowed


@pytest.mark.parametrize("order, n", [("top_k;top_p;temperature", 2), (["temperature", "top_p", "top_k"], 3),
                                      (("top_k",), 3), ((), 5)])
def test_the_order_of_the_chain_is_a_setting(order, n):
    logits = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05]))
    assert len(Sampler(samplers=order, temp=9.0, top_k=3, top_p=0.75).probabilities(logits)[0]) == n


def test_greedy_is_the_first_largest():
    sampler = Sampler(temp=0)
    assert sampler.sample(np.array([1.0, 5.0, 5.0, -np.inf], np.float32)) == 1
    assert Sampler(temp=-1).sample([3, 9, 2]) == 1
    ids, p = sampler.probabilities(np.array([1.0, 5.0, 5.0]))
    assert ids.tolist() == [1] and p.tolist() == [1.0]


def test_seed_decides_everything():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 200)).astype(np.float32)

    def run(seed, **options):
        sampler = Sampler(seed=seed, **options)
        first = [sampler.sample(r) for r in rows]
        sampler.reset()
        assert [sampler.sample(r) for r in rows] == first or seed is None
        return first
    assert run(1) == run(1) != run(2)
    assert run(None) != run(None)
    assert run(1, xtc_probability=0.5) == run(1, xtc_probability=0.5) and run(3, mirostat=2) == run(3, mirostat=2)


@pytest.mark.parametrize("options", [{}, dict(mirostat=1), dict(repeat_penalty=1.5, dry_multiplier=1.0)], ids=str)
def test_a_copy_goes_on_by_itself(options):
    rows = np.random.default_rng(0).standard_normal((30, 60)) * 2
    first = Sampler(seed=4, **options)
    for r in rows[:10]:
        first.sample(r)
    second = first.copy()
    ahead = [first.sample(r) for r in rows[10:]]
    assert [second.sample(r) for r in rows[10:]] == ahead
    second.reset()
    fresh = Sampler(seed=4, **options)
    assert [second.sample(r) for r in rows] == [fresh.sample(r) for r in rows]


def test_masked_tokens_are_never_drawn():
    logits = np.full(100, -np.inf)
    logits[[3, 70]] = 0
    for options in (OFF, OFF | dict(top_k=1), OFF | dict(top_k=40), OFF | dict(typical_p=0.99), dict(mirostat=1)):
        sampler = Sampler(**options, seed=0)
        assert {sampler.sample(logits) for _ in range(100)} <= {3, 70}


def test_repeat_penalty():
    sampler = Sampler(temp=0, repeat_penalty=2.0, penalty_last_n=2)
    logits = np.array([4.0, 3.0, -1.0, -1.5])
    assert [sampler.sample(logits) for _ in range(3)] == [0, 1, 0]      # 4/2 < 3, then 4/2 > 3/2
    assert logits.tolist() == [4.0, 3.0, -1.0, -1.5]
    sampler = Sampler(temp=0, repeat_penalty=2.0)
    sampler.accept([2, 99])                                             # ids outside the row are ignored
    assert sampler.sample(np.array([-9.0, -8.0, -1.0, -1.5])) == 3      # -1 * 2 < -1.5


class Letters:
    """A tokenizer whose tokens are a letter each, and "ab"."""
    texts = [*"abcdefgh.:", "ab", ".\n"]
    n_vocab = len(texts)

    def piece(self, id, special=False):
        return self.texts[id].encode()

    def encode(self, text, add_special=True):
        return [self.texts.index(letter) for letter in text]


@pytest.mark.parametrize("text, breakers, penalised", [
    ("abcdabc", (), "d"), ("ab.dab", (), "."), ("bc.abc.", ("c.",), ""), ("hbc.a.bc", ("c.",), "."),
    ("xabcx".replace("x", "e") + "fabc", ("fa",), "e"), ("d:cd", (":",), ""), ("aab:aab", (":",), ""),
    ("abcdabc", ("d",), "")])
def test_dry_and_its_breakers(text, breakers, penalised):
    sampler = Sampler(Letters(), dry_multiplier=1.0, dry_sequence_breakers=breakers, **OFF)
    sampler.accept(Letters().encode(text))
    ids, p = sampler.probabilities(np.zeros(Letters.n_vocab))
    assert {Letters.texts[i] for i in ids[p < p.max() * 0.99].tolist()} == set(penalised)


@pytest.mark.parametrize("options", [
    dict(temp=float("nan")), dict(temp=float("inf")), dict(top_k=-1), dict(top_k=1.5), dict(top_p=0), dict(top_p=1.1),
    dict(top_p=float("nan")), dict(min_p=-0.1), dict(min_p=2), dict(repeat_penalty=0), dict(seed=-1), dict(seed="x"),
    dict(penalty_last_n=-2), dict(repeat_penalty=float("inf")), dict(typical_p=0), dict(top_n_sigma="x"),
    dict(xtc_probability=1.5), dict(xtc_threshold=-1), dict(dynatemp_range=-0.1), dict(dynatemp_exponent=-1),
    dict(frequency_penalty=None), dict(presence_penalty=True), dict(dry_multiplier=-1), dict(dry_base=0.5),
    dict(dry_allowed_length=-1), dict(dry_penalty_last_n=-2), dict(dry_sequence_breakers="ab"),
    dict(dry_sequence_breakers=["\ud800"]), dict(dry_sequence_breakers=["a", ""]), dict(dry_sequence_breakers=5),
    dict(adaptive_target=1.5), dict(adaptive_decay=1.0),
    dict(mirostat=3), dict(mirostat_tau=-1), dict(mirostat_eta="a"),
    dict(logit_bias=[3]), dict(logit_bias={-1: 2.0}), dict(logit_bias={1: float("inf")}), dict(samplers=5),
    dict(samplers="top_q"),
    dict(samplers=["mirostat"])])
def test_bad_parameters_are_named(options):
    with pytest.raises(ParamError, match=next(iter(options))):
        Sampler(**options)


def test_a_penalty_is_never_infinite():
    sampler = Sampler(**OFF, dry_multiplier=1e300, dry_base=1e300)
    sampler.accept([0, 1] * 30)
    ids, p = sampler.probabilities(np.array([5.0, 1.0]))
    assert ids.tolist() == [1] and p.tolist() == [1.0]


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ParamError, match=r"unknown option 'temperatur'.*top_k"):
        Sampler(temperatur=1.0)
    with pytest.raises(ParamError, match=r"'repeat_penality' \(did you mean repeat_penalty\?\)"):
        Sampler(repeat_penality=1.0)


def test_bad_logits_are_refused():
    for temp in (0.0, 1.0):
        sampler = Sampler(temp=temp)
        for bad in ([0, np.nan, 1], [0, np.inf, np.nan], [-np.inf, -np.inf]):
            with pytest.raises(ParamError, match="logit"):
                sampler.sample(np.array(bad, np.float32))
        for bad in (np.zeros((2, 3)), np.zeros(0), np.float32(1)):
            with pytest.raises(ShapeError, match="expected one row .n_vocab"):
                sampler.sample(bad)
    with pytest.raises(ParamError, match="logit_bias names token 7, the last of this vocabulary is 4"):
        Sampler(logit_bias={7: 1.0}).sample(np.zeros(5))


# ---------------------------------------------------------------- llama.cpp
@pytest.mark.peer
def test_probabilities_are_those_of_llama_cpp():
    rng, jobs, ours = np.random.default_rng(11), [], []
    for options in CASES:
        if options.get("logit_bias") or 0 < options.get("xtc_probability", 0) < 1 or {
                "top_n_sigma", "typical_p"} <= {*options}:      # there the entropy of llama.cpp is NaN
            continue
        for logits, last in rows(rng):
            logits = logits.astype(np.float32)
            if len(logits) > 1:
                sampler = Sampler(**options)
                sampler.accept(last)
                theirs = DEFAULTS | options                 # the samplers themselves have no -1
                theirs |= {name: theirs[name] % 4097 for name in ("penalty_last_n", "dry_penalty_last_n")}
                ours.append(sampler.probabilities(logits))
                jobs.append(("probabilities", (theirs, logits.tolist(), last)))
    for (ids, p), theirs, (_, (options, *_)) in zip(ours, asked(*jobs), jobs, strict=True):
        assert {*map(str, ids)} == {*theirs}, {k: v for k, v in options.items() if v != DEFAULTS[k]}
        np.testing.assert_allclose(p, [theirs[str(i)] for i in ids], rtol=2e-5, err_msg=str(options))


@pytest.mark.peer
@pytest.mark.parametrize("version", (1, 2))
def test_mirostat_is_that_of_llama_cpp(version):
    rows = np.random.default_rng(6).standard_normal((20, 200)).astype(np.float32) * 2
    o = dict(mirostat=version, temp=0.9, mirostat_tau=3.0, mirostat_eta=0.3)
    sampler = Sampler(**o)
    for row, (theirs, drawn) in zip(rows, asked(("mirostat", (DEFAULTS | o, rows.tolist())))[0], strict=True):
        ids, p = sampler.probabilities(row)
        assert {*map(str, ids)} == {*theirs}
        p_drawn = p[ids.tolist().index(drawn)]
        np.testing.assert_allclose(p_drawn, theirs[str(drawn)], rtol=1e-4)
        sampler._mu -= o["mirostat_eta"] * (-np.log2(p_drawn) - o["mirostat_tau"])


@pytest.mark.peer
def test_adaptive_p_is_that_of_llama_cpp():
    """Draw by draw, with the tokens that llama.cpp drew."""
    rows = np.random.default_rng(6).standard_normal((20, 50)).astype(np.float32) * 3
    cases = [dict(OFF, adaptive_target=target, adaptive_decay=decay)
             for target, decay in ((0.3, 0.9), (0.9, 0.5), (0.0, 0.99), (-1.0, 0.9))]
    for o, draws in zip(cases, asked(*(("adaptive_p", (o, rows.tolist())) for o in cases)), strict=True):
        sampler, plain, decay = Sampler(**o), Sampler(**OFF), o["adaptive_decay"]
        for row, (theirs, drawn) in zip(rows, draws, strict=True):
            ids, p = sampler.probabilities(row)
            np.testing.assert_allclose(p, [theirs[str(i)] for i in ids], rtol=1e-4, atol=1e-7)
            ids, p = plain.probabilities(row)
            total, n = sampler._drawn
            sampler._drawn = p[ids.tolist().index(drawn)] + decay * total, 1 + decay * n


def test_adaptive_p_draws_near_its_target():
    row, drawn = np.log([0.5, 0.3, 0.15, 0.05]), []
    sampler = Sampler(**OFF, adaptive_target=0.3, seed=1, samplers="top_k;temperature;adaptive_p")
    for _ in range(400):
        drawn.append(np.exp(row)[sampler.sample(row)])
    assert abs(np.mean(drawn) - 0.3) < 0.03
    assert Sampler(temp=0, adaptive_target=0.1).sample(row) == 0
    again = sampler.copy()
    assert [sampler.sample(row) for _ in range(20)] == [again.sample(row) for _ in range(20)]
    sampler.reset()
    ids, p = sampler.probabilities(row)
    assert ids[0] == 1 and len(p) == 4


@pytest.mark.peer
def test_dry_breakers_are_those_of_llama_cpp(tmp_path):
    """Breakers within tokens, at their ends and across several of them."""
    words = [b"a:", b":b", b"x\n", b"end of", b" page", b"en", b"d o", b'"*"']
    path = str(vocabularies.write_bytes(tmp_path / "m.gguf", ["<s>", "</s>"], words))
    tokenizer, rng, jobs, ours = Tokenizer.from_gguf(GGUFFile(path)), np.random.default_rng(2), [], []
    ids = [97, 98, 58, *range(258, 266), 120]
    for breakers in (["\n", ":", '"', "*"], ["end of page", "b"], ["of p", "d", ":b"], ["n", "e"]):
        for _ in range(5):
            options = dict(OFF, dry_multiplier=0.8, dry_allowed_length=1, dry_sequence_breakers=breakers)
            last, logits = rng.choice(ids, 30).tolist() * 2, rng.standard_normal(266).astype(np.float32)
            sampler = Sampler(tokenizer, **options)
            sampler.accept(last)
            ours.append(sampler.probabilities(logits))
            jobs.append(("probabilities", (DEFAULTS | options, logits.tolist(), last, path)))
    for (ids, p), theirs in zip(ours, asked(*jobs), strict=True):
        np.testing.assert_allclose(p, [theirs[str(i)] for i in ids], rtol=2e-5)
