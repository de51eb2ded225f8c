"""Answers as JSON, whole or in pieces, in OpenAI's and llama.cpp's formats.

    whole(choices, usage)                           an answer
    first(n), delta(i, piece, tokens), last(i, run) lists of events of a stream, of choice i
    end(usage)                                      its last events; usage: None where it was not asked for
    sent(event)                                     an event as bytes of the stream; DONE: what closes it
"""
import json
import time
import uuid

from ggjit.tools.serve import forms


def as_json(content):
    """UTF-8; a lone surrogate, as a request may hold and an error repeat, becomes its escape."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace")


class TextForm:
    """/v1/completions."""
    is_chat, kind, chunk_kind, prefix = False, "text_completion", "text_completion", "cmpl"
    DONE, tells_usage = b"data: [DONE]\n\n", False      # tells_usage: a stream ends with it, asked or not

    def __init__(self, name, echo=""):
        self.name, self.echo, self.has_logprobs = name, echo, False
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    def _of(self, kind, choices):
        return {"id": self.id, "object": kind, "created": self.created, "model": self.name, "choices": choices}

    def whole(self, choices, usage):
        return self._of(self.kind, choices) | {"usage": usage}

    def chunk(self, choices):
        return self._of(self.chunk_kind, choices)

    def choice(self, i, text, run):
        logprobs = forms.text_logprobs(run.answer.scored, len(self.echo)) if self.has_logprobs else None
        return {"index": i, "text": self.echo + text, "logprobs": logprobs, "finish_reason": forms.finish_reason(run)}

    def first(self, n):
        return [event for i in range(n) for event in self.delta(i, self.echo, None)] if self.echo else []

    def delta(self, i, piece, tokens):
        logprobs = forms.text_logprobs(tokens) if tokens is not None else None
        return [self.chunk([{"index": i, "text": piece, "logprobs": logprobs, "finish_reason": None}])]

    def last(self, i, run):
        return [self.chunk([{"index": i, "text": "", "logprobs": None, "finish_reason": forms.finish_reason(run)}])]

    def end(self, usage):
        return [] if usage is None else [self.chunk([]) | {"usage": usage}]

    def failed(self, error):
        """The event of an error; error: as the body of an answer has it."""
        return error

    def sent(self, event):
        return b"data: " + as_json(event) + b"\n\n"


class FilledForm(TextForm):
    """/infill and /completion: OpenAI's form, with llama.cpp's "content" and "stop" beside it."""

    def whole(self, choices, usage):
        return super().whole(choices, usage) | {"content": choices[0]["text"], "stop": True}

    def chunk(self, choices):
        first = choices[0] if choices else {"text": "", "finish_reason": "stop"}
        return super().chunk(choices) | {"content": first["text"], "stop": first["finish_reason"] is not None}


class ChatForm(TextForm):
    """/v1/chat/completions.  Text that may be a tool call is held back in a stream until that is known."""
    is_chat, kind, chunk_kind, prefix = True, "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, name, tools):
        super().__init__(name)
        self.tools, self._texts, self._shown = tools, {}, {}

    def _calls(self, text, i):
        return forms.calls_of(text, f"{self.id[-12:]}_{i}") if self.tools else (text, [])

    def choice(self, i, text, run):
        text, calls = self._calls(text, i)
        message = {"role": "assistant", "content": text if text or not calls else None}
        message |= {"tool_calls": [{k: v for k, v in c.items() if k != "index"} for c in calls]} if calls else {}
        logprobs = forms.chat_logprobs(run.answer.scored) if self.has_logprobs else None
        return {"index": i, "message": message, "logprobs": logprobs,
                "finish_reason": "tool_calls" if calls else forms.finish_reason(run)}

    def _delta(self, i, delta, tokens=None, finish_reason=None):
        logprobs = forms.chat_logprobs(tokens) if tokens is not None else None
        return self.chunk([{"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}])

    def first(self, n):
        return [self._delta(i, {"role": "assistant", "content": ""}) for i in range(n)]

    def _safe(self, i, piece):
        """What may be shown of the text now, since no call begins in it."""
        if not self.tools:
            return piece
        text = self._texts[i] = self._texts.get(i, "") + piece
        shown = self._shown.get(i, 0)
        self._shown[i] = max(shown, _before(text, forms.CALL))
        return text[shown:self._shown[i]]

    def _rest(self, i):
        """(text that was held back and is no call, the calls), once all is written."""
        before, calls = self._calls(self._texts.get(i, ""), i)
        return before[self._shown.get(i, 0):], calls

    def delta(self, i, piece, tokens):
        piece = self._safe(i, piece)
        return [self._delta(i, {"content": piece} if piece else {}, tokens)] if piece or tokens is not None else []

    def last(self, i, run):
        rest, calls = self._rest(i)
        events = [self._delta(i, {"content": rest})] if rest else []
        events += [self._delta(i, {"tool_calls": calls})] if calls else []
        return [*events, self._delta(i, {}, None, "tool_calls" if calls else forms.finish_reason(run))]


def _before(text, word):
    """Where the word stands in a text, or what may become it at the text's end; else the text's length."""
    at = text.find(word)
    ends = range(max(len(text) - len(word) + 1, 0), len(text))
    return at if at >= 0 else next((i for i in ends if word.startswith(text[i:])), len(text))
