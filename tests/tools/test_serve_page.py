"""`ggjit serve` for browsers: the page at /, calls from other origins; what is computed before the first request."""
import base64
import hashlib
import pathlib
import re
import socket
import subprocess
import sys
import types

import pytest
from helpers.browser import in_browser
from helpers.served import CHATML, serving

import ggjit as gg
from ggjit.tools.command.commands import serve
from ggjit.tools.serve.app import Limits

TESTS = pathlib.Path(__file__).parents[1]


def test_the_page_says_what_is_served_and_allows_its_own_script_alone(m):
    with serving(m, name="a <b>model</b>", **CHATML) as (client, _):
        r = client.get("/")
        assert r.headers["content-type"].startswith("text/html") and "<b>model" not in r.text
        assert "a &lt;b&gt;model&lt;/b&gt;" in r.text and f"curl {client.base_url}/v1/chat/completions" in r.text
        assert set(re.findall(r"https?://[^/'\s]+", r.text)) == {str(client.base_url).rstrip("/")}
        assert not re.search(r"\{[a-z]+\}", re.sub(r"<(style|script)>.*?</\1>", "", r.text, flags=re.S))
        for tag in ("style", "script"):
            own = re.search(f"<{tag}>(.*?)</{tag}>", r.text, re.S)[1]
            digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in r.headers["content-security-policy"]
        assert "default-src 'none'" in r.headers["content-security-policy"]
        for path in re.findall(r"<td><code>(.*?)</code>", r.text):
            assert client.get(path).status_code in (200, 405)
    with serving(m, limits=Limits(key="k")) as (client, _):             # without a template, with a key
        text = client.get("/").text
        assert "Authorization: Bearer KEY" in text and "const chat = false" in text and "/v1/completions" in text


@pytest.mark.parametrize("dark", [False, True])
def test_a_talk_in_a_browser_from_another_origin(m, tmp_path, dark):
    """The page lies in a file: its requests to the server come from another origin."""
    with serving(m, limits=Limits(key="k"), n_predict=8, **CHATML) as (client, _):
        page = client.get("/").text.replace("<head>", f'<head><base href="{client.base_url}/">')
        said, status, mine, background = in_browser(page, """
            window.fetch = async (url, { method, headers, body }) => {      // the clock stands still until it is here
              const asked = new XMLHttpRequest();
              asked.open(method, url, false);
              Object.entries(headers).forEach(pair => asked.setRequestHeader(...pair));
              asked.send(body);
              return new Response(asked.responseText, { status: asked.status }); };
            const send = async key => {
              part("key").value = key; say("Emma", "mine");
              await answer("Emma");
              return [...document.querySelectorAll(".say")].map(x => x.textContent); };
            const refused = await send("no"), said = await send("k");
            return [[refused, said], part("speed").textContent, messages.map(x => x.role),
                    getComputedStyle(document.body).backgroundColor];""", tmp_path, dark, 700)
    refused, talk = said
    assert refused[0] == "Emma" and "API key is wrong" in refused[-1]
    assert talk[:len(refused)] == refused and talk[-2] == "Emma" and len(talk[-1]) > 2
    assert " 8 written in " in status and mine == ["user", "assistant"]
    assert background == ("rgb(22, 24, 27)" if dark else "rgb(255, 255, 255)")


def test_other_origins_may_ask_as_the_limits_say(m):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    allowed = "access-control-allow-origin"
    for origins, there in (("*", {"https://a.org": True, "null": True}),
                           ("localhost", {"https://a.org": False, "http://localhost:8888": True,
                                          "http://127.0.0.1": True, "http://localhost.a.org": False}),
                           ("https://A.org:443, localhost", {"https://a.org": True, "http://[::1]:80": True,
                                                         "https://a.orgs": False}), ("", {"null": False})):
        with serving(m, limits=Limits(key="k", origins=origins)) as (client, _):
            for origin, yes in there.items():
                r = client.options("/v1/chat/completions", headers=asks | {"Origin": origin})
                assert r.headers.get(allowed) == (origin if yes else None) and (r.status_code == 200) == yes
                r = client.post("/v1/completions", json={}, headers={"Origin": origin})
                assert r.status_code == 401 and r.headers.get(allowed) == (origin if yes else None)


@pytest.mark.parametrize("origins", ["a.org", "https://a.org/path", "https://*.a.org", "https://me@a.org"])
def test_what_no_browser_sends_as_an_origin_is_refused(origins):
    with pytest.raises(gg.ParamError, match="is not an origin of pages: give scheme and host"):
        Limits(origins=origins)


def test_where_it_cannot_listen_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if sys.platform != "win32":
            with pytest.raises(gg.ParamError, match=f"cannot listen at 127.0.0.1, port {port}: .*another --host"):
                serve._bound(types.SimpleNamespace(host="127.0.0.1", port=port))
    with pytest.raises(gg.ParamError, match="--port 99999: ports go up to 65535"):
        serve._bound(types.SimpleNamespace(host="127.0.0.1", port=99999))
    with serve._bound(types.SimpleNamespace(host="localhost", port=0)) as s:
        assert s.getsockname()[0] == "127.0.0.1"


def test_a_warm_server_compiles_nothing_for_its_requests():
    """In a process of its own: here other tests have the kernels."""
    code = """if True:
        from helpers.served import loaded
        from ggjit.models.text.running_batch import RunningBatch
        from ggjit.ops.native.jit import CACHE
        from ggjit.tools.serve.warming import warm_up
        with loaded() as m:
            before = CACHE.compiled + CACHE.loaded
            warm_up(m)
            warm = CACHE.compiled + CACHE.loaded
            batch = RunningBatch(m, keep=True, exact=True)
            for n in (3, 9, 21, 40, 100, 150, 300):
                batch.submit([1 + i % 200 for i in range(n)], n // 20 + 2, temp=0.8, cache_prompt=False)
            while batch.turn():
                pass
            print(warm - before, CACHE.compiled + CACHE.loaded - warm)"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=TESTS, check=True)
    before, later = map(int, done.stdout.split())
    assert before > 3 and later == 0
