"""Clients that mean harm, or know no better: each gets one sentence, and the next client its answer."""

from __future__ import annotations

import json
import re
import socket
import threading
import time

import pytest
from http_server import CHAT, COMPLETE, Script, of, until

from octavo.serving.app import Access
from octavo.serving.connection import Connection


def connect(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def answer_to(client: socket.socket, data: bytes) -> tuple[int, bytes]:
    """Status and body of a whole answer."""
    client.sendall(data)
    got = b""
    while b"\r\n\r\n" not in got:
        got += client.recv(65536)
    head, _, body = got.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])
    while len(body) < length:
        body += client.recv(65536)
    return int(head.split()[1]), body


def schema(**keywords):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": keywords}}


ALIVE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
DEEP = "[" * 100_000
MANY = {f"k{i}": {"type": "string"} for i in range(2000)}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "cannot set"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "cannot set"),
        (CHAT, {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self", "cannot set"),
        (CHAT, {"chat_template_kwargs": {"add_bos": True}}, "chat_template_kwargs.add_bos", "cannot set"),
        (CHAT, {"chat_template_kwargs": {"eos_token": "x"}}, "messages", "the model's own"),
        (CHAT, {"messages": of("x") * 1100}, "messages", "1100 messages"),
        (CHAT, {"response_format": schema(anyOf=[])}, "response_format", "Unsatisfiable"),
        (CHAT, {"response_format": schema(**{"$ref": "file:///etc/passwd"})}, "response_format", "not"),
        (CHAT, {"response_format": schema(type="object", properties=MANY)}, None, "the grammar cannot"),
        (COMPLETE, {"stop_token_ids": [1] * 2000}, "stop_token_ids", "at most 1024"),
        (COMPLETE, {"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "at most 1024"),
        (COMPLETE, {"prompt": [2**70]}, None, str(2**70)),
        (COMPLETE, {"min_tokens": 4, "max_tokens": 9, "logit_bias": {"3": -1}, "n": 10**400}, "n", "256"),
    ],
)
def test_a_call_that_asks_too_much_is_refused_in_one_sentence(server, path, fields, param, words):
    body = {"messages": of("x")} if path == CHAT else {"prompt": "x"}
    error = server.refused(path, body | fields, 400, words)
    assert error["param"] == param, error
    assert server.complete("x", max_tokens=1)["choices"]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 10**30},
        {"max_tokens": 10**400, "stop_token_ids": list(range(250))},
        {"priority": 10**30},
        {"stop": [str(i) + "x" * 100_000 for i in range(64)], "n": 8},
        {"seed": -(2**63)},
        {"user": "\x00", "metadata": {"a": {"b": [1]}}},
    ],
)
def test_a_call_that_is_only_strange_is_answered(server, fields):
    start = time.monotonic()
    assert server.post(COMPLETE, {"prompt": "x", "max_tokens": 3, **fields}).status_code == 200
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]},
        {"role": "assistant", "content": "x", "tool_calls": [None]},
        {"role": "assistant", "content": "x", "tool_calls": "x"},
        {"role": "user<|im_end|>", "content": "x"},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "user", "content": "x", "name": "\x00", "extra": {"a": {}}},
    ],
)
def test_odd_messages_are_rendered_or_refused(server, message):
    response = server.post("/tokenize", {"messages": [message]})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 200:
        # The template's own control tokens only.
        plain = server.post("/tokenize", {"messages": of("x")}).json()["tokens"]
        assert response.json()["tokens"].count(258) == plain.count(258)


def test_what_a_grammar_and_a_limit_forbid_together_is_the_client_s_fault(server):
    body = {"messages": of("x"), "max_tokens": 9, "response_format": schema(const=1), "min_tokens": 4}
    error = server.refused(CHAT, body, 400, "forbid every token")
    assert error["code"] == "impossible_output"


def test_a_fault_of_ours_is_answered_in_form_and_the_connection_lives(make_server, monkeypatch, caplog):
    server = make_server()
    monkeypatch.setattr(server.server.service, "tokenizer_info", lambda: 1 / 0)
    with connect(server) as client:
        for _ in range(2):
            status, body = answer_to(client, b"GET /tokenizer_info HTTP/1.1\r\nHost: x\r\n\r\n")
            assert status == 500
            assert json.loads(body)["error"]["type"] == "internal_error"
            assert b"ZeroDivisionError" not in body
        assert answer_to(client, ALIVE)[0] == 200
    assert caplog.text.count("Traceback") == 2


@pytest.mark.parametrize("begun", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_head_that_does_not_come_is_not_waited_for(make_server, monkeypatch, begun):
    monkeypatch.setattr(Connection, "head_seconds", 0.3)
    server = make_server()
    with connect(server) as client:
        client.sendall(begun)
        assert client.recv(100) == b""
    # As the second request of a connection, too; a quick one is not bothered.
    with connect(server) as client:
        assert answer_to(client, ALIVE)[0] == 200
        if begun:
            client.sendall(begun)
            assert client.recv(100) == b""


def test_an_answer_may_take_longer_than_a_head(make_server, monkeypatch):
    monkeypatch.setattr(Connection, "head_seconds", 0.1)
    server = make_server(model=Script("x" * 30, 5, delay=0.02), num_blocks=64)
    assert server.complete("hello")["choices"][0]["text"] == "x" * 30


def test_a_client_that_never_reads_is_hung_up_on_and_leaves_nothing(make_server):
    server = make_server(
        model=Script("w" * 900, 5, delay=0.001), num_blocks=256, options={"request_timeout": 1.0}
    )
    body = json.dumps({"prompt": "hello", "stream": True, "n": 16, "logprobs": 5}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        until(lambda: server.stats.num_running == 16)
        until(server.is_idle)
        # The connection's own task has ended too.
        until(lambda: not server.server.server_state.tasks)
    server.parts.scheduler.check_invariants()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00rubbish\r\n\r\n",
        b"GET /\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000,
        b"GET /v1/models/%ED%A0%80%00%ff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /static/..%2fapp.py HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_at_once(server, data, caplog):
    with connect(server) as client:
        client.sendall(data)
        assert client.recv(65536).startswith(b"HTTP/1.1 4")
    assert server.http.get("/health").status_code == 200
    assert "Traceback" not in caplog.text


def test_an_upgrade_to_a_web_socket_is_no_way_around_the_key(make_server):
    server = make_server(access=Access(api_keys=("secret",)))
    with connect(server) as client:
        client.sendall(
            b"GET /v1/cache HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 401")


def test_a_client_that_hangs_up_in_its_own_body_is_no_fault_of_ours(server, caplog):
    with connect(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    until(lambda: not server.server.server_state.tasks)
    assert "Traceback" not in caplog.text


def test_as_many_connections_as_allowed_are_served_and_one_more_is_told_503(make_server):
    server = make_server(options={"max_connections": 2})
    server.http.close()  # the one that it opened to see that the server is there
    until(lambda: not server.server.server_state.connections)
    with connect(server) as first, connect(server) as second:
        assert answer_to(first, ALIVE)[0] == answer_to(second, ALIVE)[0] == 200
        with connect(server) as third:
            third.sendall(ALIVE)
            assert third.recv(4096).startswith(b"HTTP/1.1 503")
        until(lambda: len(server.server.server_state.connections) == 2)
        assert answer_to(second, ALIVE)[0] == 200
    with connect(server) as again:
        until(lambda: len(server.server.server_state.connections) == 1)
        assert answer_to(again, ALIVE)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_are_written_beside_the_event_loop(make_server, monkeypatch, stream):
    """Those of a long prompt take a second, in which the loop must answer others."""
    from octavo.serving import logprobs

    threads = set()
    real = logprobs.token_text

    def token_text(*args):
        threads.add(threading.current_thread().name)
        return real(*args)

    monkeypatch.setattr(logprobs, "token_text", token_text)
    body = {"prompt": "x" * 40, "echo": True, "logprobs": 9, "max_tokens": 3, "stream": stream}
    assert make_server().post(COMPLETE, body).status_code == 200
    assert threads
    assert all(name.startswith("octavo-tokenizer") for name in threads), threads


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        (COMPLETE, {"prompt": "x", "max_tokens": 1}, "encode_prompt"),
        (CHAT, {"messages": of("x"), "max_tokens": 1}, "encode_chat"),
        ("/tokenize", {"messages": of("x")}, "encode_chat"),
    ],
)
def test_text_is_tokenized_beside_the_event_loop(server, monkeypatch, path, body, work):
    from octavo.serving import inputs

    threads = []
    real = getattr(inputs, work)

    def noted(*args, **settings):
        threads.append(threading.current_thread().name)
        return real(*args, **settings)

    monkeypatch.setattr(inputs, work, noted)
    assert server.post(path, body).status_code == 200
    assert [name.partition("_")[0] for name in threads] == ["octavo-tokenizer"]
