"""Answers that must be JSON, and tool calls: whatever the model would like to say."""

from __future__ import annotations

import copy
import json
import threading

import pytest
from http_server import Script, events, until

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
USER = [{"role": "user", "content": "hi"}]


def schema(value=SCHEMA):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": value}}


@pytest.mark.parametrize("temperature", [0, 1.0, 3.0])
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_random_weights_obey_a_schema(server, path, temperature):
    body = {"response_format": schema(), "temperature": temperature, "seed": 5, "max_tokens": 200, "n": 4}
    body |= {"messages": USER} if path == CHAT else {"prompt": "x"}
    answer = server.post(path, body).json()
    for choice in answer["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        value = json.loads(text)
        assert set(value) == {"name", "age"}
        assert value["name"] in ("ada", "bob")
        assert 0 <= value["age"] <= 99
        assert choice["finish_reason"] == "stop"


def test_a_schema_in_company_and_alone_gives_the_same(make_server):
    server = make_server(num_blocks=256)
    body = {"response_format": schema(), "temperature": 1.0, "seed": 5, "max_tokens": 100}
    alone = server.complete("json", **body)["choices"]
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(server.complete("json", **body)["choices"])),
        *(threading.Thread(target=lambda i=i: server.complete(f"{i}", max_tokens=60)) for i in range(6)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [alone]


def test_masks_are_computed_beside_the_forward_pass(make_server, monkeypatch):
    """A token's mask is begun, in a thread of its own, before the pass whose logits it is for has ended."""
    from octavo.serving import grammar

    happened: list[str] = []
    next_mask = grammar._next_mask

    def noted(*args):
        happened.append(threading.current_thread().name.partition("_")[0])
        return next_mask(*args)

    class Slow(Script):
        def forward(self, *args):
            hidden = super().forward(*args)
            happened.append("pass")
            return hidden

    monkeypatch.setattr(grammar, "_next_mask", noted)
    server = make_server(model=Slow("", 0, delay=0.03), num_blocks=64)
    server.complete("x", response_format=schema({"const": "abcdef"}), max_tokens=50)
    passes = [place for place, what in enumerate(happened) if what == "pass"]
    assert len(passes) >= len('"abcdef"')
    for number, place in enumerate(passes[1:], 2):
        assert happened[:place].count("octavo-grammar") >= number, happened


def test_several_prompts_have_a_grammar_each(server):
    answer = server.complete(["a", "bb"], response_format=schema(), max_tokens=200, seed=1)
    assert all(json.loads(choice["text"])["name"] for choice in answer["choices"])


def test_a_schema_survives_preemption(make_server):
    server = make_server(num_blocks=16, block_size=4, max_num_seqs=2)
    results = []

    def ask() -> None:
        results.append(server.complete("p" * 12, response_format=schema(), temperature=0, max_tokens=48))

    ask()
    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads.append(
        threading.Thread(
            target=lambda: server.complete("q" * 12, max_tokens=40, ignore_eos=True, temperature=0)
        )
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result["choices"][0]["text"] for result in results}) == 1


def test_json_object(server):
    answer = server.chat(
        "x", response_format={"type": "json_object"}, max_tokens=300, seed=2, temperature=1.0
    )
    choice = answer["choices"][0]
    assert choice["message"]["content"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_text_is_the_default(server):
    plain = server.chat("x", temperature=0, max_tokens=5)["choices"]
    assert server.chat("x", temperature=0, max_tokens=5, response_format={"type": "text"})["choices"] == plain


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "xml"}}, "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": schema({"type": "nonsense"})}, "not possible"),
        ({"response_format": schema({"$ref": "http://example.org/x"})}, "not possible"),
        ({"response_format": schema(), "ignore_eos": True}, "ignore_eos"),
        ({"response_format": schema({"enum": ["x" * 300_000]})}, "at most"),
        ({"tools": TOOLS}, "no place for tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "one of the tools",
        ),
        ({"tools": TOOLS, "response_format": schema()}, "cannot be combined"),
    ],
)
def test_what_is_not_possible_is_refused(server, fields, words):
    server.refused(CHAT, {"messages": USER, "max_tokens": 5, **fields}, 400, words)


def test_h11_a_grammar_that_fails_costs_its_own_request(make_server, monkeypatch):
    from octavo.serving import grammar

    server = make_server(num_blocks=64)

    def fail(matcher, tokens):
        raise RuntimeError("no more")

    monkeypatch.setattr(grammar, "_next_mask", fail)
    answers = []
    beside = threading.Thread(target=lambda: answers.append(server.complete("x", max_tokens=40)))
    beside.start()
    response = server.post(COMPLETE, {"prompt": "y", "response_format": schema()})
    beside.join()
    assert response.status_code == 500
    assert "no more" in response.json()["error"]["message"]
    assert answers[0]["choices"][0]["finish_reason"]
    until(server.is_idle)


# ---- tools


@pytest.fixture(scope="module")
def with_tools(make_server, tokenizer):
    """A server whose template shows the tools."""
    template = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    def make(**options):
        server = make_server(num_blocks=256, **options)
        other = copy.copy(tokenizer)
        import dataclasses

        other._parts = dataclasses.replace(tokenizer._parts, chat_templates={"default": template})
        other._templates = {}
        server.server.service.tokenizer = other
        return server

    return make


def test_a_forced_call_in_a_stream_is_the_same_call(with_tools):
    server = with_tools()
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "seed": 3, "max_tokens": 200}
    (call,) = server.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
    with server.http.stream("POST", CHAT, json=body | {"stream": True}) as response:
        found = [json.loads(event)["choices"][0] for event in events(response) if event != "[DONE]"]
    deltas = [choice["delta"] for choice in found]
    assert not any(delta.get("content") for delta in deltas)
    (streamed,) = [each for delta in deltas for each in delta.get("tool_calls", ())]
    assert streamed["index"] == 0
    assert streamed["function"] == call["function"]
    assert found[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_a_call(with_tools, choice):
    server = with_tools()
    answer = server.chat("x", tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=1.0, seed=3)
    message = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


TEXT = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_in_free_text_is_found(with_tools, stream):
    server = with_tools()
    body = {"messages": USER, "tools": TOOLS, "stream": stream}
    asked = server.server.service.tokenizer.apply_chat_template(USER, tools=TOOLS)
    server.parts.runner.model = server.parts.model = Script(TEXT, len(asked), delay=0.001)
    if stream:
        with server.http.stream("POST", CHAT, json=body) as response:
            found = [json.loads(event) for event in events(response) if event != "[DONE]"]
        deltas = [chunk["choices"][0]["delta"] for chunk in found]
        text = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        reason = found[-1]["choices"][0]["finish_reason"]
    else:
        choice = server.post(CHAT, body).json()["choices"][0]
        text, calls, reason = (
            choice["message"]["content"],
            choice["message"]["tool_calls"],
            choice["finish_reason"],
        )
    assert text.strip() == "Let me look."
    assert [call["function"]["name"] for call in calls] == ["weather"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Rome"}
    assert reason == "tool_calls"


def test_tool_choice_none_leaves_the_text_alone(with_tools):
    server = with_tools()
    asked = server.server.service.tokenizer.apply_chat_template(USER)
    server.parts.runner.model = Script(TEXT, len(asked))
    message = server.chat("hi", tools=TOOLS, tool_choice="none")["choices"][0]["message"]
    assert message["content"] == TEXT
    assert "tool_calls" not in message


def test_answers_of_tools_go_back_through_the_template(with_tools):
    server = with_tools()
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    response = server.post(CHAT, {"messages": messages, "tools": TOOLS, "max_tokens": 1})
    assert response.status_code == 200, response.text
