"""HellaSwag and multiple choice: which of several endings a model finds most probable.

    score of an ending = mean of log p of its tokens, given the context         the largest is the model's choice

The tokens that all of "context ending" have in common are read once.  Sources: llama.cpp's llama-perplexity
(--hellaswag); Zellers et al. 2019, arXiv 1905.07830.

    files    .txt      six lines a task: context, number of the right ending (0 to 3), four endings     (llama.cpp's)
             .jsonl    {"context": ..., "choices": [...], "answer": 0}, a task a line
"""
import math

import numpy as np

from ggjit.core.arguments import typed_call
from ggjit.display.progress import bar
from ggjit.models.core.checks import is_path, read_text
from ggjit.models.text.logprobs import log_softmax
from ggjit.ops.core.errors import BadFile, NotSupported, ParamError
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.whole_numbers import is_whole

LINES = 6                       # lines of one task in HellaSwag's file


def ending_scores(m, context, endings):
    """(n,) float64: mean log p of each ending after the context, a text each; a space stands between.

        ending_scores(m, "The capital of France is", ["Paris.", "a banana."])

    The text so far is forgotten.  Errors: ParamError for no endings or none that differ, or a text longer than the
    context; NotSupported for a model that predicts nothing.
    """
    if not hasattr(m, "decode"):
        raise NotSupported(f"{m.file.path}: {m.file.arch} predicts no tokens; take a model that generates text")
    if not isinstance(context, str) or not isinstance(endings, list | tuple) or len(endings) < 2 or not all(
            isinstance(e, str) and e for e in endings):
        raise ParamError("a context and two or more endings are expected, all of them texts that are not empty")
    with m._lock:
        texts = [m._checked_ids(m.tokenize(f"{context} {e}"), m.n_ctx) for e in endings]
        least = min(map(len, texts)) - 1
        differ = np.flatnonzero([len({int(ids[i]) for ids in texts}) > 1 for i in range(least)])
        n = int(differ[0]) if len(differ) else least
        if n < 1:
            raise ParamError("the endings have no token before them in common; give a context that is not empty")
        m.reset()
        first, out = m.decode(texts[0][:n]), []
        for ids in texts:
            rest = ids[n:]
            rows = [first[None]] + ([m.decode(rest[:-1], all_logits=True)] if len(rest) > 1 else [])
            logp = log_softmax(m._finite(np.concatenate(rows), "the logits"))
            out.append(logp[np.arange(len(rest)), rest].mean())
            if m.recurrent:
                m.reset()
                m.decode(texts[0][:n])
            else:
                m.cut_text(n)
    return np.array(out)


@typed_call
def multiple_choice(m, tasks, n_tasks=None, progress=True):
    """How often a model's choice is right: {"accuracy", "error", "n_tasks"}; error: of the share, one sigma.

    tasks: [(context, endings, number of the right one)], or the path of a file, see above.  n_tasks: the first so many.
    Errors: BadFile, and those of ending_scores.
    """
    tasks = read_tasks(tasks) if is_path(tasks) else list(tasks)
    tasks = tasks if n_tasks is None else tasks[:n_tasks]
    if not tasks:
        raise ParamError("no tasks; the file is empty, or n_tasks is 0")
    right = 0
    with bar("tasks", len(tasks), drawn=progress) as step:
        for context, endings, answer in tasks:
            right += int(np.argmax(ending_scores(m, context, endings))) == answer
            step()
    p, n = right / len(tasks), len(tasks)
    return {"accuracy": p, "error": math.sqrt(p * (1 - p) / max(n - 1, 1)), "n_tasks": n}


def read_tasks(path):
    """[(context, endings, number of the right one)] of a file.  Errors: BadFile with the line."""
    lines = read_text(path).splitlines()
    if str(path).endswith(".jsonl"):
        return [_of_json(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not lines or len(lines) % LINES:
        raise BadFile(f"{path} has {len(lines)} lines; a task has {LINES}: context, number of the right ending, four "
                      f"endings")
    found = []
    for i in range(0, len(lines), LINES):
        context, answer, *endings = lines[i:i + LINES]
        if answer.strip() not in ("0", "1", "2", "3"):
            raise BadFile(f"{path}, line {i + 2}: {answer[:40]!r} is not a number of an ending, 0 to 3")
        found.append((context, endings, int(answer)))
    return found


def _of_json(path, i, line):
    try:
        task = parse_json(line)
        context, endings, answer = task["context"], task["choices"], task["answer"]
    except (ValueError, TypeError, KeyError):
        raise BadFile(f'{path}, line {i}: expected {{"context": ..., "choices": [...], "answer": 0}}') from None
    if not isinstance(endings, list) or not is_whole(answer, 0, len(endings) - 1):
        raise BadFile(f"{path}, line {i}: the answer is {answer!r}, expected the number of one of the choices")
    return context, endings, answer
