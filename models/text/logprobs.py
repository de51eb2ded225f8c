"""Log-probabilities of tokens: log p of every id, by the model's own distribution.

    log p = logits - log(sum(exp(logits)))          in float64, of the logits as the network gives them

Temperature, filters, penalties, biases and grammars come after it: a token that was drawn under a grammar may have a
small log p here, and the alternatives may be ones that the grammar does not allow.
"""
import dataclasses
import math
import secrets

import numpy as np

from ggjit.core.html_repr import escape
from ggjit.models.core.checks import integer
from ggjit.ops.core.errors import ShapeError

MOST = 1 << 16                  # alternatives of a token that may be asked for
SHOWN = 10                      # ... and that a notebook cell shows


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A token that could have come: `id`, `text`, `logprob` (nats)."""
    id: int
    text: str
    logprob: float

    def as_dict(self):
        """For JSON."""
        return {"id": self.id, "text": self.text, "logprob": self.logprob}


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token of a text.

    id, text        a character of several tokens is U+FFFD in each of them; an end of text has its name, "<|im_end|>"
    logprob         log p in nats, given all before it; None where that was not asked for, or nothing is before it
    alternatives    the likeliest tokens at this place, the likeliest first, as Alternative
    seconds         from the beginning of the reading until it was chosen; None in texts that were given
    """
    id: int
    text: str
    logprob: float | None = None
    alternatives: tuple = ()
    seconds: float | None = None

    def as_dict(self):
        """For JSON."""
        return {"id": self.id, "text": self.text, "logprob": self.logprob,
                "alternatives": [a.as_dict() for a in self.alternatives]}


def checked_count(logprobs):
    """How many alternatives are wanted, or None for no log-probabilities.  Errors: ParamError."""
    return None if logprobs is None else integer("logprobs", logprobs, 0, MOST,
                                                 " (alternatives of each token), or None")


def log_softmax(logits):
    """log p of the rows of logits (..., n_vocab), float64."""
    z = np.asarray(logits, np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def token_text(tokenizer, id):
    """The text of one token, control tokens by name."""
    return tokenizer.piece(id, special=True).decode("utf-8", "replace")


def token_of(tokenizer, id, logits=None, n_alternatives=0, seconds=None):
    """The TokenLogprob of `id`; logits: the row (n_vocab,) from which it was chosen."""
    if logits is None:
        return TokenLogprob(id, token_text(tokenizer, id), seconds=seconds)
    logp = log_softmax(logits)
    if logp.ndim != 1:
        raise ShapeError(f"logits have shape {logp.shape}, expected one row (n_vocab,)")
    best = tuple(Alternative(i, token_text(tokenizer, i), float(logp[i])) for i in _likeliest(logp, n_alternatives))
    return TokenLogprob(id, token_text(tokenizer, id), float(logp[id]), best, seconds)


def _likeliest(logp, n):
    """Ids of the n largest, the largest first, of equals the smaller id."""
    n = min(n, logp.size)
    if not n:
        return []
    least = np.partition(logp, logp.size - n)[logp.size - n]
    ids = np.flatnonzero(logp >= least)
    return ids[np.argsort(-logp[ids], kind="stable")][:n].tolist()


@dataclasses.dataclass(repr=False)
class ScoredText:
    """What a model says to a given text: `m.score(text)`.

    tokens          TokenLogprobs; the first has no log-probability
    logprob         their sum, nats; perplexity: exp(-mean)
    """
    tokens: list

    @property
    def logprob(self):
        return math.fsum(t.logprob for t in self.tokens if t.logprob is not None)

    @property
    def perplexity(self):
        n = sum(t.logprob is not None for t in self.tokens)
        return math.exp(min(-self.logprob / n, 700.0)) if n else math.nan

    def as_dict(self):
        """For JSON."""
        return {"logprob": self.logprob, "perplexity": self.perplexity, "tokens": [t.as_dict() for t in self.tokens]}

    def __repr__(self):
        return f"<ScoredText: {len(self.tokens)} tokens, logprob {self.logprob:.3f}, perplexity {self.perplexity:.2f}>"

    def _repr_html_(self):
        return tokens_html(self.tokens)


# ---------------------------------------------------------------- in a notebook
ROW = "<tr style='background:transparent'>"         # notebooks colour every second row
_LINE = "padding:0 8px 0 0;border:0;text-align:left;background:transparent"


def tokens_html(tokens, before="", more=None):
    """Tokens one behind the other, blue where likely, orange where not; what else could have come is in their titles,
    and a click on a token opens it below the text.

    Backgrounds are translucent and letters keep the page's colour: it reads on light and dark pages.  No scripts: radio
    buttons that are not shown say which panel is; where a page drops style sheets, no panel is.  before: text in front
    of them, faint.  more: HTML behind the alternatives in the panel of each token.
    """
    legend = ""
    if any(t.logprob is not None for t in tokens):
        colours = "".join(f"<span style='{_style(p)}'>&nbsp;{p:g}&nbsp;</span>" for p in (0, .25, .5, .75, 1))
        legend = (f"<div style='opacity:.7;font-size:85%'>probability of each token: {colours} "
                  f"point at one, or click on it, for what else could have come</div>")
    faint = f"<span style='opacity:.55'>{escape(before)}</span>" if before else ""
    panels = [_panel(t, None if more is None else more[k]) for k, t in enumerate(tokens)]
    if not any(panels):
        return _text_html(faint + "".join(_span(t) for t in tokens)) + legend
    name = f"ggjit-{secrets.token_hex(4)}"
    buttons = "".join(f"<input type='radio' name='{name}' id='{name}-{k}' style='display:none'>"
                      for k, panel in enumerate(panels) if panel)
    labels = "".join(f"<label for='{name}-{k}' style='cursor:pointer;display:inline;margin:0'>{_span(t)}</label>"
                     if panels[k] else _span(t) for k, t in enumerate(tokens))
    shown = ",".join(f"#{name}-{k}:checked~.{name}-{k}" for k, panel in enumerate(panels) if panel)
    below = "".join(f"<div class='{name} {name}-{k}' style='display:none'>{panel}</div>"
                    for k, panel in enumerate(panels) if panel)
    return (f"<div><style>.{name}{{margin:6px 0;padding:6px 10px;font-size:90%;"
            f"border-left:3px solid rgba(128,128,128,.5)}}{shown}{{display:block!important}}</style>"
            f"{buttons}{_text_html(faint + labels)}{legend}{below}</div>")


def _text_html(inside):
    return f"<div style='white-space:pre-wrap;line-height:1.7;text-align:left;overflow-wrap:anywhere'>{inside}</div>"


def _style(p):
    """The background of probability p: no colour at 1/2."""
    rgb, alpha = ("70,130,220", p - 0.5) if p >= 0.5 else ("240,130,20", 0.5 - p)
    return f"background:rgba({rgb},{1.1 * alpha:.2f});border-radius:3px"


def _span(t):
    text = escape(t.text.replace("\n", "\u21b5\n"))
    if t.logprob is None:
        return f"<span title='{t.id}'>{text}</span>"
    lines = [f"{t.text!r} (id {t.id}): p = {math.exp(t.logprob):.3f}, log p = {t.logprob:.3f}"]
    lines += [f"{math.exp(a.logprob):.3f}  {a.text!r}" for a in t.alternatives[:SHOWN]]
    return f"<span style='{_style(math.exp(t.logprob))}' title='{escape(chr(10).join(lines))}'>{text}</span>"


def _panel(t, more):
    """HTML of what a click on the token shows, or ""."""
    if not t.alternatives and not more:
        return ""
    head = f"<span style='font-weight:600'>{escape(repr(t.text))}</span> id {t.id}" + (
        "" if t.logprob is None else f", p = {math.exp(t.logprob):.3f}, log p = {t.logprob:.3f}")
    rows = "".join(f"{ROW}<td style='{_LINE}'>{math.exp(a.logprob):.3f}</td><td style='{_LINE}'>"
                   f"<span style='{_style(math.exp(a.logprob))}'>{escape(repr(a.text))}</span></td></tr>"
                   for a in t.alternatives[:SHOWN])
    return f"{head}<table style='margin:4px 0;border-collapse:collapse'>{rows}</table>{more or ''}"
