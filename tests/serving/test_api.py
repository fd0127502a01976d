"""Rows of the cases for servers (H), over HTTP."""

from __future__ import annotations

import base64
import json
import socket
import threading

import pytest
from http_server import CHAT, COMPLETE, Script, chunks_of, of, parsed, run_offline, until

from octavo.serving.app import Access


@pytest.mark.parametrize("stream", [True, False])
def test_h01_a_client_that_hangs_up_is_aborted_within_two_steps(make_server, stream):
    model = Script("x" * 900, 5, delay=0.1)
    server = make_server(model=model, num_blocks=256)
    body = json.dumps({"prompt": "hello", "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        if stream:
            assert b"data:" in client.recv(65536) + client.recv(65536)
        until(lambda: server.stats.num_running == 1)
    closed_at = model.steps
    until(server.is_idle)
    # The step that was under way is counted already.
    assert model.steps - closed_at <= 2
    assert server.parts.engine.metrics.finished == {"abort": 1}
    server.parts.scheduler.check_invariants()


def test_h01_a_normal_end_is_no_abort(make_server):
    server = make_server()
    server.complete("hello", max_tokens=3)
    chunks_of(server, COMPLETE, {"prompt": "hello", "max_tokens": 3})
    until(server.is_idle)
    assert server.parts.engine.metrics.finished == {"length": 2}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, b"{", 400, None),
        (CHAT, b"[1]", 400, None),
        (CHAT, b"", 400, None),
        (CHAT, b"\xff\xfe", 400, None),
        (CHAT, b'{"messages": {}}', 400, "messages"),
        (CHAT, b'{"messages": [1]}', 400, "messages[0]"),
        (CHAT, b"{}", 400, "messages"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "model": "gpt-9"}', 404, "model"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "model": "../../etc"}', 404, "model"),
        (COMPLETE, b'{"prompt": "x", "model": "/etc/passwd"}', 404, "model"),
        (COMPLETE, b'{"prompt": 3}', 400, "prompt"),
        (COMPLETE, b'{"prompt": []}', 400, "prompt"),
        (COMPLETE, b'{"prompt": ["x", 3]}', 400, "prompt[1]"),
        (COMPLETE, b'{"prompt": [true]}', 400, "prompt[0]"),
        (COMPLETE, b'{"prompt": "x", "temprature": 1}', 400, "temprature"),
        (COMPLETE, b'{"prompt": "x", "stream_options": {"usage": true}}', 400, "stream_options.usage"),
        (COMPLETE, b'{"prompt": "x", "temperature": NaN}', 400, None),
        (COMPLETE, b"[" * 100_000, 400, None),
    ],
)
def test_h02_w12_bad_calls_get_the_error_object(server, path, body, status, param):
    response = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert "/src/" not in error["message"]
    assert server.complete("x", max_tokens=1)["choices"]


def test_unknown_addresses_and_methods_have_the_error_object(server):
    assert server.refused("/v1/nothing", {}, 404)["type"]
    response = server.http.get("/v1/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["message"]
    assert server.http.get(COMPLETE).status_code == 405
    assert server.http.get("/../../etc/passwd").status_code == 404
    assert server.http.get("/%2e%2e/app.py").status_code == 404


def test_a_body_that_is_no_json_by_its_type_is_refused(server):
    response = server.http.post(COMPLETE, content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 415


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("asked", [True, False])
def test_h03_h12_usage_in_streams_only_when_asked_for(server, path, asked):
    body = {"max_tokens": 4, "ignore_eos": True}
    body |= {"messages": of("usage")} if path == CHAT else {"prompt": "usage"}
    if asked:
        body["stream_options"] = {"include_usage": True}
    found = parsed(chunks_of(server, path, body))
    last = found[-1]
    if asked:
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        assert "cached_tokens" in last["usage"]["prompt_tokens_details"]
        assert all(chunk["usage"] is None for chunk in found[:-1])
    else:
        assert all("usage" not in chunk for chunk in found)
        assert last["choices"][0]["finish_reason"] == "length"
    whole = server.http.post(path, json={k: v for k, v in body.items() if k != "stream_options"}).json()
    assert whole["usage"]["completion_tokens"] == 4
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 4
    # The same prompt a second time: all but its last token.
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == whole["usage"]["prompt_tokens"] - 1


def test_stream_options_need_a_stream(server):
    error = server.refused(COMPLETE, {"prompt": "x", "stream_options": {"include_usage": True}}, 400)
    assert error["param"] == "stream_options"


def test_h04_h11_an_error_in_mid_stream_is_an_event_and_the_end(make_server):
    server = make_server()
    first = server.complete("boom", temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    ids = server.post("/tokenize", {"prompt": "neighbour"}).json()["tokens"]
    expected = server.complete(ids, temperature=0, max_tokens=30, ignore_eos=True)["choices"][0]["text"]
    server.http.delete("/v1/cache")
    # The third token that the model puts out makes its forward pass raise.
    generated = server.parts.engine
    params_ids = _greedy_ids(server, "boom", 6)
    server.parts.model.fail_on = {params_ids[2]}
    beside: list[dict] = []
    thread = threading.Thread(
        target=lambda: beside.append(server.complete(ids, temperature=0, max_tokens=30, ignore_eos=True))
    )
    thread.start()
    chunks = chunks_of(
        server, COMPLETE, {"prompt": "boom", "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    )
    thread.join()
    error = json.loads(chunks[-1])["error"]
    assert "this token cannot be computed" in error["message"]
    assert "[DONE]" not in chunks
    text = "".join(json.loads(c)["choices"][0]["text"] for c in chunks[:-1])
    assert first["choices"][0]["text"].startswith(text)
    whole = server.post(COMPLETE, {"prompt": "boom", "temperature": 0, "max_tokens": 6, "ignore_eos": True})
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "engine_error"
    server.parts.model.fail_on = set()
    assert params_ids[2] not in ids
    assert params_ids[2] not in _greedy_ids(server, ids, 30), "choose prompts that do not meet"
    assert beside[0]["choices"][0]["text"] == expected
    assert generated.metrics.finished["error"] == 2
    until(server.is_idle)
    server.parts.scheduler.check_invariants()


def _greedy_ids(server, prompt, count: int) -> list[int]:
    """The ids of a greedy answer, from the offline engine's own path: text alone may lose bytes."""
    from octavo.request import SamplingParams

    ids = prompt if isinstance(prompt, list) else server.parts.engine.tokenizer.encode(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return run_offline(server, ids, params).outputs[0].token_ids


def test_h05_embeddings_without_an_encoder_say_so(server):
    error = server.refused("/v1/embeddings", {"input": "x"}, 501, "encoder")
    assert error["code"] == "not_supported"


def test_the_tokenizer_names_its_own_tokens(server):
    assert server.http.get("/tokenizer_info").json() == {"eos_token": "<|end|>", "bos_token": None}


def test_h06_a_key_is_asked_for_by_default(make_server):
    access = Access(api_keys=("secret", "other"), cors_origins=("https://page.example",))
    server = make_server(access=access)
    closed = ["/v1/models", "/metrics", "/v1/cache", "/", "/openapi.json", "/nothing"]
    for path in closed:
        response = server.http.get(path)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
    for path in (CHAT, COMPLETE, "/tokenize", "/detokenize", "/v1/embeddings"):
        assert server.post(path, {}).status_code == 401
    assert server.http.delete("/v1/cache").status_code == 401
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
    assert server.http.options(CHAT).status_code == 401  # no preflight, as it names no origin
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-lang"
    assert server.http.options(CHAT, headers=preflight).status_code == 200
    elsewhere = server.http.options(CHAT, headers=preflight | {"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in elsewhere.headers
    for value in ("Bearer wrong", "Bearer", "secret", "Bearer secre", "Basic !!", "Bearer secret2"):
        assert server.http.get("/v1/models", headers={"Authorization": value}).status_code == 401, value
    basic = base64.b64encode(b"me:other").decode()
    for value in ("Bearer secret", "bearer other", f"Basic {basic}"):
        assert server.http.get("/v1/models", headers={"Authorization": value}).status_code == 200, value


def test_p03_callers_with_different_keys_share_nothing(make_server):
    def cached(server, key, **fields):
        answer = server.post(
            COMPLETE,
            {"prompt": "a shared prompt", "max_tokens": 1, **fields},
            headers={"Authorization": f"Bearer {key}"},
        ).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    server = make_server(access=Access(api_keys=("a", "b")))
    assert [cached(server, key) for key in "aab"] == [0, 14, 0]
    assert [cached(server, key, cache_salt="s") for key in "aab"] == [0, 14, 0]
    # A salt cannot be chosen so that it is another caller's.
    import hashlib

    stolen = hashlib.sha256(b"a").hexdigest()
    assert cached(server, "b", cache_salt=stolen) == 0
    assert cached(server, "b", cache_salt="") == 0
    shared = make_server(access=Access(api_keys=("a", "b"), shared_cache=True))
    assert [cached(shared, key) for key in "aab"] == [0, 14, 14]
    assert [cached(shared, key, cache_salt="s") for key in "ab"] == [0, 14]


def test_p03_salts_without_keys(server):
    def cached(**fields):
        return server.complete("salted prompt", max_tokens=1, **fields)["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    assert [cached(cache_salt="one"), cached(cache_salt="two"), cached(cache_salt="one")] == [0, 0, 12]


def test_the_cache_view_names_no_request_of_another_caller(make_server):
    model = Script("x" * 900, 5, delay=0.01)
    server = make_server(model=model, access=Access(api_keys=("a", "b")), num_blocks=256)
    headers = {key: {"Authorization": f"Bearer {key}"} for key in "ab"}
    with server.http.stream(
        "POST", COMPLETE, json={"prompt": "hello", "stream": True}, headers=headers["a"]
    ) as response:
        lines = response.iter_lines()  # kept: its end would close the connection
        next(lines)
        views = {key: server.http.get("/v1/cache", headers=headers[key]).json() for key in "ab"}
    tables = {key: view["tables"] for key, view in views.items()}
    assert tables["a"][0]["request"]
    assert tables["b"][0]["request"] is None
    until(server.is_idle)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 10**6}, ["n", "256"]),
        ({"n": 0}, ["n", "between 1 and 256"]),
        ({"stop": ["x"] * 10**5}, ["stop", "64"]),
        ({"prompt": ["x"] * 200, "n": 2}, ["400 choices", "at most"]),
        ({"prompt": ["x"] * 1000}, ["1000 prompts"]),
        ({"prompt": "x" * 300_000}, ["300000 characters"]),
    ],
)
def test_h08_numbers_are_capped(server, fields, words):
    server.refused(COMPLETE, {"prompt": "x", **fields}, 400, *words)


def test_h08_a_body_that_is_too_large_is_refused_before_it_is_read(make_server):
    server = make_server(access=Access(max_body=1000))
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(head + b"Content-Length: 1000000000\r\n\r\n{")
        assert b"413" in client.recv(4096)

    def endless():
        for _ in range(100):
            yield b"x" * 100

    response = server.http.post(COMPLETE, content=endless(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]["message"]


def test_h08_a_body_that_does_not_come_is_not_waited_for(make_server):
    server = make_server(access=Access(body_timeout=0.2))
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(head + b"Content-Length: 50\r\n\r\n{")
        assert b"408" in client.recv(4096)


def test_h08_a_full_queue_says_when_to_come_back(make_server):
    model = Script("x" * 900, 5, delay=0.02)
    server = make_server(model=model, max_num_seqs=2, options={"max_queue": 1}, num_blocks=256)
    with (
        server.http.stream("POST", COMPLETE, json={"prompt": "hello", "n": 2, "stream": True}),
        server.http.stream("POST", COMPLETE, json={"prompt": "hello", "stream": True}),
    ):
        response = server.post(COMPLETE, {"prompt": "hello"})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "queue_full"
    until(server.is_idle)
    # More than could ever run is no reason to come back.
    server.refused(COMPLETE, {"prompt": "hello", "n": 4}, 400, "at most 3")
    assert server.complete("hello", max_tokens=1)["choices"]


def test_h08_a_request_may_not_take_forever(make_server):
    server = make_server(
        model=Script("x" * 900, 5, delay=0.02), num_blocks=256, options={"request_timeout": 0.2}
    )
    server.refused(COMPLETE, {"prompt": "hello"}, 408, "0.2 s")
    chunks = chunks_of(server, COMPLETE, {"prompt": "hello"})
    assert json.loads(chunks[-1])["error"]["code"] == "timeout"
    until(server.is_idle)


def test_h09_prompts_are_not_logged(server, make_server, caplog):
    import structlog

    with structlog.testing.capture_logs() as lines:
        server.complete("a secret that is nobody's business", max_tokens=1)
        server.chat("another secret of mine", max_tokens=1)
        server.refused(COMPLETE, {"prompt": "a bad secret", "temperature": -1}, 400)
        until(lambda: len(lines) >= 2)
    assert "secret" not in f"{lines} {caplog.text}"
    line = lines[0]
    assert line["event"] == "request"
    assert {"id", "prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "total_s"} <= set(line)
    telling = make_server(options={"log_prompts": True})
    with structlog.testing.capture_logs() as lines:
        telling.complete("a secret to tell", max_tokens=1)
        until(lambda: len(lines) >= 1)
    assert lines[0]["prompts"] == ["a secret to tell"]


def test_h10_without_max_tokens_the_rest_of_the_context(make_server):
    server = make_server(num_blocks=8, block_size=4)
    answer = server.complete("hello", ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 32
    chat = server.post(CHAT, {"messages": of("x"), "ignore_eos": True}).json()
    assert chat["usage"]["total_tokens"] == 32
    assert server.chat("x", max_completion_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    error = server.refused(
        CHAT, {"messages": of("x"), "max_tokens": 3, "max_completion_tokens": 2}, 400, "differ"
    )
    assert error["param"] == "max_completion_tokens"


def test_h11_nan_in_one_request_fails_that_one(make_server):
    server = make_server()
    token = server.post("/tokenize", {"prompt": "~"}).json()["tokens"][0]
    server.parts.model.nan_on = {token}
    response = server.post(COMPLETE, {"prompt": "~", "max_tokens": 2})
    assert response.status_code == 500
    assert "not finite" in response.json()["error"]["message"]
    assert server.complete("x", max_tokens=1)["choices"]


@pytest.mark.parametrize("stream", [True, False])
def test_h11_a_detokenizer_that_fails_costs_its_own_request(make_server, monkeypatch, stream):
    from octavo.tokenizer import IncrementalDetokenizer

    server = make_server(model=Script("abcZdef", 5), num_blocks=64)
    fatal = server.post("/tokenize", {"prompt": "Z"}).json()["tokens"][0]
    push = IncrementalDetokenizer.push

    def broken(self, token, **settings):
        if token == fatal:
            raise RuntimeError("no text for this token")
        return push(self, token, **settings)

    monkeypatch.setattr(IncrementalDetokenizer, "push", broken)
    beside: list[str] = []
    # Its fourth token is another one: the script starts at the prompt's end.
    thread = threading.Thread(
        target=lambda: beside.append(server.complete("hello", max_tokens=3)["choices"][0]["text"])
    )
    thread.start()
    if stream:
        chunks = chunks_of(server, COMPLETE, {"prompt": "hello"})
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1]) == "abc"
        error = json.loads(chunks[-1])["error"]
    else:
        error = server.refused(COMPLETE, {"prompt": "hello"}, 500)
    thread.join()
    assert "no text for this token" in error["message"]
    assert beside == ["abc"]
    until(server.is_idle)
    server.parts.scheduler.check_invariants()


#: What dashboards for vLLM ask for.
SHARED_METRICS = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
}


def test_metrics_have_both_names_and_count(make_server):
    server = make_server()
    server.complete("hello there", max_tokens=5, ignore_eos=True)
    server.complete("hello there", max_tokens=5, ignore_eos=True)
    lines = server.http.get("/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    for prefix in ("octavo", "vllm"):
        label = '{model_name="tiny"}'
        assert {f"{prefix}:{name}{label}" for name in SHARED_METRICS} <= set(values)
        assert values[f"{prefix}:e2e_request_latency_seconds_count{label}"] == 2
        assert values[f"{prefix}:num_requests_running{label}"] == 0
        assert values[f"{prefix}:generation_tokens_total{label}"] == 10
        assert values[f"{prefix}:prompt_tokens_total{label}"] == 22
        assert values[f"{prefix}:prefix_cache_hits_total{label}"] == 10
        assert values[f'{prefix}:request_success_total{{finished_reason="length",model_name="tiny"}}'] == 2
        assert values[f"{prefix}:time_to_first_token_seconds_count{label}"] == 2
        assert values[f"{prefix}:inter_token_latency_seconds_count{label}"] == 8


def test_cache_view_and_reset(make_server):
    server = make_server()
    server.complete("the quick brown fox", max_tokens=2)
    view = server.http.get("/v1/cache").json()
    assert view["blocks"]["cached"] == sum(view["cached"]) > 3
    assert len(view["refs"]) == len(view["parent"]) == view["num_blocks"] == 64
    # Two prompts that part after two blocks: one tree, whose root has no parent and whose trunk is shared.
    server.complete("the quick red fox", max_tokens=2)
    view = server.http.get("/v1/cache").json()
    parents = [p for p, cached in zip(view["parent"], view["cached"], strict=True) if cached]
    assert parents.count(-1) == 1
    assert all(view["cached"][parent] for parent in parents if parent >= 0)
    assert max(parents.count(parent) for parent in parents if parent >= 0) == 2
    assert all(p == -1 for p, cached in zip(view["parent"], view["cached"], strict=True) if not cached)
    assert view["prefix_cache"]["queries"] == 19 + 17
    assert view["prefix_cache"]["hits"] == len("the quick ")
    assert server.http.delete("/v1/cache").status_code == 200
    view = server.http.get("/v1/cache").json()
    assert view["blocks"] == {"free": 64, "cached": 0, "used": 0}
    assert "fox" not in json.dumps(view)


def test_models(server):
    models = server.http.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert server.http.get("/v1/models/tiny").json()["id"] == "tiny"
    assert server.http.get("/v1/models/../../etc").status_code == 404


def test_tokenize_and_back(server):
    text = "Hello world! Café — 123 😊"
    ids = server.post("/tokenize", {"prompt": text}).json()
    assert ids["count"] == len(ids["tokens"]) == len(text.encode())
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": of("x")}).json()["tokens"]
    assert 257 in chat
    server.refused("/tokenize", {}, 400)
    server.refused("/tokenize", {"prompt": "x", "messages": of("x")}, 400)
    server.refused("/detokenize", {"tokens": [10**6]}, 400, "1000000")
    server.refused("/detokenize", {"tokens": [-1]}, 400, "-1")


def test_every_answer_has_an_id(server):
    response = server.post(COMPLETE, {"prompt": "x", "max_tokens": 1})
    assert response.json()["id"] == "cmpl-" + response.headers["x-request-id"]
    assert server.http.get("/nothing").headers["x-request-id"]
