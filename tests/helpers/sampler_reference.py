"""What each sampler does, written once more from its definition: {id: logit} in, {id: logit} out, token by token."""
import math


def probabilities(logits):
    """{id: logit} -> {id: probability}."""
    top = max(logits.values())
    e = {i: math.exp(x - top) for i, x in logits.items()}
    total = math.fsum(e.values())
    return {i: x / total for i, x in e.items()}


def by_size(logits):
    return sorted(logits, key=lambda i: (-logits[i], i))


def entropy(logits):
    return -math.fsum(p * math.log(p) for p in probabilities(logits).values() if p)


def penalties(logits, o, last):
    n = o["penalty_last_n"]
    seen = last if n < 0 else last[-n:] if n else []
    out = dict(logits)
    for i in set(seen) & set(out):
        out[i] = out[i] / o["repeat_penalty"] if out[i] > 0 else out[i] * o["repeat_penalty"]
        out[i] -= seen.count(i) * o["frequency_penalty"] + o["presence_penalty"]
    return out


def dry(logits, o, last, breakers=()):
    """Tries every earlier place, and every length there; breakers: single ids."""
    n = o["dry_penalty_last_n"]
    text, out = last if n < 0 else last[-n:] if n else [], dict(logits)
    tail = []
    for i in reversed(text):
        if i in breakers:
            break
        tail.insert(0, i)
    for token in set(out) - set(breakers):
        lengths = [0]
        for at in (k for k, i in enumerate(text) if i == token):
            lengths += [n for n in range(1, len(tail) + 1) if n <= at and text[at - n:at] == tail[len(tail) - n:]]
        if max(lengths) >= max(o["dry_allowed_length"], 1):
            out[token] -= o["dry_multiplier"] * o["dry_base"] ** (max(lengths) - o["dry_allowed_length"])
    return out


def top_n_sigma(logits, o):
    finite = [x for x in logits.values() if x > -math.inf]
    mean = math.fsum(finite) / len(finite)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in finite) / len(finite))
    return {i: x if x >= max(finite) - o["top_n_sigma"] * sigma else -math.inf for i, x in logits.items()} \
        if o["top_n_sigma"] > 0 else logits


def top_k(logits, o):
    return {i: logits[i] for i in by_size(logits)[:o["top_k"] or len(logits)]}


def until(order, p, enough):
    """The first of `order` until enough(sum of their probabilities)."""
    kept, total = [], 0.0
    for i in order:
        kept.append(i)
        total += p[i]
        if enough(total):
            break
    return kept


def typ_p(logits, o):
    p, h = probabilities(logits), entropy(logits)
    order = sorted(by_size(logits), key=lambda i: abs(-math.log(p[i]) - h) if p[i] else math.inf)
    kept = until(order, p, lambda total: total > o["typical_p"])
    return {i: logits[i] for i in kept} if o["typical_p"] < 1 else logits


def top_p(logits, o):
    kept = until(by_size(logits), probabilities(logits), lambda total: total >= o["top_p"])
    return {i: logits[i] for i in kept} if o["top_p"] < 1 else logits


def min_p(logits, o):
    p = probabilities(logits)
    return {i: x for i, x in logits.items() if p[i] >= o["min_p"] * max(p.values()) * (1 - 1e-12)}


def xtc(logits, o):
    """As when it is drawn."""
    p = probabilities(logits)
    top = [i for i in by_size(logits) if p[i] >= o["xtc_threshold"]]
    gone = top[:-1] if o["xtc_threshold"] <= 0.5 else []
    return {i: x for i, x in logits.items() if i not in gone}


def temperature(logits, o):
    temp, spread = o["temp"], o["dynatemp_range"]
    if spread and len(logits) > 1:
        low, high = max(0.0, temp - spread), temp + spread
        temp = low + (high - low) * (entropy(logits) / math.log(len(logits))) ** o["dynatemp_exponent"]
    return {i: x / temp for i, x in logits.items()} if temp > 0 else {by_size(logits)[0]: 0.0}


CHAIN = (top_n_sigma, top_k, typ_p, top_p, min_p)


def chain(logits, o, last=(), breakers=()):
    """{id: probability} of llama.cpp's default chain; with XTC, of both its outcomes."""
    x = {i: float(v) + o["logit_bias"].get(i, 0.0) for i, v in enumerate(logits)}
    x = dry(penalties(x, o, list(last)), o, list(last), breakers)
    for step in CHAIN:
        x = step(x, o)
    without = probabilities(temperature(x, o))
    excluded, often = probabilities(temperature(xtc(x, o), o)), o["xtc_probability"]
    both = {i: (1 - often) * without.get(i, 0) + often * excluded.get(i, 0) for i in {*without, *excluded}}
    return {i: p for i, p in both.items() if p}


def mirostat(logits, o, mu):
    """{id: probability} of the next draw."""
    x = temperature(dict(enumerate(map(float, logits))), o | {"dynatemp_range": 0})
    order, p = by_size(x), probabilities(x)
    if o["mirostat"] == 2:
        kept = [i for i in order if -math.log2(p[i]) <= mu] or order[:1]
    else:
        pairs = [(math.log((i + 2) / (i + 1)), math.log(p[order[i]] / p[order[i + 1]]))
                 for i in range(min(99, len(order) - 1))]
        s = sum(t * b for t, b in pairs) / sum(t * t for t, _ in pairs)
        k = ((s - 1) * 2 ** mu / (1 - len(x) ** -(s - 1))) ** (1 / s)
        kept = order[:max(int(min(k, len(x))), 1)]
    return probabilities({i: x[i] for i in kept})
