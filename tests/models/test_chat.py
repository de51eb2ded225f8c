"""Chat templates: in the style of those that models come with, what they may not do, and the ids that come out."""
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import vocabularies
from helpers.paths import TESTS

from ggjit.models.files.gguf import GGUFFile
from ggjit.models.text import chat_template
from ggjit.models.text.chat_template import chat_prompt
from ggjit.models.text.tokenizer import Tokenizer
from ggjit.ops.core.errors import GgjitError, ModelError, ParamError

pytest.importorskip("gguf")
pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi! "},
        {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye <é>"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "sums", "parameters": {
    "b": 1, "a": "<&>"}}}]

# written for this test, in the way that the models named write theirs
CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
LLAMA_2 = """{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set first = messages[0].content %}
{%- else %}{% set rest = messages %}{% set first = false %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if loop.index0 == 0 and first %}{% set text = '<<SYS>>\n' + first + '\n<</SYS>>\n\n' + m.content %}
{%- else %}{% set text = m.content %}{% endif %}
{%- if m.role == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}
{%- else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- macro head(role) %}{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' }}{% endmacro %}
{%- if tools %}{{ head('system') }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ "\n" }}{% endfor %}<|eot_id|>{% endif %}
{%- for m in messages %}{{ head(m.role) + m.content | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""
MISTRAL = """{%- set ns = namespace(index=0, last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{% continue %}{% endif %}
{%- if m.role == 'user' %}
{%- if loop.index0 == ns.last and tools %}{{ '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' ~ m.content ~ '[/INST]' }}
{%- else %}{{ ' ' ~ m.content ~ eos_token }}{% endif %}{% set ns.index = ns.index + 1 %}
{%- endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set messages = messages[1:] %}{% endif %}
{% for message in messages %}
    {% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
PHI_3 = """{% for message in messages %}{% if message['role'] in ['system', 'user', 'assistant'] %}
{{ '<|' ~ message['role'] ~ '|>\n' ~ message['content'] ~ '<|end|>\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
DEEPSEEK = """{% set ns = namespace(system='', think=enable_thinking is defined and enable_thinking) %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system ~ m.content %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for m in messages | rejectattr('role', 'equalto', 'system') %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- else %}{% generation %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- endgeneration %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>\n' if ns.think else '') }}{% endif %}"""

TOOL_JSON = json.dumps(TOOLS)
RENDERED = {
    "chatml": (CHATML, {}, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
               "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye <é><|im_end|>\n<|im_start|>assistant\n"),
    "llama-2": (LLAMA_2, {}, "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi! [/INST] Hello. </s>"
                "<s>[INST] Bye <é> [/INST]"),
    "llama-3": (LLAMA_3, dict(tools=TOOLS), "<s><|start_header_id|>system<|end_header_id|>\n\n" + json.dumps(
        TOOLS[0], indent=4) + "\n<|eot_id|>" + "".join(f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n"
                                                       f"{m['content'].strip()}<|eot_id|>" for m in SAID)
        + "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "mistral": (MISTRAL, dict(tools=TOOLS), "<s>[INST]  Hi! [/INST] Hello.</s>[AVAILABLE_TOOLS] " + TOOL_JSON
                + "[/AVAILABLE_TOOLS][INST] Bye <é>[/INST]"),
    "gemma": (GEMMA, {}, "<s><start_of_turn>user\nHi!<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
              "<start_of_turn>user\nBye <é><end_of_turn>\n<start_of_turn>model\n"),
    "phi-3": (PHI_3, dict(add_generation_prompt=False), "<|system|>\nBe brief.<|end|>\n<|user|>\n Hi! <|end|>\n"
              "<|assistant|>\nHello.<|end|>\n<|user|>\nBye <é><|end|>\n</s>"),
    "deepseek": (DEEPSEEK, dict(enable_thinking=True), "<s>Be brief.<｜User｜> Hi! <｜Assistant｜>Hello."
                 "<｜end▁of▁sentence｜><｜User｜>Bye <é><｜Assistant｜><think>\n")}


def prompt(path, messages=SAID, **options):
    file = GGUFFile(path)
    return chat_prompt(file, Tokenizer.from_gguf(file), messages, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return vocabularies.write_bytes(tmp_path_factory.mktemp("chat") / "plain.gguf", SPECIAL)


@pytest.mark.parametrize("style", RENDERED)
def test_templates_in_the_style_of(style, plain):
    source, options, text = RENDERED[style]
    assert prompt(plain, template=source, **options).text == text


def test_ids_have_special_tokens_and_one_beginning(tmp_path):
    source = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}{% endfor %}"
    path = vocabularies.write_bytes(tmp_path / "m.gguf", SPECIAL, chat_template=source, **{"ggml.add_bos_token": True})
    text, ids = prompt(path, SAID[2:3])
    assert text == "<s>[INST]Hello." and ids == [256, 260, *b"Hello."]
    ids = prompt(path, SAID[2:3], template="chatml").ids
    assert ids == [256, 258, *b"assistant\nHello.", 259, 10, 258, *b"assistant\n"]
    unasked = vocabularies.write_bytes(tmp_path / "n.gguf", SPECIAL, chat_template="{{ messages[0].content }}")
    assert prompt(unasked, SAID[2:3]).ids == [*b"Hello."]


def test_named_templates(tmp_path):
    keys = {"chat_template": "plain", "chat_templates": ["tool_use", "rag"],
            "chat_template.tool_use": "with {{ tools }}", "chat_template.rag": "rag {{ documents | join }}"}
    path = vocabularies.write_bytes(tmp_path / "m.gguf", SPECIAL, **keys)
    assert prompt(path).text == "plain" and prompt(path, tools=[]).text == "plain"
    assert prompt(path, tools=["t"]).text == "with ['t']"
    assert prompt(path, tools=["t"], template="default").text == "plain"
    assert prompt(path, template="rag", documents=["a", "b"]).text == "rag ab"
    with pytest.raises(ParamError, match=r"'tool_uze' \(did you mean tool_use\?\); .* holds default, tool_use"):
        prompt(path, template="tool_uze")


@pytest.mark.parametrize("source, words", [
    ("{{ ''.__class__.__mro__ }}", "line 1: access to attribute '__class__' of 'str' object is unsafe"),
    ("\n{{ messages.append(1) }}", "line 2: access to attribute 'append' of 'list'"),
    ("{{ messages.__init__.__globals__['sys'] }}", "unsafe"), ("{% include 'x' %}", "no loader"),
    ("a\n\n{% if %}", "line 3: Expected an expression"), ("{{ messages[0].x.y }}", "has no attribute 'x'"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"), ("{{ 'a' * 10**11 }}", "MemoryError"),
    ("{{ '%9000000000d' % 1 }}", "MemoryError"),
    ("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "longer than 16,777,216 characters"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"), ("{{ range(10**9) }}", "Range too big")])
def test_a_template_that_misbehaves(source, words, plain, tmp_path):
    path = vocabularies.write_bytes(tmp_path / "m.gguf", SPECIAL, chat_template=source)
    with pytest.raises(ModelError, match="m.gguf: tokenizer.chat_template") as e:
        prompt(path)
    assert words in str(e.value) and "template='chatml'" in str(e.value)
    assert prompt(plain, template="chatml").text                # the next one is rendered as ever


def test_a_template_without_end(plain, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.5)
    for source in ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                   "{% set n = namespace(x=1) %}{% for i in 'a' * 70 %}{% set n.x = [n.x] * 2 %}{% endfor %}{{ n.x }}"):
        with pytest.raises(ModelError, match="more than 0.5 s"):
            prompt(plain, template=source)
    monkeypatch.undo()
    assert prompt(plain, template="chatml").text


def test_the_rendering_process_is_replaced(plain):
    assert prompt(plain, template="chatml").text
    os.kill(chat_template._WORKER._process.pid, signal.SIGKILL)
    chat_template._WORKER._process.wait()
    assert prompt(plain, template="chatml").text


@pytest.mark.parametrize("messages, words", [
    (5, r"messages is 5, expected a list of them, such as \[{\"role\": \"user\""), ([], "messages is"),
    (["Hi"], r"messages\[0\] is 'Hi', expected a dict with a role"), ([SAID[0], {"content": "x"}], r"messages\[1\]"),
    ([{"role": 3, "content": "x"}], r"messages\[0\]"), ([{"role": "user"}], r"messages\[0\] has the content None"),
    ([{"role": "user", "content": b"x"}], "content b'x'"), (SAID[1:2] * 2, "refuses these messages: roles must"),
    ([{"role": "user", "content": "x", "of": {1j}}], "have to be JSON"),
    ([{"role": "user", "content": "\ud800"}], "surrogate")])
def test_messages_of_another_shape(messages, words, plain):
    with pytest.raises(ParamError, match=words):
        prompt(plain, messages, template=LLAMA_2)


def test_a_file_without_a_template(plain):
    with pytest.raises(ModelError, match=r"plain.gguf: the file holds no chat template .*template='chatml'"):
        prompt(plain)
    with pytest.raises(GgjitError, match="template is 3"):
        prompt(plain, template=3)


def test_chat_is_generation_of_the_prompt(shared):
    from ggjit.models import load_model
    with load_model(shared("data", "stories260k", "stories260K-F32.gguf"), n_threads=1, kv_type="F32") as m:
        options = dict(template="{{ messages[0].content }}{{ more }}", variables={"more": " a time"})
        said = [{"role": "user", "content": "Once upon"}]
        answer = m.chat(said, 6, temp=0, **options)
        text = "".join(answer)
        assert text == "".join(m.generate("Once upon a time", 6, temp=0)) and answer.stats["stop_reason"] == "length"
        assert m.chat_prompt(said, template="{{ messages[0].content }}").ids == m.tokenize("Once upon")
        assert np.isin(m.chat(said, 2, temp=0, **options).prompt_ids, m.tokenize("Once upon a time")).all()


@pytest.mark.slow
@pytest.mark.peer
def test_texts_are_those_of_llama_cpp(shared, plain):
    """Without the first <s>, which its server leaves to the tokenizer, and without the system message, which it puts
    before the user's where a template has no such role."""
    pytest.importorskip("xllamacpp")
    jobs, ours = [], []
    for source, options, _ in RENDERED.values():
        request = {"messages": SAID[1:]} | {k: v for k, v in options.items() if k != "enable_thinking"}
        jobs.append((source, request | {"chat_template_kwargs": {
            k: v for k, v in options.items() if k == "enable_thinking"}}))
        ours.append(prompt(plain, SAID[1:], template=source, **options).text.strip().removeprefix("<s>"))
    model = shared("data", "stories260k", "stories260K-F32.gguf")
    r = subprocess.run([sys.executable, TESTS / "helpers" / "llamacpp_chat.py", model], input=json.dumps(jobs),
                       text=True, capture_output=True, timeout=300)
    assert r.returncode == 0, r.stderr[-2000:]
    theirs = [text.strip().removeprefix("<s>") for text in json.loads(r.stdout)]
    for style, mine, other in zip(RENDERED, ours, theirs, strict=True):
        assert mine == other, style
