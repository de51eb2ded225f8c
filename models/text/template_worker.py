"""Renders chat templates, in a process of its own: `python template_worker.py`, started by chat_template.py.

A template is a program out of a file that may not be trusted.  Jinja's sandbox keeps it from Python's objects; time,
memory and output are bounded because the process is: it has MAX_NBYTES of memory and is killed when an answer takes too
long.

    a line in   {"source": the template, "variables": {...}, "most": characters}
    a line out  {"text": ...} or {"error": words, "kind": "refused" | "broken", "line": number or null}

Imports nothing but the standard library and jinja2: it starts in a moment.
"""
import datetime
import json
import signal
import sys

import jinja2
import jinja2.sandbox
from jinja2.ext import Extension, loopcontrols

MAX_NBYTES = 1 << 30


class Refused(Exception):
    """The template called raise_exception."""


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what a model is trained on: here just its contents."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Plain JSON, as templates are written for: no HTML escapes, in the order of the message."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise Refused(str(message))


def strftime_now(format):
    return datetime.datetime.now().strftime(format)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                       extensions=[loopcontrols, GenerationTag])
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return env


def render(env, source, variables, most):
    """The text, at most `most` characters."""
    pieces, n = [], 0
    for piece in env.from_string(source).generate(**variables):
        pieces.append(piece)
        n += len(piece)
        if n > most:
            raise ValueError(f"its output is longer than {most:,} characters")
    return "".join(pieces)


def answer(env, job):
    """{"text": ...}, or {"kind": "refused" or "broken", "error": why, "line": of the template or None}."""
    try:
        return {"text": render(env, **job)}
    except Refused as e:
        return {"kind": "refused", "error": str(e), "line": None}
    except jinja2.TemplateSyntaxError as e:
        return {"kind": "broken", "error": e.message, "line": e.lineno}
    except Exception as e:          # a template may raise any error in any function that it calls
        line, frame = None, e.__traceback__
        while frame:
            line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == "<template>" else line
            frame = frame.tb_next
        known = isinstance(e, jinja2.TemplateError | ValueError)
        return {"kind": "broken", "error": str(e) if known else f"{type(e).__name__} {e}".strip(), "line": line}


def main():
    """Answer jobs, a line of JSON each, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is handled by the parent process
    try:
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MAX_NBYTES, MAX_NBYTES))
    except (ImportError, ValueError, OSError):          # a system without such limits: only the time limit holds
        pass
    env = environment()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(env, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
