"""The page at `/`: it describes the server, and has a box to talk to the model.

It is one HTML file (page.html) without anything from elsewhere; its policy allows its own style and script alone.
"""
import base64
import hashlib
import html
import json
import pathlib
import re
import shlex

FILE = pathlib.Path(__file__).with_name("page.html")
ENDPOINTS = (("/v1/chat/completions", "a conversation; /v1/responses is OpenAI's newer form", "writes"),
             ("/v1/completions", "a text or token ids, continued; /completion and /infill are llama.cpp's", "writes"),
             ("/v1/embeddings", "vectors of texts, by models that have a pooling", ""),
             ("/v1/rerank", "scores of documents for a query, by rerankers", ""),
             ("/v1/models", "the model", ""), ("/tokenize", "token ids of a text; /detokenize, /apply-template", ""),
             ("/health", "also /metrics, /slots and /props, as llama.cpp has them", ""))


def page(name, about, url, asks, needs_key):
    """(HTML, headers).  about: a line; url: where the server is; asks: "chat", "text", or "" for a model that writes
    nothing; needs_key: do requests show an API key?"""
    title = {"chat": "Talk to it", "text": "Let it continue a text"}.get(asks, "")
    values = {"name": name, "about": about, "hidden": "" if asks else "hidden", "title": title,
              "placeholder": "Write a message" if asks == "chat" else "Begin a text",
              "keyless": "" if needs_key else "hidden", "curl": _curl(url, asks, needs_key),
              "python": _python(url, name, asks, needs_key)}
    found = {key: html.escape(value) for key, value in values.items()}
    found["endpoints"] = "".join(f"<tr><td><code>{path}</code></td><td>{what}</td></tr>"
                                 for path, what, kind in ENDPOINTS if asks or not kind)
    found["chat"] = json.dumps(asks == "chat")
    text = re.sub(r"\{(\w+)\}", lambda m: found.get(m[1], m[0]), FILE.read_text("utf-8"))
    return text, {"Content-Security-Policy": _policy(text), "Referrer-Policy": "no-referrer",
                  "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def _policy(text):
    """The Content-Security-Policy of the page: its own style and script by their digests, requests to this server."""
    def digest(tag):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)[1]
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    return (f"default-src 'none'; style-src {digest('style')}; script-src {digest('script')}; connect-src 'self'; "
            f"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


# {asks: (path, body, where the answer stands)}
CALLS = {"chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is gravity?"}]},
                  "choices[0].message.content"),
         "text": ("/v1/completions", {"prompt": "It was a truth", "max_tokens": 32}, "choices[0].text"),
         "": ("/v1/embeddings", {"input": ["a cat", "a dog"]}, "data[0].embedding")}


def _curl(url, asks, needs_key):
    path, body, _ = CALLS[asks]
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return f"curl {shlex.quote(url + path)}{key} -d {shlex.quote(json.dumps(body))}"


def _python(url, name, asks, needs_key):
    path, body, found = CALLS[asks]
    call = path.removeprefix("/v1/").replace("/", ".")
    arguments = ", ".join(f"{key}={value!r}" for key, value in body.items())
    return (f"from openai import OpenAI\n\nclient = OpenAI(base_url={url + '/v1'!r}, "
            f"api_key={'KEY' if needs_key else '-'!r})\nanswer = client.{call}.create(model={name!r}, {arguments})\n"
            f"print(answer.{found})")
