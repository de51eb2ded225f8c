"""Requests in OpenAI's format: converts them to options of `generate`, and answers to JSON.

    request  -- options(), stops(), tools -->  prompt and options of a sequence
    sequence -- finish_reason(), logprobs, tool calls -->  choices

Tool calls: the answer has `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, as Hermes, Qwen and SmolLM2
write them; from `<tool_call>` on a grammar holds it to the names and parameters of the tools.  A template that does not
know tools gets them in a system message.
"""
import json
import re

from ggjit.models.text.json_schema import to_gbnf
from ggjit.models.text.sampling import OPTIONS
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.whole_numbers import is_whole

FINISHED = {"stop_token": "stop", "stop_string": "stop", "grammar": "stop", "length": "length", "context": "length",
            "cancelled": "length"}
NAMES = {"temperature": "temp"}                 # of OpenAI's, where ours is another
MAX_STOPS, MAX_CHOICES, MAX_TOP_LOGPROBS, MAX_TOOLS = 64, 16, 1 << 10, 128
CALL, END_CALL = "<tool_call>", "</tool_call>"
TOOLS_PROMPT = """You may call one or more functions to assist with the user query. Their signatures are within \
<tools></tools> tags:
<tools>
{tools}
</tools>
For each function call, return a JSON object with its name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


# ---------------------------------------------------------------- fields of a request
def field(body, name, kinds, default=None, what=None):
    """body[name], of one of the types `kinds`; null is as if it were absent.  Errors: ParamError."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kinds) or isinstance(value, bool) and bool not in _listed(kinds):
        raise ParamError(f"{name} is {json.dumps(value)[:60]}, expected {what or _words(kinds)}")
    return value


def _listed(kinds):
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _words(kinds):
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object",
             list: "a list"}
    return " or ".join(dict.fromkeys(names[k] for k in _listed(kinds)))


def whole(body, names, low, high, default=None):
    """The first of these fields that is there, a whole number from low to high."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if not is_whole(value, low, high):
                raise ParamError(f"{name} is {json.dumps(value)[:60]}, expected a whole number from {low} to {high}")
            return int(value)
    return default


def options(body):
    """Options of `generate` that a request names, OpenAI's and llama.cpp's; others are passed over."""
    found = {"temp": OPTIONS["temp"].default}
    for name in OPTIONS:
        if body.get(name) is not None and name != "logit_bias":
            found[name] = body[name]
    for name, ours in NAMES.items():
        if body.get(name) is not None:
            found[ours] = body[name]
    if body.get("seed") is not None and is_whole(body["seed"], -1, -1):
        found.pop("seed")                       # llama.cpp's: a new one each time
    bias = field(body, "logit_bias", (dict, list))
    if bias:
        found["logit_bias"] = _bias(bias)
    for name in ("ignore_eos", "cache_prompt"):
        if (value := field(body, name, bool)) is not None:
            found[name] = value
    found["priority"] = whole(body, ("priority",), -1000, 1000, 0)
    return found


def _bias(given):
    """{id: bias} of OpenAI's object of texts or llama.cpp's list of pairs; false rules a token out."""
    pairs = given.items() if isinstance(given, dict) else given
    try:
        return {int(id): -float("inf") if bias is False else float(bias) for id, bias in pairs}
    except (TypeError, ValueError, OverflowError):
        raise ParamError('logit_bias is an object of token ids and numbers, such as {"15043": 1.5}') from None


def stops(body):
    found = field(body, "stop", (str, list), [])
    found = [found] if isinstance(found, str) else found
    if len(found) > MAX_STOPS or not all(isinstance(s, str) and s for s in found):
        raise ParamError(f"stop takes a text, or a list of at most {MAX_STOPS}, none of them empty")
    return found


def grammar_of(body):
    """{"grammar" or "json_schema": ...} that a request asks for by response_format, json_schema or grammar."""
    form = field(body, "response_format", dict)
    kind = form.get("type", "text") if form else "text"
    found = {}
    if kind == "json_object":
        found = {"json_schema": form.get("schema") or {"type": "object"}}
    elif kind == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else form.get("schema")
        if not isinstance(schema, dict | bool):
            raise ParamError('response_format of type json_schema needs {"json_schema": {"schema": {...}}}')
        found = {"json_schema": schema}
    elif kind != "text":
        raise ParamError(f"response_format has the type {kind!r}, expected text, json_object or json_schema")
    for name in ("json_schema", "grammar"):
        if body.get(name) is not None:
            found[name] = field(body, name, (dict, str) if name == "json_schema" else str)
    return found


def top_logprobs(body, chat):
    """How many alternatives each token shall have, or None."""
    if chat:
        if not field(body, "logprobs", bool, False):
            return None
        return whole(body, ("top_logprobs",), 0, MAX_TOP_LOGPROBS, 0)
    return whole(body, ("logprobs",), 0, MAX_TOP_LOGPROBS)


def messages_of(body, senses=()):
    """The messages, with their text parts put together.  senses: of "image_url" and "input_audio", what parts they may
    have besides.  Errors: ParamError."""
    messages = field(body, "messages", list, [])
    if not messages:
        raise ParamError('messages is missing, expected a list such as [{"role": "user", "content": "Hi"}]')
    return [_message(i, m, senses) for i, m in enumerate(messages)]


def _message(i, m, senses):
    if not isinstance(m, dict) or not isinstance(m.get("role"), str):
        raise ParamError(f'messages[{i}] is {json.dumps(m)[:60]}, expected a dict with a role, as in '
                         f'[{{"role": "user", "content": "Hi"}}]')
    if not isinstance(m.get("tool_calls") or [], list):
        raise ParamError(f"messages[{i}] has the tool_calls {json.dumps(m['tool_calls'])[:60]}, expected a list")
    if not isinstance(m.get("content"), list):
        return m
    parts = m["content"]
    if any(isinstance(p, dict) and p.get("type") in senses for p in parts):
        for p in parts:
            _check_part(i, p, senses)
        return m
    if not all(isinstance(p, dict) and p.get("type") in ("text", "input_text", "refusal") for p in parts):
        raise ParamError(f"messages[{i}] has parts that are not text; this model reads text alone")
    texts = [p.get("text", "") for p in parts]
    wrong = next((t for t in texts if not isinstance(t, str)), "")
    if wrong != "":
        raise ParamError(f"messages[{i}] has a part whose text is {json.dumps(wrong)[:60]}, expected a text")
    return {**m, "content": "".join(texts)}


def _check_part(i, p, senses):
    """Pictures and sounds come as bytes: a path would be a file of the server's machine."""
    kind = p.get("type") if isinstance(p, dict) else None
    if kind != "text" and kind not in senses:
        raise ParamError(f"messages[{i}] has a part of type {kind!r}; this model reads text, {', '.join(senses)}")
    held = p.get(kind)
    if kind == "image_url":
        held = held.get("url") if isinstance(held, dict) else held
        if not str(held).startswith("data:"):
            raise ParamError(f"messages[{i}]: pictures are sent as data: addresses, "
                             f'{{"type": "image_url", "image_url": {{"url": "data:image/png;base64,..."}}}}')
    elif kind == "input_audio" and not (isinstance(held, dict) and isinstance(held.get("data"), str)):
        raise ParamError(f"messages[{i}]: sounds are sent as base64, "
                         f'{{"type": "input_audio", "input_audio": {{"data": "...", "format": "wav"}}}}')


# ---------------------------------------------------------------- tools
class Tools:
    """The tools of a request, and what its tool_choice allows: "none", "auto", "required", or a name."""

    def __init__(self, body):
        given = field(body, "tools", list, [])
        if len(given) > MAX_TOOLS:
            raise ParamError(f"tools has {len(given)} entries, at most {MAX_TOOLS} are taken")
        self.functions = {}
        for i, tool in enumerate(given):
            f = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(f, dict) or not isinstance(f.get("name"), str) or not f["name"]:
                raise ParamError(f'tools[{i}] is not a function, expected {{"type": "function", "function": {{"name": '
                                 f'"...", "parameters": {{...}}}}}}')
            self.functions[f["name"]] = f
        choice = body.get("tool_choice", "auto")
        if isinstance(choice, dict):
            function = choice.get("function") or choice
            choice = function.get("name") if isinstance(function, dict) else function
            if not isinstance(choice, str) or choice not in self.functions:
                raise ParamError(f"tool_choice names {choice!r}, which is not one of the tools")
            self.functions = {choice: self.functions[choice]}
            choice = "required"
        if choice not in ("none", "auto", "required", None):
            raise ParamError(f'tool_choice is {choice!r}, expected "none", "auto", "required" or a function')
        if choice == "required" and not self.functions:
            raise ParamError("tool_choice is \"required\", but there are no tools")
        self.choice = "none" if not self.functions else choice or "auto"
        self.parallel = field(body, "parallel_tool_calls", bool, False)         # llama.cpp's default
        self.given = given if self.choice != "none" else []

    def __bool__(self):
        return self.choice != "none"

    def shown(self, messages, template_knows):
        """The messages; with the tools in a system message, where the template does not show them."""
        if not self or template_knows:
            return messages
        words = TOOLS_PROMPT.format(tools="\n".join(map(json.dumps, self.given)))
        first, *rest = messages
        if first.get("role") == "system":
            return [{**first, "content": f"{first.get('content') or ''}\n\n{words}"}, *map(_plain, rest)]
        return [{"role": "system", "content": words}, *map(_plain, messages)]

    def grammar(self):
        """Options of `generate` that hold calls to these tools."""
        calls = [{"type": "object", "properties": {"name": {"const": name},
                  "arguments": f.get("parameters") or {"type": "object"}}, "required": ["name", "arguments"]}
                 for name, f in self.functions.items()]
        rules = to_gbnf(calls[0] if len(calls) == 1 else {"anyOf": calls})
        rules = re.sub(r"(?m)^root ::=", "call ::=", rules)
        more = ' ("\\n" one)*' if self.parallel else ""
        rules += f'\none ::= "{CALL}" "\\n"? call "\\n"? "{END_CALL}"\nroot ::= one{more}\n'
        return {"grammar": rules} | ({} if self.choice == "required" else {"grammar_triggers": [CALL]})


def _plain(m):
    """A message about calls as text, for templates without tools."""
    if m.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{m.get('content') or ''}\n</tool_response>"}
    if m.get("tool_calls"):
        calls = "\n".join(f"{CALL}\n{json.dumps(_said(c))}\n{END_CALL}" for c in m["tool_calls"])
        return {"role": m["role"], "content": f"{m.get('content') or ''}{calls}"}
    return m


def _said(call):
    f = call.get("function") if isinstance(call, dict) else None
    f = f if isinstance(f, dict) else {}
    arguments = f.get("arguments", {})
    try:
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        pass                                    # shown as the text it is
    return {"name": f.get("name"), "arguments": arguments}


def calls_of(text, id):
    """(the text before the first call, the calls as OpenAI has them).  A first call that is cut off is text."""
    before, *rest = text.split(CALL)
    found = []
    for i, part in enumerate(rest):
        inner, end, _ = part.partition(END_CALL)
        try:
            call = parse_json(inner)
            arguments = call["arguments"]
            found.append({"index": i, "id": f"call_{id}_{i}", "type": "function", "function": {
                "name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}})
        except (ValueError, TypeError, KeyError):
            break
        if not end:
            break
    return (before.strip(), found) if found else (text, [])


# ---------------------------------------------------------------- answers
def chat_logprobs(tokens):
    """The tokens as `logprobs` of a chat's choice has them."""
    return {"content": [_token(t) | {"top_logprobs": [_token(a) for a in t.alternatives]} for t in tokens]}


def _token(t):
    return {"token": t.text, "logprob": t.logprob, "bytes": list(t.text.encode("utf-8", "replace"))}


def text_logprobs(tokens, first_offs=0):
    """The tokens as `logprobs` of a completion's choice has them; first_offs: characters before them."""
    offs = [first_offs]
    for t in tokens:
        offs.append(offs[-1] + len(t.text))
    return {"tokens": [t.text for t in tokens], "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [{a.text: a.logprob for a in t.alternatives} for t in tokens], "text_offset": offs[:-1]}


def usage(runs, n_shared=0):
    n_prompt, n_written = len(runs[0].prompt_ids), sum(len(run.answer.tokens) for run in runs)
    return {"prompt_tokens": n_prompt, "completion_tokens": n_written, "total_tokens": n_prompt + n_written,
            "prompt_tokens_details": {"cached_tokens": n_shared}}


def finish_reason(run):
    return FINISHED.get(run.answer.stop_reason, "stop")
