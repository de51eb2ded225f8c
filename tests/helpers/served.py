"""A model served over HTTP for tests: uvicorn in a thread, httpx in front of it.

    with serving(m) as (client, service):
        ask(client, prompt="Emma", max_tokens=3)
"""
import contextlib
import json
import socket
import threading
import time

import pytest

from ggjit.models import load_model
from ggjit.tools.serve.app import ModelServer
from ggjit.tools.serve.service import Service

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

CHATML = {"template": "chatml"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Bath", "London"]}}, "required": ["city"]}}}


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


def loaded():
    """The model inside the package, for several texts at once."""
    return load_model(None, n_threads=1, n_ctx=512, n_seqs=4, n_cells=2048, n_batch=256)


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


def slowed(m, monkeypatch, seconds=0.02):
    """Every batch takes so long at least."""
    whole = m._fed_batch
    monkeypatch.setattr(m, "_fed_batch", lambda *args: (time.sleep(seconds), whole(*args))[1])


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
