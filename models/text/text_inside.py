"""A generated text in a notebook: a click on a token shows the lens, attention and values at the position that
chose it.

    place of token k        the last token before it: its layers chose token k
"""
import numpy as np

from ggjit.core.html_repr import escape
from ggjit.models.text.logprobs import ROW, tokens_html

MOST_TOKENS = 64                # of a generated text that are opened; the first ones
LAYERS = 10                     # layers that a panel shows, evenly spread, the last one among them
LOOKED_AT = 5                   # tokens
_CELL = "padding:0 8px 0 0;border:0;text-align:left;background:transparent"


class TextInside:
    """`.lens` (LogitLens), `.attention` (AttentionMaps, None), `.norms` (n_layer + 1, n_tokens) of prompt and text."""

    def __init__(self, model, prompt_ids, tokens, top):
        self.tokens, self.n_prompt = tokens[:MOST_TOKENS], len(prompt_ids)
        self.prompt = model.detokenize(prompt_ids)
        ids = [*prompt_ids, *(t.id for t in self.tokens)][:-1]
        self.lens = model.logit_lens(ids, top)
        self.norms = np.linalg.norm(model.hidden_states(ids).values, axis=-1)
        has_scores = any(s.name.endswith("kq_soft_max") for s in model.names())
        self.attention = model.attention(ids) if has_scores else None

    def _panel(self, k):
        at, n_rows = self.n_prompt - 1 + k, len(self.lens.words)
        rows = sorted({round(i) for i in np.linspace(0, n_rows - 1, min(LAYERS, n_rows)).tolist()})
        head = "".join(f"<th style='{_CELL}'>{t}</th>" for t in ("after layer", "would say", "norm of its values"))
        lines = "".join(f"{ROW}<td style='{_CELL}'>{'embd' if i == 0 else i - 1}</td><td style='{_CELL}'>"
                        f"{self._words(i, at)}</td><td style='{_CELL}'>{self.norms[i, at]:.1f}</td></tr>" for i in rows)
        return f"<table style='margin:4px 0;border-collapse:collapse'><tr>{head}</tr>{lines}</table>{self._looks(at)}"

    def _words(self, i, at):
        """The likeliest tokens after a row of layers, coloured by probability."""
        return " ".join(f"<span style='background:rgba(70,130,220,{0.55 * float(p):.2f});border-radius:3px'>"
                        f"{escape(repr(word))}</span>"
                        for word, p in zip(self.lens.words[i][at], self.lens.probabilities[i, at], strict=True))

    def _looks(self, at):
        """The tokens that attention went to, as the mean over layers and heads, as text."""
        if self.attention is None:
            return ""
        weights = np.mean([w[:, at, :at + 1].mean(0) for w in self.attention.weights.values()], 0)
        best = np.argsort(-weights)[:LOOKED_AT]
        return "looked at: " + ", ".join(f"{escape(repr(self.lens.tokens[j]))} {weights[j]:.2f}" for j in best)

    def _repr_html_(self):
        return tokens_html(self.tokens, self.prompt, [self._panel(k) for k in range(len(self.tokens))])

    def __repr__(self):
        return f"<TextInside of {len(self.tokens)} tokens; in a notebook a click opens each>"
