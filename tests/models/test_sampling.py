"""The sampler: distributions against the definition, determinism, refusals."""
import numpy as np
import pytest

from ggjit.models.text.sampling import Sampler
from ggjit.ops.core.errors import ParamError, ShapeError


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def reference(logits, temp, top_k, top_p, min_p):
    """The definition, one token at a time: id -> probability."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k or len(logits)]
    p = softmax(logits[order])
    kept, total = [], 0.0
    for i, q in zip(order, p, strict=True):
        if total >= top_p or q < min_p * p[0]:
            break
        kept.append(i)
        total += q
    return dict(zip(kept, softmax(logits[kept] / temp), strict=True))


@pytest.mark.parametrize("temp, top_k, top_p, min_p", [
    (1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (2.0, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.2),
    (0.8, 40, 0.95, 0.05), (1.3, 7, 0.5, 0.1), (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-9, 0.0), (0.7, 1000, 0.9, 1.0)])
def test_probabilities_are_the_definition(temp, top_k, top_p, min_p):
    rng = np.random.default_rng(3)
    for n in (1, 2, 50, 997):
        logits = rng.standard_normal(n) * 3
        ids, p = Sampler(temp, top_k, top_p, min_p).probabilities(logits)
        expected = reference(logits, temp, top_k, top_p, min_p)
        assert ids.tolist() == list(expected)
        np.testing.assert_allclose(p, list(expected.values()), rtol=1e-12)


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05]))
    sampler = Sampler(1.0, top_k=0, top_p=1.0, seed=7)
    n = 20_000
    counts = np.bincount([sampler.sample(logits) for _ in range(n)], minlength=5)
    chi2 = ((counts - n * np.exp(logits)) ** 2 / (n * np.exp(logits))).sum()
    assert chi2 < 23.5                  # 4 degrees of freedom, p = 1e-4


def test_filters_remove_what_they_should():
    logits = np.log(np.array([0.5, 0.3, 0.1, 0.06, 0.04]))
    for kwargs, allowed in [(dict(top_k=2, top_p=1.0), {0, 1}), (dict(top_k=0, top_p=0.75), {0, 1}),
                            (dict(top_k=0, top_p=1.0, min_p=0.15), {0, 1, 2})]:
        sampler = Sampler(5.0, seed=1, **kwargs)
        assert {sampler.sample(logits) for _ in range(500)} == allowed


def test_greedy_is_the_first_largest():
    sampler = Sampler()
    assert sampler.sample(np.array([1.0, 5.0, 5.0, -np.inf], np.float32)) == 1
    assert Sampler(temp=-1).sample([3, 9, 2]) == 1
    ids, p = sampler.probabilities(np.array([1.0, 5.0, 5.0]))
    assert ids.tolist() == [1] and p.tolist() == [1.0]


def test_seed_decides_everything():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 200)).astype(np.float32)

    def run(seed):
        sampler = Sampler(1.0, seed=seed)
        first = [sampler.sample(r) for r in rows]
        sampler.reset()
        assert [sampler.sample(r) for r in rows] == first or seed is None
        return first
    assert run(1) == run(1) != run(2)
    assert run(None) != run(None)


def test_masked_tokens_are_never_drawn():
    logits = np.full(100, -np.inf)
    logits[[3, 70]] = 0
    for top_k in (0, 1, 40):
        sampler = Sampler(1.0, top_k=top_k, top_p=1.0, seed=0)
        assert {sampler.sample(logits) for _ in range(100)} <= {3, 70}


def test_repeat_penalty():
    sampler = Sampler(repeat_penalty=2.0, penalty_last_n=2)
    logits = np.array([4.0, 3.0, -1.0, -1.5])
    assert [sampler.sample(logits) for _ in range(3)] == [0, 1, 0]      # 4/2 < 3, then 4/2 > 3/2
    assert logits.tolist() == [4.0, 3.0, -1.0, -1.5]
    sampler = Sampler(repeat_penalty=2.0)
    sampler.accept([2, 99])                                             # ids outside the row are ignored
    assert sampler.sample(np.array([-9.0, -8.0, -1.0, -1.5])) == 3      # -1 * 2 < -1.5


@pytest.mark.parametrize("kwargs", [
    dict(temp=float("nan")), dict(temp=float("inf")), dict(top_k=-1), dict(top_k=1.5), dict(top_p=0), dict(top_p=1.1),
    dict(top_p=float("nan")), dict(min_p=-0.1), dict(min_p=2), dict(repeat_penalty=0), dict(seed=-1), dict(seed="x"),
    dict(penalty_last_n=-1), dict(repeat_penalty=float("inf"))])
def test_bad_parameters_are_named(kwargs):
    with pytest.raises(ParamError, match=next(iter(kwargs))):
        Sampler(**kwargs)


def test_bad_logits_are_refused():
    for temp in (0.0, 1.0):
        sampler = Sampler(temp)
        for bad in ([0, np.nan, 1], [0, np.inf, np.nan], [-np.inf, -np.inf]):
            with pytest.raises(ParamError, match="logit"):
                sampler.sample(np.array(bad, np.float32))
        for bad in (np.zeros((2, 3)), np.zeros(0), np.float32(1)):
            with pytest.raises(ShapeError, match="expected one row .n_vocab"):
                sampler.sample(bad)
