"""Fill-in-the-middle: the prompt for a text with a gap, made of the tokens with which the model was trained.

    [others] begin PRE before SUF after MID         what the model writes then stands between `before` and `after`
    others      REP repository  SEP name, text of each other file  SEP name of this one, where there are such tokens

Source: llama.cpp's format_prompt_infill; arXiv 2207.14255, 2409.12186.
"""
from ggjit.ops.core.errors import NotSupported, ParamError, TypeMismatch

NEEDED = "fim_pre", "fim_suf", "fim_mid"
SNIPPET = "\n\n--- snippet ---\n\n"           # between other texts, where no token separates files


def infill_ids(tokenizer, before, after, others=(), suffix_first=False, path="the model"):
    """Token ids of the prompt.  others: (name, text) of other files; suffix_first: SUF after PRE before MID.

    Errors: NotSupported for a vocabulary without such tokens, TypeMismatch.
    """
    middle = tokenizer.middle_ids
    missing = [role for role in NEEDED if role not in middle]
    if missing:
        raise NotSupported(f"{path} has no tokens {', '.join(missing)}: it was not trained to fill in the middle; take "
                           f"a code model, or m.generate for what follows")
    for name, text in (("before", before), ("after", after)):
        if not isinstance(text, str):
            raise TypeMismatch(f"infill: {name} is a text, got {type(text).__name__}")
    parts = [[middle["fim_pre"], *_ids(tokenizer, before)], [middle["fim_suf"], *_ids(tokenizer, after)]]
    begin = [tokenizer.bos_id] if tokenizer.add_bos else []
    return _others(tokenizer, others) + begin + sum(reversed(parts) if suffix_first else parts, []) + [
        middle["fim_mid"]]


def _ids(tokenizer, text):
    return tokenizer.encode(text, add_special=False)


def _others(tokenizer, others):
    """Ids of the texts before the prompt; none where there are none."""
    if not isinstance(others, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(x, str) for x in pair)
            for pair in others):
        raise ParamError(f"infill: others is a list of (name, text), got {others!r}")
    if not others:
        return []
    middle, ids = tokenizer.middle_ids, []
    if "fim_rep" in middle:
        ids += [middle["fim_rep"], *_ids(tokenizer, "myproject\n")]
    for name, text in others:
        ids += [middle["fim_sep"], *_ids(tokenizer, name + "\n")] if "fim_sep" in middle else \
            _ids(tokenizer, SNIPPET)
        ids += _ids(tokenizer, text)
    return ids + ([middle["fim_sep"], *_ids(tokenizer, "filename\n")] if "fim_sep" in middle else [])
