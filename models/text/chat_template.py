"""Chat templates: from messages to the model's prompt, by the Jinja template in its file.

    {"role": "user", "content": "Hi"}, ... -- template --> "<|im_start|>user\\nHi<|im_end|>\\n..." --> token ids

Rendering is done by a process of its own (template_worker.py), one for all models: what a template may cost is bounded
there.  A file may hold several templates: `tokenizer.chat_template` and, by name, `tokenizer.chat_template.NAME`.
"""
import atexit
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading
from typing import NamedTuple

from ggjit.core.arguments import nearest
from ggjit.models.files.gguf import StringArray
from ggjit.ops.core.errors import MissingExtra, ModelError, NotSupported, ParamError
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.user_warnings import warn_once

KEY = "tokenizer.chat_template"
ROLES = frozenset(("system", "user", "assistant", "tool", "developer", "function", "model", "ipython"))
MAX_CHARS = 1 << 24             # of a rendered conversation
MAX_SECONDS = 5.0              # for rendering one
# the remedy in the error for a file without a template
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class ChatPrompt(NamedTuple):
    """A conversation as the model sees it: `text`, and its `ids` with special tokens."""
    text: str
    ids: list


def chat_prompt(file, tokenizer, messages, /, tools=None, add_generation_prompt=True, template=None, **variables):
    """ChatPrompt of `messages`: a list of {"role": ..., "content": ...}, or a text that the user says.

    tools: passed on to the template, as are other `variables`.  template: Jinja source, or the name of one in the file
    ("default" for its main one); None: the file's, with tools the one named "tool_use" where there is one.
    add_generation_prompt: ends with the beginning of an answer.

    Errors: ParamError for messages of another shape or that the template refuses, ModelError for a file without a
    template or with one that fails, MissingExtra without jinja2.
    """
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    _check(messages)
    source, what = _source(file, template, tools)
    _warn_of_roles(messages, source)
    names = {f"{kind}_token": tokenizer.piece(id, special=True).decode("utf-8", "replace")
             for kind, id in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)) if id is not None}
    variables = {"bos_token": "", "eos_token": ""} | names | variables | {
        "messages": messages, "tools": tools, "add_generation_prompt": bool(add_generation_prompt)}
    text = _render(what, source, variables)
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    if tokenizer.add_bos and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ChatPrompt(text, ids)


def _warn_of_roles(messages, source):
    """Warn once of a role that no model was trained with, which templates write down like any other."""
    for role in {m["role"] for m in messages} - ROLES:
        if role not in source:
            warn_once(("role", role), f"chat: no model knows the role {role!r}{nearest(role, sorted(ROLES))}, and the "
                                      f"template does not name it; usual are system, user, assistant and tool")


def _check(messages):
    """ParamError unless it is a list of messages."""
    example = '[{"role": "user", "content": "Hi"}]'
    if not isinstance(messages, list | tuple) or not messages:
        raise ParamError(f"messages is {_short(messages)}, expected a list of them, such as {example}")
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            raise ParamError(f"messages[{i}] is {_short(m)}, expected a dict with a role, as in {example}")
        content = m.get("content")
        if not isinstance(content, str | list) and not (content is None and m.get("tool_calls")):
            raise ParamError(f"messages[{i}] has the content {_short(content)}, expected a text, as in {example}")


def _short(x):
    words = repr(x)
    return words if len(words) <= 60 else words[:57] + "..."


def _source(file, template, tools):
    """(template, what it is called in errors)."""
    names = {"default": KEY} | {name: f"{KEY}.{name}" for name in file.get(KEY + "s", (), kind=StringArray)}
    known = {name: key for name, key in names.items() if file.get(key, None, kind=str) is not None}
    if template is None:
        name = "tool_use" if tools and "tool_use" in known else "default"
        if name not in known:
            raise ModelError(f"{file.path}: the file holds no chat template ({KEY}); give one: template='chatml' "
                             f"(--chat-template chatml), or the text of the model's own"
                             f"{', or one of ' + ', '.join(known) if known else ''}")
    elif not isinstance(template, str):
        raise ParamError(f"template is {_short(template)}, expected Jinja text or a name")
    elif template in known:
        name = template
    elif template == "chatml":
        return CHATML, "chat template chatml"
    elif "{" not in template:
        raise ParamError(f"no chat template {template!r}{nearest(template, known)}; {file.path} holds "
                         f"{', '.join(known) or 'none'}; chatml is always there")
    else:
        return template, "the chat template"
    return file.get(known[name], None, kind=str), f"{file.path}: {known[name]}"


def _render(what, source, variables):
    try:
        job = json.dumps({"source": source, "variables": variables, "most": MAX_CHARS})
    except (TypeError, ValueError, RecursionError) as e:
        raise ParamError(f"messages, tools and variables of a chat have to be JSON: {e}") from None
    got = _WORKER.ask(job)
    if "text" in got:
        return got["text"]
    if got["kind"] == "refused":
        raise ParamError(f"{what} refuses these messages: {got['error']}")
    line = f", line {got['line']}" if got["line"] else ""
    raise ModelError(f"{what}{line}: {got['error']}; give another one: template='chatml' or Jinja text")


class _Worker:
    """The rendering process: started when it is first needed, ended with this one, replaced when it was killed."""

    def __init__(self):
        self._process, self._pid, self._lock = None, None, ForkLock()

    def ask(self, job):
        """The answer to a line; one that says "broken" if there was none in time."""
        with self._lock:
            process = self._running()
            timer = threading.Timer(MAX_SECONDS, process.kill)
            timer.start()
            try:
                process.stdin.write(job + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            # Ctrl-C: the worker is ended, so that its late answer is not taken for that of the next job
            except BaseException:
                self._end()
                raise
            finally:
                timer.cancel()
            if line.endswith("\n"):
                return json.loads(line)
            self._end()
        return {"kind": "broken", "error": f"it used more than {MAX_SECONDS:g} s, or all memory it may have",
                "line": None}

    def _running(self):
        if self._process is None or self._process.poll() is not None or self._pid != os.getpid():
            if importlib.util.find_spec("jinja2") is None:
                raise MissingExtra("jinja2 is not installed; pip install 'ggjit[models]'")
            if not sys.executable:
                raise NotSupported("chat templates are rendered by a Python process, and sys.executable names none")
            path = pathlib.Path(__file__).with_name("template_worker.py")
            self._process = subprocess.Popen([sys.executable, "-P", path], stdin=subprocess.PIPE, text=True,
                                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
            self._pid = os.getpid()
            atexit.register(self._process.kill)
        return self._process

    def _end(self):
        process, self._process = self._process, None
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


_WORKER = _Worker()
