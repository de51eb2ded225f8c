"""The HTTP routes of `ggjit serve`: a Service (service.py) computes, forms.py and answers.py convert OpenAI's formats.

Every error is JSON, {"error": {"message", "type", "code"}}: 400 for what the request can mend, 401 without the key, 413
and 408 beyond the limits, 429 where the queue is full, 501 for what this model cannot do, 503 while memory is short or
the server stops.  A client that goes away has its sequences cancelled.
"""
import asyncio
import contextlib
import hmac
import re
import time

from ggjit import __version__
from ggjit.models.text.infill import infill_ids
from ggjit.models.text.sampling import OPTIONS
from ggjit.ops.core.errors import (
    BadFile,
    Cancelled,
    GgjitError,
    IndexRangeError,
    MissingExtra,
    ModelError,
    NotSupported,
    OutOfMemory,
    ParamError,
    QueueFull,
    ShapeError,
    TypeMismatch,
    extra,
)
from ggjit.ops.core.json_text import parse_json
from ggjit.tools.serve import forms
from ggjit.tools.serve.answers import ChatForm, FilledForm, TextForm, as_json
from ggjit.tools.serve.page import page
from ggjit.tools.serve.responses import ResponseForm, chat_body

PUBLIC = {"/", "/health", "/v1/health", "/models", "/v1/models"}    # without a key, as in llama.cpp
STATUS = ((QueueFull, 429, "rate_limit_error"), (NotSupported, 501, "not_supported_error"),
          (MissingExtra, 501, "not_supported_error"), (OutOfMemory, 503, "unavailable_error"),
          (Cancelled, 503, "unavailable_error"), (ModelError, 501, "not_supported_error"),
          *((kind, 400, "invalid_request_error") for kind in (BadFile, ParamError, TypeMismatch, ShapeError,
                                                                           IndexRangeError)))
LOCAL = r"https?://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?"         # origins of pages of this machine
ANY_OF = {"*": ".*", "localhost": LOCAL}
MAX_TEXTS = 2048                # of one embeddings or rerank request


class BadRequest(Exception):
    """A request that ends with this status."""

    def __init__(self, status, message, kind="invalid_request_error"):
        super().__init__(message)
        self.status, self.kind = status, kind


def error_body(error):
    """(status, JSON) of an error."""
    if isinstance(error, BadRequest):
        status, kind = error.status, error.kind
    else:
        status, kind = next(((s, k) for of, s, k in STATUS if isinstance(error, of)), (500, "server_error"))
    message = str(error) if isinstance(error, BadRequest | GgjitError) else f"{type(error).__name__}: {error}"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _pattern(origins):
    """A regular expression of the origins that are meant."""
    found = []
    for origin in filter(None, (o.strip().rstrip("/").lower() for o in origins.split(","))):
        if origin not in ANY_OF and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/*?#@\s]+", origin):
            raise ParamError(f"{origin!r} is not an origin of pages: give scheme and host, such as https://example.org "
                             f"or http://10.0.0.1:3000, localhost for pages of this machine, * for all")
        origin = re.sub(r"(?<=^http:)(.*):80$|(?<=^https:)(.*):443$", r"\1\2", origin)  # which browsers leave out
        found.append(ANY_OF.get(origin) or re.escape(origin))
    return "|".join(found) or "(?!)"


class Limits:
    """body_nbytes of a request; seconds that one may take, None: any; key: that requests must show, None: none;
    origins: of pages whose scripts may ask, with commas between: "*": any; "localhost": of this machine; "": none.
    Errors: ParamError."""

    def __init__(self, body_nbytes=8 << 20, seconds=None, key=None, origins="*"):
        self.body_nbytes, self.seconds, self.key, self.origin_pattern = body_nbytes, seconds, key, _pattern(origins)


class ModelServer:
    """The routes over one Service.  name: what the model is called.  template: of chats, as for `m.chat_prompt`."""

    def __init__(self, service, limits=None, name=None, template=None):
        self.service, self.limits, self.template = service, limits or Limits(), template
        self.name = name or str(getattr(service.model.file, "path", "model")).rpartition("/")[2]

    # ------------------------------------------------------------ the application
    def app(self):
        """The ASGI application.  Errors: MissingExtra without starlette."""
        extra("starlette", "serve")
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.cors import CORSMiddleware
        from starlette.routing import Route
        gets = {self.page: ("/",), self.health: ("/health", "/v1/health"), self.models: ("/models", "/v1/models"),
                self.model: ("/v1/models/{name:path}",),
                self.metrics: ("/metrics",), self.slots: ("/slots",), self.props: ("/props",)}
        posts = {self.chat: ("/v1/chat/completions", "/chat/completions"),
                 self.responses: ("/v1/responses", "/responses"),
                 self.input_tokens: ("/v1/responses/input_tokens", "/responses/input_tokens"),
                 self.completions: ("/v1/completions", "/completions"), self.completion: ("/completion",),
                 self.infill: ("/infill",),
                 self.embeddings: ("/v1/embeddings", "/embeddings"),
                 self.rerank: ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"),
                 self.tokenize: ("/tokenize",), self.detokenize: ("/detokenize",),
                 self.apply_template: ("/apply-template",), self.slot_action: ("/slots/{id}",)}
        routes = [Route(path, self._handler(f), methods=[method]) for method, table in (("GET", gets), ("POST", posts))
                  for f, paths in table.items() for path in paths]
        cors = Middleware(CORSMiddleware, allow_origin_regex=self.limits.origin_pattern, allow_methods=["*"],
                          allow_headers=["*"], expose_headers=["Retry-After"])
        return Starlette(routes=routes, middleware=[cors],
                         exception_handlers={404: self._unknown, 405: self._unknown})

    def _handler(self, answer):
        """The route's function: key, limits, errors."""
        from starlette.requests import Request

        async def handle(request: Request):
            try:
                self._check_key(request)
                body = await self._body(request) if request.method == "POST" else {}
                return await answer(request, body)
            except asyncio.CancelledError:          # the time of grace is over
                asyncio.current_task().uncancel()
                return _json(*reversed(error_body(Cancelled("the server stops; ask again when it is back"))))
            except Exception as e:
                self.service.n_requests["error"] += 1
                return _json(*reversed(error_body(e)), {"Retry-After": "1"} if isinstance(e, QueueFull) else None)
        return handle

    async def _unknown(self, request, error):
        status, path = error.status_code, request.url.path
        words = f"{request.method} {path} is nothing that ggjit serves; docs/serving.md lists what is"
        if status == 405:
            words = f"{path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}"
        return _json(*reversed(error_body(BadRequest(status, words))))

    def _check_key(self, request):
        key = self.limits.key
        if key is None or request.url.path in PUBLIC:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise BadRequest(401, "the API key is wrong or missing; send it as `Authorization: Bearer KEY`",
                          "authentication_error")

    async def _body(self, request):
        """The JSON object of a request.  Errors: BadRequest."""
        most, data = self.limits.body_nbytes, bytearray()
        async with _limit(self.limits.seconds):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise BadRequest(413, f"the request has more than {most:,} bytes; send less, or start the server "
                                          f"with a larger --max-request")
        try:
            body = parse_json(data or b"{}", finite=True)
        except ValueError as e:
            raise BadRequest(400, f"the request is not JSON: {e}") from None
        if not isinstance(body, dict):
            raise BadRequest(400, "the request is not a JSON object")
        return body

    @property
    def _senses(self):
        """The parts of messages besides text that the model reads."""
        model, names = self.service.model, {"vision": "image_url", "hearing": "input_audio"}
        return [part for sense, part in names.items() if getattr(model, sense, None) is not None]

    # ------------------------------------------------------------ about the server
    async def page(self, request, body):
        """For people (page.py)."""
        from starlette.responses import HTMLResponse
        m, about = self.service.model, self._about()
        context = f", {about['meta']['n_ctx']:,} tokens of context" if about["meta"]["n_ctx"] else ""
        words = f"{m.file.arch}{context}, {m.weights.nbytes / 1e6:,.0f} MB of weights, served by ggjit {__version__}"
        asks = "" if not self.service.generates else "chat" if self._template else "text"
        text, headers = page(self.name, words, str(request.base_url).rstrip("/"), asks, self.limits.key is not None)
        return HTMLResponse(text, headers=headers)

    async def health(self, request, body):
        if self.service.is_stopping:
            raise BadRequest(503, "the server is stopping", "unavailable_error")
        return _json({"status": "ok"})

    async def models(self, request, body):
        return _json({"object": "list", "data": [self._about()]})

    async def model(self, request, body):
        if request.path_params["name"] != self.name:
            raise BadRequest(404, f"no model {request.path_params['name']!r}; there is {self.name!r}")
        return _json(self._about())

    def _about(self):
        m = self.service.model
        meta = {"n_ctx": getattr(m, "n_ctx", None), "n_ctx_train": getattr(m, "n_ctx_train", None),
                "n_embd": getattr(m, "n_embd", None), "n_vocab": getattr(m, "n_vocab", None),
                "size": m.weights.nbytes}
        return {"id": self.name, "object": "model", "owned_by": "ggjit", "created": int(self.service.started),
                "meta": meta}

    async def metrics(self, request, body):
        from starlette.responses import PlainTextResponse
        lines = []
        for name, (value, kind, help) in self.service.counts().items():
            lines += [f"# HELP llamacpp:{name} {help}.", f"# TYPE llamacpp:{name} {kind}", f"llamacpp:{name} {value:g}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def slots(self, request, body):
        return _json(self.service.slots())

    async def slot_action(self, request, body):
        raise NotSupported("sequences are not slots here: prefixes are kept by themselves, and shared by all requests; "
                           "m.save_state in Python writes the state of a text")

    async def props(self, request, body):
        m, defaults = self.service.model, {name: o.default for name, o in OPTIONS.items() if name != "logit_bias"}
        return _json({"default_generation_settings": {"n_ctx": getattr(m, "n_ctx", None), "params": defaults},
                      "total_slots": getattr(m, "n_seqs", 1), "model_path": str(m.file.path), "model_alias": self.name,
                      "chat_template": m.file.metadata.get("tokenizer.chat_template", ""),
                      "modalities": {"vision": "image_url" in self._senses, "audio": "input_audio" in self._senses},
                      "build_info": f"ggjit {__version__}"})

    # ------------------------------------------------------------ tokens
    async def tokenize(self, request, body):
        m, text = self.service.model, forms.field(body, "content", str, "")
        ids = await self.service.prepared(m.tokenize, text, forms.field(body, "parse_special", bool, True),
                                          forms.field(body, "add_special", bool, False))
        if not forms.field(body, "with_pieces", bool, False):
            return _json({"tokens": ids})
        pieces = [m.tokenizer.piece(id, special=True) for id in ids]
        return _json({"tokens": [{"id": id, "piece": _text_or_bytes(p)} for id, p in zip(ids, pieces, strict=True)]})

    async def detokenize(self, request, body):
        ids = forms.field(body, "tokens", list, [])
        return _json({"content": await self.service.prepared(self.service.model.detokenize, ids, True) if ids else ""})

    async def apply_template(self, request, body):
        return _json({"prompt": (await self._chat_prompt(body, forms.Tools(body))).text})

    @property
    def _template(self):
        """The text or name of the chat template; "" if the model has none."""
        return str(self.template or self.service.model.file.metadata.get("tokenizer.chat_template", ""))

    async def _chat_prompt(self, body, tools):
        m = self.service.model
        template = self._template
        messages, knows = forms.messages_of(body, self._senses), "tools" in template
        if "developer" not in template:             # OpenAI's newer name of the system's role
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        variables = forms.field(body, "chat_template_kwargs", dict, {})
        if taken := {"self", "messages", "tools", "template"} & variables.keys():
            raise ParamError(f"chat_template_kwargs holds {', '.join(sorted(taken))}, which the request or the server "
                             f"gives; leave that out")
        shown = tools.shown(messages, knows), (tools.given or None) if knows else None
        return await self.service.prepared(lambda: m.chat_prompt(*shown, template=self.template, **variables))

    # ------------------------------------------------------------ vectors and scores
    async def embeddings(self, request, body):
        given = body.get("input", body.get("content"))
        texts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        if len(texts) > MAX_TEXTS or not all(isinstance(t, str | list) and t for t in texts):
            raise ParamError(f"input is a text that is not empty, a list of token ids, or a list of at most "
                             f"{MAX_TEXTS} of these")
        form = body.get("encoding_format", "float")
        if form not in ("float", "base64"):
            raise ParamError(f'encoding_format is {form!r}, expected "float" or "base64"')
        m, n_tokens = self.service.model, 0

        def vectors():
            ids = [m.tokenize(t) if isinstance(t, str) else t for t in texts]
            return [m.embed_ids(i) for i in ids], sum(map(len, ids))
        wanted = forms.whole(body, ("dimensions",), 1, 1 << 20)
        found, n_tokens = await self._limited(self.service.computed(vectors))
        if wanted not in (None, len(found[0])):
            raise ParamError(f"dimensions is {wanted}, the vectors of this model have {len(found[0])}; leave it out")
        return _json({"object": "list", "model": self.name,
                      "data": [{"object": "embedding", "index": i, "embedding": _vector(v, form)}
                               for i, v in enumerate(found)],
                      "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}})

    async def rerank(self, request, body):
        query, texts = forms.field(body, "query", str), forms.field(body, "documents", list) or \
            forms.field(body, "texts", list, [])
        texts = [t.get("text") if isinstance(t, dict) else t for t in texts]
        if not query or not texts or len(texts) > MAX_TEXTS or not all(isinstance(t, str) for t in texts):
            raise ParamError(f"rerank takes a query, and 1 to {MAX_TEXTS} documents, all of them texts")
        n = forms.whole(body, ("top_n",), 1, MAX_TEXTS, len(texts))
        scores = await self._limited(self.service.computed(self.service.model.rerank, query, texts))
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[:n]
        return _json({"object": "list", "model": self.name,
                      "results": [{"index": i, "relevance_score": float(scores[i])} for i in order]})

    async def _limited(self, awaitable):
        async with _limit(self.limits.seconds):
            return await awaitable

    # ------------------------------------------------------------ texts
    async def chat(self, request, body):
        return await self._chatted(request, body, lambda tools: ChatForm(self.name, tools))

    async def responses(self, request, body):
        """OpenAI's newer form of a chat (responses.py)."""
        return await self._chatted(request, chat_body(body), lambda tools: ResponseForm(self.name, tools, body))

    async def input_tokens(self, request, body):
        asked = chat_body(body)
        prompt = await self._chat_prompt(asked, forms.Tools(asked))
        return _json({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})

    async def _chatted(self, request, body, form_of):
        tools = forms.Tools(body)
        grammar = forms.grammar_of(body)
        if tools and grammar and tools.choice == "required":
            raise ParamError("tools that are required and a response_format or grammar hold the same answer to two "
                             "forms; leave one of them out")
        options = forms.options(body) | (tools.grammar() if tools and not grammar else grammar)
        prompt = await self._chat_prompt(body, tools)
        n_predict = forms.whole(body, ("max_completion_tokens", "max_tokens", "n_predict"), -1, 1 << 30)
        return await self._answer(request, body, form_of(tools), prompt.ids, n_predict, options)

    async def completion(self, request, body):
        """llama.cpp's own: the same with "content" and "stop" beside it."""
        return await self.completions(request, body, FilledForm)

    async def completions(self, request, body, form=TextForm):
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list) and any(not isinstance(id, int) for id in prompt):
            raise ParamError("prompt is a text or a list of token ids; send several prompts as several requests")
        if not isinstance(prompt, str | list):
            raise ParamError("prompt is missing: a text or a list of token ids")
        n_predict = forms.whole(body, ("max_tokens", "n_predict"), -1, 1 << 30)
        echo = prompt if isinstance(prompt, str) and forms.field(body, "echo", bool, False) else ""
        if (after := forms.field(body, "suffix", str)) is not None:
            if not isinstance(prompt, str):
                raise ParamError("suffix goes with a prompt that is a text")
            prompt = await self._hole(prompt, after)
        return await self._answer(request, body, form(self.name, echo), prompt, n_predict,
                                  forms.options(body) | forms.grammar_of(body))

    async def _hole(self, before, after, others=()):
        """The ids of a prompt whose answer stands between two texts."""
        model = self.service.model
        return await self.service.prepared(infill_ids, model.tokenizer, before, after, others, path=model.file.path)

    async def infill(self, request, body):
        """llama.cpp's: input_prefix, input_suffix, input_extra, and a prompt that the answer goes on with."""
        before, after, begun = (forms.field(body, name, str, "") for name in ("input_prefix", "input_suffix", "prompt"))
        extra_texts = forms.field(body, "input_extra", list, [])
        if not all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in extra_texts):
            raise ParamError("input_extra is a list of {\"filename\": ..., \"text\": ...}")
        others = [(str(x.get("filename", "tmp")), x["text"]) for x in extra_texts]
        n_predict = forms.whole(body, ("n_predict", "max_tokens"), -1, 1 << 30)
        ids = await self._hole(before + begun, after, others)
        return await self._answer(request, body, FilledForm(self.name), ids, n_predict,
                                  forms.options(body) | forms.grammar_of(body))

    async def _answer(self, request, body, form, prompt, n_predict, options):
        n = forms.whole(body, ("n",), 1, forms.MAX_CHOICES, 1)
        stream = forms.field(body, "stream", bool, False)
        options |= {"stop": forms.stops(body), "logprobs": forms.top_logprobs(body, form.is_chat)}
        form.has_logprobs = options["logprobs"] is not None
        with_usage = form.tells_usage or (forms.field(body, "stream_options", dict) or {}).get("include_usage", False)
        deadline = None if self.limits.seconds is None else time.monotonic() + self.limits.seconds
        choices = []
        try:
            for i in range(n):
                seed = options.get("seed")
                own = options | ({"seed": seed + i} if isinstance(seed, int) else {})
                choices.append(await self.service.submit(prompt, n_predict, **own))
            if stream:
                return self._stream(request, form, choices, deadline, with_usage)
            async with _watched(request, lambda: self._cancel(choices)):
                texts = await asyncio.gather(*(self._whole(c, deadline) for c in choices))
        finally:
            if not stream or len(choices) < n:
                self._cancel(choices)
        self.service.n_requests["ok"] += 1
        runs = [c.sequence.run for c in choices]
        found = [form.choice(i, text, run) for i, (text, run) in enumerate(zip(texts, runs, strict=True))]
        return _json(form.whole(found, forms.usage(runs, choices[0].sequence.n_shared)))

    def _cancel(self, choices):
        for c in choices:
            if c.sequence.state != "ended":
                self.service.cancel(c)

    async def _whole(self, choice, deadline):
        async with _limit(None if deadline is None else deadline - time.monotonic()):
            return "".join([piece async for piece, _ in choice])

    def _stream(self, request, form, choices, deadline, with_usage):
        from starlette.responses import StreamingResponse

        async def watched():
            async with _watched(request, lambda: self._cancel(choices)):
                async for event in self._events(form, choices, deadline, with_usage):
                    yield event
        return StreamingResponse(watched(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _events(self, form, choices, deadline, with_usage):
        """The stream of an answer, as the form sends it: pieces of any choice as they come, then its end."""
        queue, tasks = asyncio.Queue(), []

        async def pump(i, choice):
            run = choice.sequence.run
            try:
                seen = 0
                async for piece, n in choice:
                    await queue.put(form.delta(i, piece, run.answer.scored[seen:n] if form.has_logprobs else None))
                    seen = n
                await queue.put(form.last(i, run))
                await queue.put(None)
            except Exception as e:
                await queue.put(e)
        try:
            tasks = [asyncio.ensure_future(pump(i, c)) for i, c in enumerate(choices)]
            for event in form.first(len(choices)):
                yield form.sent(event)
            left = len(choices)
            while left:
                async with _limit(None if deadline is None else deadline - time.monotonic()):
                    got = await queue.get()
                if isinstance(got, Exception):
                    raise got
                left -= got is None
                for event in got or ():
                    yield form.sent(event)
            usage = forms.usage([c.sequence.run for c in choices], choices[0].sequence.n_shared)
            for event in form.end(usage if with_usage else None):
                yield form.sent(event)
            self.service.n_requests["ok"] += 1
            yield form.DONE
        except Exception as e:                  # the status was sent: the error is an event
            self.service.n_requests["error"] += 1
            yield form.sent(form.failed(error_body(e)[1]))
        finally:
            for t in tasks:
                t.cancel()
            self._cancel(choices)


# ---------------------------------------------------------------- small parts
def _json(content, status=200, headers=None):
    from starlette.responses import Response
    return Response(as_json(content), status, headers, "application/json")


def _vector(v, form):
    if form == "float":
        return [float(x) for x in v]
    import base64
    return base64.b64encode(v.astype("<f4").tobytes()).decode()


def _text_or_bytes(piece):
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@contextlib.asynccontextmanager
async def _limit(seconds):
    """What is awaited inside may take so long.  Errors: BadRequest."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise BadRequest(408, "the request took longer than the server allows; ask for fewer tokens, or start it with "
                              "a larger --timeout", "timeout_error") from None


@contextlib.asynccontextmanager
async def _watched(request, gone):
    """Inside, `gone` is called when the client goes away."""
    async def watch():
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone()
    watcher = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watcher.cancel()
