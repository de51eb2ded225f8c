"""What `ggjit serve` answers, as its clients see it."""
import base64
import concurrent.futures
import io
import json
import types

import numpy as np
import pytest
from helpers import vision_files
from helpers.served import CHATML, TOOL, alone, ask, events, serving

from ggjit.models import load_gguf, load_model, save_gguf
from ggjit.models.networks.load import EMBEDDED
from ggjit.ops.core.errors import ParamError
from ggjit.tools.serve import forms
from ggjit.tools.serve.answers import ChatForm


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
            assert "not a picture" in got["error"]["message"]
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
        own = {"path": "/completion", "prompt": "It was a truth", "n_predict": 12, "temperature": 0}
        assert ask(client, **own)["content"] == want
        pieces = events(client, **own)
        assert "".join(p["content"] for p in pieces) == want and [p["stop"] for p in pieces][-2:] == [False, True]


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
        pieces = [e for at in range(0, len(text), n) for e in form.delta(0, text[at:at + n], None)]
        deltas = [c["choices"][0]["delta"] for c in (*pieces, *form.last(0, run))]
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
    assert "is not a reranker" in ask(client, 501, "/v1/rerank", query="a", documents=["b"])["error"]["message"]


def test_embeddings_between_answers(tmp_path):
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
