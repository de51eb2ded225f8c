"""The JSON of an answer, whole or piece by piece, as OpenAI's and llama.cpp's clients read it.

    whole(choices, usage)                           an answer
    first(n), delta(i, piece, tokens), last(i, run) the events of a stream, of choice i
"""
import time
import uuid

from ggjit.tools.serve import forms


class TextForm:
    """/v1/completions."""
    is_chat, kind, chunk_kind, prefix = False, "text_completion", "text_completion", "cmpl"

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
        return [self.delta(i, self.echo, None) for i in range(n)] if self.echo else []

    def delta(self, i, piece, tokens):
        logprobs = forms.text_logprobs(tokens) if tokens is not None else None
        return self.chunk([{"index": i, "text": piece, "logprobs": logprobs, "finish_reason": None}])

    def last(self, i, run):
        return [self.chunk([{"index": i, "text": "", "logprobs": None, "finish_reason": forms.finish_reason(run)}])]


class FilledForm(TextForm):
    """/infill: OpenAI's form, with llama.cpp's "content" beside it."""

    def whole(self, choices, usage):
        return super().whole(choices, usage) | {"content": choices[0]["text"]}

    def chunk(self, choices):
        return super().chunk(choices) | {"content": choices[0]["text"] if choices else ""}


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

    def delta(self, i, piece, tokens):
        if self.tools:
            text = self._texts[i] = self._texts.get(i, "") + piece
            shown, safe = self._shown.get(i, 0), _before(text, forms.CALL)
            if safe <= shown:
                return None if tokens is None else self._delta(i, {}, tokens)
            piece, self._shown[i] = text[shown:safe], safe
        return self._delta(i, {"content": piece}, tokens)

    def last(self, i, run):
        text, shown = self._texts.get(i, ""), self._shown.get(i, 0)
        before, calls = self._calls(text, i)
        if not calls:
            rest = [self._delta(i, {"content": text[shown:]})] if text[shown:] else []
            return [*rest, self._delta(i, {}, None, forms.finish_reason(run))]
        rest = [self._delta(i, {"content": before[shown:]})] if before[shown:] else []
        return [*rest, self._delta(i, {"tool_calls": calls}), self._delta(i, {}, None, "tool_calls")]


def _before(text, word):
    """Where the word stands in a text, or what may become it at the text's end; else the text's length."""
    at = text.find(word)
    ends = range(max(len(text) - len(word) + 1, 0), len(text))
    return at if at >= 0 else next((i for i in ends if word.startswith(text[i:])), len(text))
