"""What `ggjit serve` refuses, its limits and its load; the command."""
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import tiny_model
from helpers.served import TOOL, alone, ask, httpx, serving, slowed, until

from ggjit.ops.core.errors import MissingExtra, OutOfMemory
from ggjit.tools.command.main import main
from ggjit.tools.serve.app import Limits, ModelServer
from ggjit.tools.serve.service import plan_cells

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
    "a schema that no value satisfies": ({"prompt": "a", "json_schema": {"enum": []}}, 400, "enum"),
    "types that no value has": ({"prompt": "a", "json_schema": {"allOf": [{"type": "string"}, {"type": "null"}]}},
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
                        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
                        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "text is 5"),
                        ({"messages": [message], "tools": [{}]}, "tools[0] is not a function"),
                        ({"messages": [message], "tool_choice": "required"}, "there are no tools"),
                        ({"messages": [message], "tools": [TOOL], "tool_choice": other}, "not one of"),
                        ({"messages": [message], "tools": [TOOL], "tool_choice": {"function": "x"}}, "not one of"),
                        ({"messages": [message], "tools": [TOOL], "tool_choice": {"function": {"name": []}}},
                         "not one of"),
                        ({"messages": ["Hi"], "tools": [TOOL]}, "expected a dict with a role"),
                        ({"messages": [{"role": "assistant", "tool_calls": 5}], "tools": [TOOL]}, "tool_calls 5"),
                        ({"messages": [message], "chat_template_kwargs": {"template": "x"}}, "holds template"),
                        ({"messages": [message], "top_logprobs": 3, "logprobs": 1}, "logprobs is 1")):
        assert words in ask(client, 400, path, **body)["error"]["message"]
    for content, words in ((b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
                           (b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "\\ud800"}', "ud800"),
                           (b"{", "not JSON"), (b"[1]", "not a JSON object"), (b"[" * 100000, "not JSON"),
                           (b'{"metadata": {"a": -1e400}}', "-1e400 is not a finite number"),
                           (b'{"n": NaN}', "NaN is")):
        r = client.post(path, content=content)
        assert r.status_code == 400 and words in r.json()["error"]["message"]
    assert client.get("/nothing").status_code == 404 and client.get(path).status_code == 405
    assert "takes POST, not GET" in client.get(path).json()["error"]["message"]
    assert "docs/serving.md" in client.get("/nothing").json()["error"]["message"]
    assert "choices" in ask(client, path=path, messages=[message], max_tokens=2)


def test_limits_of_size_time_and_queue(m, monkeypatch):
    slowed(m, monkeypatch)
    with serving(m, n_waiting=0, limits=Limits(body_nbytes=2000, seconds=0.3)) as (client, service):
        assert client.post("/v1/completions", content=b"x" * 3000).status_code == 413
        error = ask(client, 408, prompt="Emma", max_tokens=240, ignore_eos=True)["error"]
        assert "--timeout" in error["message"] and error["type"] == "timeout_error"
        until(lambda: service.batch.is_idle)
        with client.stream("POST", "/v1/completions",
                           json={"prompt": "Emma", "max_tokens": 240, "ignore_eos": True, "stream": True}) as r:
            last = [line for line in r.iter_lines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 408
        until(lambda: service.batch.is_idle)
    with serving(m, n_waiting=1) as (client, service):
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            service.batch.is_paused, turn = True, service._turn
            service._turn = lambda: time.sleep(0.01)            # nothing begins
            found = [pool.submit(client.post, "/v1/completions", json={"prompt": "Emma", "max_tokens": 3})
                     for _ in range(12)]
            until(lambda: sum(f.done() for f in found) >= 7)
            service._turn = turn
            status = sorted(f.result().status_code for f in found)
        assert status == [200] * 5 + [429] * 7
        refused = next(f.result() for f in found if f.result().status_code == 429)
        assert refused.headers["retry-after"] and "sequences wait already" in refused.json()["error"]["message"]


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
        until(lambda: service.batch.is_idle)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=0.2)
        until(lambda: service.batch.is_idle)
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
            until(lambda: not service.batch.is_idle)
        assert late.result().status_code == 503 and "ask again" in late.result().json()["error"]["message"]


def test_many_clients_at_once_lose_nothing(m):
    prompts = [f"{'It was a truth universally acknowledged. ' * (i % 5)}Number {i}" for i in range(40)]
    want = [alone(m, p, 10)[0] for p in prompts]
    with serving(m) as (client, service), concurrent.futures.ThreadPoolExecutor(40) as pool:
        got = list(pool.map(lambda p: ask(client, prompt=p, max_tokens=10, temperature=0), prompts))
        assert [g["choices"][0]["text"] for g in got] == want
        assert service.n_requests["ok"] == 40 and service.batch.is_idle


# ---------------------------------------------------------------- the command
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_command_serves_and_stops_gracefully(tmp_path):
    path = tiny_model.write(tmp_path / "m.gguf")
    command = [sys.executable, "-m", "ggjit_command", "serve", str(path), "--port", "0", "-t", "1", "--json",
               "--memory", "200M"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = []                               # notes of a busy machine may come first
        while process.poll() is None and not (said and " at http://127.0.0.1:" in said[-1]):
            said.append(process.stderr.readline())
        assert process.poll() is None, said
        url = said[-1].rpartition(" at ")[2].strip()
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
