"""OpenAI's Responses API: /v1/responses, computed as a chat and answered in its own format.

    request  -- chat_body -->  body of a chat        instructions, items of `input`, flat tools, text.format
    pieces   -- ResponseForm -->  items of `output`  a message, then function calls; in a stream an event for each step

        response.created, response.in_progress
        response.output_item.added, response.content_part.added                  before the first text
        response.output_text.delta ...
        response.output_text.done, response.content_part.done, response.output_item.done
        response.output_item.added, response.function_call_arguments.delta, .done, response.output_item.done    a call
        response.completed, or response.incomplete

Nothing is stored: a conversation is sent whole each time, and what its beginning has in common with earlier requests is
not read again.  Of tools there are functions alone.
"""
import json
import time

from ggjit.ops.core.errors import ParamError
from ggjit.tools.serve import forms
from ggjit.tools.serve.answers import ChatForm

STORED = "previous_response_id", "conversation", "prompt", "background"
TEXT_PARTS = "input_text", "output_text", "text", "refusal"
LOGPROBS = "message.output_text.logprobs"


# ---------------------------------------------------------------- the request
def chat_body(body):
    """The request as the body of a chat.  Errors: ParamError."""
    if kept := [name for name in STORED if body.get(name)]:
        raise ParamError(f"{kept[0]} needs a server that stores answers; this one stores none: send the items of the "
                         f"conversation in `input`, each request whole")
    chat = {name: value for name, value in body.items() if name not in ("input", "tools", "text", "instructions", "n")}
    instructions = forms.field(body, "instructions", str)
    chat["messages"] = [{"role": "system", "content": instructions}] * bool(instructions) + _messages(body.get("input"))
    chat["tools"], chat["tool_choice"] = _tools(body)
    chat["max_tokens"] = forms.whole(body, ("max_output_tokens",), 1, 1 << 30)
    chat["response_format"] = (forms.field(body, "text", dict) or {}).get("format")
    if LOGPROBS in forms.field(body, "include", list, []):
        chat["logprobs"] = True
    return chat


def _messages(given):
    """The messages of `input`: a text, or a list of items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ParamError('input is missing: a text, or a list of items such as {"role": "user", "content": "Hi"}')
    messages = []
    for i, item in enumerate(given):
        _add(messages, item if isinstance(item, dict) else {}, i)
    return messages


def _add(messages, item, i):
    """Add an item to the messages; calls belong to the assistant's message before them."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"), i)})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": {
            "name": item.get("name"), "arguments": item.get("arguments")}})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"),
                         "content": _content(item.get("output"), i)})
    elif kind != "reasoning":                   # what others thought is not shown to the model
        raise ParamError(f"input[{i}] has the type {kind!r}, expected message, function_call, function_call_output or "
                         f"reasoning")


def _content(content, i):
    """A text, or parts under the names that a chat has for them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ParamError(f"input[{i}] holds {json.dumps(content)[:60]}, expected a text or a list of parts")
    return [_part(part if isinstance(part, dict) else {}, i) for part in content]


def _part(part, i):
    kind = part.get("type")
    if kind in TEXT_PARTS:
        return {"type": "text", "text": part.get("refusal" if kind == "refusal" else "text")}
    if kind == "input_image":
        return {"type": "image_url", "image_url": part.get("image_url")}
    if kind == "input_audio":
        return part
    raise ParamError(f"input[{i}] has a part of type {kind!r}; expected input_text, output_text, input_image or "
                     f"input_audio")


def _tools(body):
    """(tools, tool_choice) as a chat has them."""
    tools = forms.field(body, "tools", list, [])
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise ParamError(f"tools[{i}] has the type {kind!r}; this server calls functions alone, and leaves them to "
                             f"the client")
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = [t.get("name") for t in forms.field(choice, "tools", list, []) if isinstance(t, dict)]
        tools, choice = [t for t in tools if t.get("name") in allowed], choice.get("mode", "auto")
    return [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in tools], choice


# ---------------------------------------------------------------- the answer
class ResponseForm(ChatForm):
    """/v1/responses.  body: the request, of which the answer repeats some fields."""
    prefix, tells_usage, DONE = "resp", True, b""

    def __init__(self, name, tools, body):
        super().__init__(name, tools)
        self._body, self._n_events, self._text, self._tokens = body, 0, None, []
        self._output, self._cut = [], False

    def _response(self, status, usage=None):
        b = self._body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        done = {"completed_at": int(time.time())} if status == "completed" else {}
        return done | {
            "id": self.id, "object": "response", "created_at": self.created, "model": self.name, "status": status,
            "error": None, "incomplete_details": reason, "output": list(self._output), "usage": _usage(usage),
            "instructions": b.get("instructions"), "max_output_tokens": b.get("max_output_tokens"),
            "metadata": b.get("metadata") or {}, "parallel_tool_calls": bool(b.get("parallel_tool_calls")),
            "previous_response_id": None, "store": False, "temperature": b.get("temperature"),
            "text": b.get("text") or {"format": {"type": "text"}}, "tool_choice": b.get("tool_choice") or "auto",
            "tools": b.get("tools") or [], "top_p": b.get("top_p"), "truncation": "disabled"}

    def _part(self, text, tokens=()):
        logprobs = forms.chat_logprobs(tokens)["content"] if self.has_logprobs else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _message(self, status, *parts):
        return {"type": "message", "id": f"msg_{self.id[5:]}", "role": "assistant", "status": status,
                "content": list(parts)}

    def _call(self, call, status="completed"):
        return {"type": "function_call", "id": f"fc_{call['id'][5:]}", "call_id": call["id"], "status": status,
                **call["function"]}

    def _status(self, cut):
        return "incomplete" if cut else "completed"

    # ------------------------------------------------------------ whole
    def choice(self, i, text, run):
        text, calls = self._calls(text, i)
        self._cut = not calls and forms.finish_reason(run) == "length"
        if text or not calls:
            self._output.append(self._message(self._status(self._cut), self._part(text, run.answer.scored)))
        self._output += map(self._call, calls)

    def whole(self, choices, usage):
        return self._response(self._status(self._cut), usage)

    # ------------------------------------------------------------ a stream
    def _event(self, kind, **more):
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **more}

    def first(self, n):
        return [self._event(f"response.{kind}", response=self._response("in_progress"))
                for kind in ("created", "in_progress")]

    def _of_part(self, kind, **more):
        return self._event(f"response.{kind}", item_id=f"msg_{self.id[5:]}", output_index=0, content_index=0, **more)

    def _of_item(self, kind, at, item):
        return self._event(f"response.output_item.{kind}", output_index=at, item=item)

    def _shown_text(self, piece, tokens):
        """Events of a piece of the message's text."""
        began = []
        if self._text is None:
            self._text = ""
            began = [self._of_item("added", 0, self._message("in_progress")),
                     self._of_part("content_part.added", part=self._part(""))]
        self._text += piece
        self._tokens += tokens
        logprobs = forms.chat_logprobs(tokens)["content"] if self.has_logprobs else []
        return [*began, self._of_part("output_text.delta", delta=piece, logprobs=logprobs)]

    def delta(self, i, piece, tokens):
        piece = self._safe(i, piece)
        return self._shown_text(piece, tokens or ()) if piece or tokens else []

    def last(self, i, run):
        rest, calls = self._rest(i)
        self._cut = not calls and forms.finish_reason(run) == "length"
        events = self._shown_text(rest, ()) if rest or self._text is None and not calls else []
        if self._text is not None:
            part = self._part(self._text, self._tokens)
            self._output.append(self._message(self._status(self._cut), part))
            events += [self._of_part("output_text.done", text=self._text, logprobs=part["logprobs"]),
                       self._of_part("content_part.done", part=part), self._of_item("done", 0, self._output[0])]
        for call in calls:
            events += self._call_events(call)
        return events

    def _call_events(self, call):
        at, item, arguments = len(self._output), self._call(call), call["function"]["arguments"]
        self._output.append(item)
        more = {"item_id": item["id"], "output_index": at}
        return [self._of_item("added", at, self._call(call, "in_progress") | {"arguments": ""}),
                self._event("response.function_call_arguments.delta", delta=arguments, **more),
                self._event("response.function_call_arguments.done", arguments=arguments, name=item["name"], **more),
                self._of_item("done", at, item)]

    def end(self, usage):
        status = self._status(self._cut)
        return [self._event(f"response.{status}", response=self._response(status, usage))]

    def failed(self, error):
        inner = error["error"]
        return self._event("error", message=inner["message"], code=str(inner["code"]), param=None)

    def sent(self, event):
        return f"event: {event['type']}\n".encode() + super().sent(event)


def _usage(usage):
    """A chat's usage under the names of responses."""
    return usage and {
        "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0}}
