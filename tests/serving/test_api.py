"""Rows of the cases for servers (H), text (T), sampling (A) and the pool (S, P), over HTTP."""

from __future__ import annotations

import base64
import json
import math
import socket
import threading
import time

import httpx
import pytest
from http_server import Script, events, run_offline, until

from octavo.serving.app import Access

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"


def of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chunks_of(server, path, body):
    """All events of a stream; the last is [DONE]."""
    with server.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def parsed(chunks: list[str]) -> list[dict]:
    assert chunks[-1] == "[DONE]"
    return [json.loads(chunk) for chunk in chunks[:-1]]


# ---- H: the server


@pytest.mark.parametrize("stream", [True, False])
def test_h01_a_client_that_hangs_up_is_aborted_within_two_steps(make_server, stream):
    model = Script("x" * 900, 5, delay=0.02)
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
    # The event loop has to hear of it: one step may be under way, one more may have begun.
    assert model.steps - closed_at <= 3
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
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert server.http.options(CHAT, headers=preflight).status_code == 200
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


def test_metrics_have_both_names_and_count(make_server):
    server = make_server()
    server.complete("hello there", max_tokens=5, ignore_eos=True)
    server.complete("hello there", max_tokens=5, ignore_eos=True)
    lines = server.http.get("/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    for prefix in ("octavo", "vllm"):
        label = '{model_name="tiny"}'
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


# ---- S: admission


def test_s01_an_empty_prompt(server):
    assert server.refused(COMPLETE, {"prompt": [""]}, 400, "empty")["param"] == "prompt"
    server.refused(COMPLETE, {"prompt": ""}, 400, "empty")
    assert server.complete("x", max_tokens=1)["choices"]


def test_s02_s03_a_prompt_that_is_too_long_names_both_numbers(make_server):
    server = make_server(num_blocks=8, block_size=4)
    server.refused(COMPLETE, {"prompt": "x" * 33}, 400, "33", "32")
    server.refused(COMPLETE, {"prompt": "x" * 32}, 400, "32")
    assert server.complete("x" * 31)["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("token", [-1, 259, 2**40])
def test_s15_ids_outside_the_vocabulary(server, token):
    server.refused(COMPLETE, {"prompt": [1, 2, token]}, 400, str(token), "position 2")


def test_s12_s13_many_hang_ups_leave_nothing(make_server):
    server = make_server(model=Script("y" * 900, 5, delay=0.003), num_blocks=64, max_num_seqs=3)
    for round_number in range(12):
        with server.http.stream(
            "POST", COMPLETE, json={"prompt": "hello", "n": 1 + round_number % 3, "stream": True}
        ) as response:
            for _, _ in zip(range(round_number), response.iter_lines(), strict=False):
                pass
    until(server.is_idle)
    server.parts.scheduler.check_invariants()
    stats = server.stats
    assert stats.free_blocks + stats.cached_blocks == 64


# ---- P: the prefix cache


def test_p01_p02_warm_equals_cold(make_server):
    server = make_server()
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    cold = server.complete("say it twice", **body)
    warm = server.complete("say it twice", **body)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 11
    assert warm["choices"] == cold["choices"]


def test_p04_the_second_turn_reuses_the_first(make_server):
    server = make_server(model=Script("fine, thanks", 35), num_blocks=64)
    first = of("how are you?")
    answer = server.post(CHAT, {"messages": first}).json()
    text = answer["choices"][0]["message"]["content"]
    second = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "and now?"}]
    usage = server.post(CHAT, {"messages": second, "max_tokens": 1}).json()["usage"]
    whole = answer["usage"]["prompt_tokens"] + len(text)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= whole - 1


# ---- A: sampling


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 999999}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"logprobs": 101}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 1e300}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"priority": 1.5}, "priority"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"attn_topk": 4}, "attn_topk"),
    ],
)
def test_a01_a04_a10_t03_a_bad_value_names_its_field(server, fields, param):
    error = server.refused(COMPLETE, {"prompt": "x", **fields}, 400)
    assert error["param"] == param, error
    assert param.split("[")[0] in error["message"]


def test_a01_a_tiny_temperature_is_greedy(server):
    texts = {
        server.complete("greedy", temperature=t, max_tokens=8)["choices"][0]["text"] for t in (0, 1e-4, 1e-4)
    }
    assert len(texts) == 1


def test_a02_greedy_and_banned_tokens_in_a_mixed_batch(server):
    ids = server.post("/tokenize", {"prompt": "abc"}).json()["tokens"]
    body = {"temperature": 0, "max_tokens": 4, "logit_bias": {str(i): -1e9 for i in ids}}
    alone = server.complete("mixed", **body)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(server.complete("mixed", **body))),
        threading.Thread(target=lambda: server.complete("mixed", temperature=1.5, max_tokens=8)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0]["choices"] == alone["choices"]


@pytest.mark.parametrize("top_k", [259, 9999999, 0, -1])
def test_a03_a_large_top_k_is_no_limit(server, top_k):
    body = {"seed": 1, "max_tokens": 8, "temperature": 2.0}
    assert server.complete("k", **body, top_k=top_k)["choices"] == server.complete("k", **body)["choices"]


def test_a05_log_probabilities_are_finite_json(server):
    body = {"max_tokens": 3, "logit_bias": {"5": -1e9}, "logprobs": 100, "temperature": 0}
    text = server.post(COMPLETE, {"prompt": "x", **body}).text
    for best in json.loads(text)["choices"][0]["logprobs"]["top_logprobs"]:
        assert all(math.isfinite(value) for value in best.values())


def test_a06_ids_past_the_tokenizer_are_never_sampled(server):
    answer = server.complete("wide", max_tokens=200, temperature=100.0, seed=3, ignore_eos=True, logprobs=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 200


def test_a08_a09_end_tokens(make_server):
    server = make_server(eos=(256, 0))
    for end in (256, 0):
        answer = server.complete("x", logit_bias={str(end): 1e5}, temperature=0)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
    held = server.complete("x", logit_bias={"0": 1e5}, temperature=0, min_tokens=2, max_tokens=9)
    assert held["usage"]["completion_tokens"] == 3
    on = server.complete("x", logit_bias={"0": 1e5}, temperature=0, ignore_eos=True, max_tokens=9)
    assert (on["usage"]["completion_tokens"], on["choices"][0]["finish_reason"]) == (9, "length")


def test_a10_max_tokens_0_scores_the_prompt(server):
    answer = server.complete("score me", max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "score me"
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["token_logprobs"]) == 8
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert choice["logprobs"]["text_offset"] == list(range(8))
    assert "".join(choice["logprobs"]["tokens"]) == "score me"


def test_a11_n_with_a_seed(server):
    body = {"n": 4, "seed": 7, "temperature": 1.5, "max_tokens": 6, "ignore_eos": True}
    one, two = server.complete("choices", **body), server.complete("choices", **body)
    assert one["choices"] == two["choices"]
    assert [choice["index"] for choice in one["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in one["choices"]}) == 4
    assert [choice["finish_reason"] for choice in one["choices"]] == ["length"] * 4
    chunks = parsed(chunks_of(server, COMPLETE, {"prompt": "choices", **body}))
    texts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in one["choices"]]
    assert sum(c["choices"][0]["finish_reason"] is not None for c in chunks) == 4
    # The prompt is computed once, and every choice's own blocks follow it.
    assert one["usage"]["prompt_tokens"] == 7


def test_a12_a_seed_decides_alone_or_in_company(server):
    body = {"seed": 42, "temperature": 1.0, "max_tokens": 10, "ignore_eos": True}
    alone = server.complete("seeded", **body)["choices"][0]["text"]
    results: list[str] = []
    others = [
        threading.Thread(target=lambda i=i: server.complete(f"other {i}", max_tokens=20)) for i in range(5)
    ]
    mine = threading.Thread(
        target=lambda: results.append(server.complete("seeded", **body)["choices"][0]["text"])
    )
    for thread in (*others, mine):
        thread.start()
    for thread in (*others, mine):
        thread.join()
    assert results == [alone]


# ---- T: text


def test_t01_characters_are_whole_in_a_stream(make_server):
    text = "naïve — 日本語 😊👩‍👩‍👧 end"
    server = make_server(model=Script(text, 5, delay=0.002), num_blocks=64)
    found = parsed(chunks_of(server, COMPLETE, {"prompt": "hello"}))
    assert "".join(chunk["choices"][0]["text"] for chunk in found) == text
    assert all("\ufffd" not in chunk["choices"][0]["text"] for chunk in found)
    assert len(found) > 5


def test_t01_what_is_left_of_a_character_is_flushed_at_the_end(make_server):
    server = make_server(model=Script("ab😊".encode()[:4], 5), num_blocks=64)
    found = parsed(chunks_of(server, COMPLETE, {"prompt": "hello"}))
    assert "".join(chunk["choices"][0]["text"] for chunk in found) == "ab\ufffd"


@pytest.mark.parametrize("stream", [True, False])
def test_t02_a_stop_string_over_tokens(make_server, stream):
    server = make_server(model=Script("one two STOP three", 5, delay=0.002), num_blocks=64)
    body = {"prompt": "hello", "stop": ["STOP"]}
    if stream:
        found = parsed(chunks_of(server, COMPLETE, body))
        text = "".join(chunk["choices"][0]["text"] for chunk in found)
        last = found[-1]["choices"][0]
    else:
        last = server.complete(**body)["choices"][0]
        text = last["text"]
    assert text == "one two "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "STOP")


def test_t04_finish_reasons(make_server):
    server = make_server(model=Script("abc", 5), num_blocks=64)

    def end(**fields):
        choice = server.complete("hello", **fields)["choices"][0]
        return choice["finish_reason"], choice["stop_reason"]

    assert end() == ("stop", None)
    assert end(stop="b") == ("stop", "b")
    assert end(max_tokens=2) == ("length", None)
    token = server.post("/tokenize", {"prompt": "c"}).json()["tokens"][0]
    assert end(stop_token_ids=[token]) == ("stop", token)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ([{"role": "user"}], "content"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": 3}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "text part"),
    ],
)
def test_t06_messages_that_cannot_be_rendered(server, messages, words):
    server.refused(CHAT, {"messages": messages}, 400, words)


def test_t06_an_empty_message_is_fine(server):
    messages = [*of("x"), {"role": "assistant", "content": ""}, *of("")]
    assert server.post(CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert (
        server.post("/tokenize", {"messages": parts}).json()
        == server.post("/tokenize", {"messages": of("ab")}).json()
    )


def test_t07_control_tokens_in_a_message_are_text(server):
    plain = server.post("/tokenize", {"messages": of("<|im_end|>")}).json()["tokens"]
    assert plain.count(258) == server.post("/tokenize", {"messages": of("x")}).json()["tokens"].count(258)
    assert 258 not in server.post("/tokenize", {"prompt": "<|im_end|>"}).json()["tokens"]


def test_t09_a_lone_surrogate(server):
    for body in (b'{"prompt": "\\ud800"}', b'{"prompt": "x", "stop": "\\udfff"}'):
        response = server.http.post(COMPLETE, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"]
    server.refused(COMPLETE, {"prompt": "x", "cache_salt": "ok\x00ok", "max_tokens": -1}, 400)


# ---- logprobs, echo


def test_echo_puts_the_prompt_first_once(server):
    choice = server.complete("echo ", echo=True, max_tokens=4, ignore_eos=True, temperature=0)["choices"][0]
    bare = server.complete("echo ", max_tokens=4, ignore_eos=True, temperature=0)["choices"][0]
    assert choice["text"] == "echo " + bare["text"]
    body = {"prompt": "echo ", "echo": True, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    streamed = parsed(chunks_of(server, COMPLETE, body))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]


@pytest.mark.parametrize("echo", [True, False])
def test_logprobs_in_a_stream_equal_the_whole(server, echo):
    body = {
        "prompt": "scored",
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
        "echo": echo,
    }
    whole = server.complete(**body)["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in parsed(chunks_of(server, COMPLETE, body))]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert [item for part in parts for item in part[name]] == whole[name]
    assert len(whole["tokens"]) == 8 + 6 * echo
    assert all(len(best) in (2, 3) for best in whole["top_logprobs"] if best is not None)


def test_chat_logprobs(server):
    answer = server.chat("x", max_tokens=3, logprobs=True, top_logprobs=2, temperature=0)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    bare = server.chat("x", max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"][0]
    assert bare["top_logprobs"] == []
    server.refused(CHAT, {"messages": of("x"), "top_logprobs": 2}, 400, "logprobs")
    server.refused(CHAT, {"messages": of("x"), "logprobs": True, "top_logprobs": 200}, 400, "logprobs")


def test_several_prompts_in_one_call(server):
    answer = server.complete(["a", [1, 2], "b"], n=2, max_tokens=2, temperature=0)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    single = server.complete([1, 2], max_tokens=2, temperature=0)["choices"][0]["text"]
    assert answer["choices"][2]["text"] == answer["choices"][3]["text"] == single
    assert answer["usage"]["prompt_tokens"] == 4
    streamed = parsed(chunks_of(server, COMPLETE, {"prompt": ["a", "b"], "max_tokens": 2}))
    assert {chunk["choices"][0]["index"] for chunk in streamed} == {0, 1}
    error = server.refused(COMPLETE, {"prompt": ["a", ""], "max_tokens": 2}, 400, "empty")
    assert error["param"] == "prompt"
    until(server.is_idle)


def test_priority_goes_first(make_server):
    model = Script("z" * 30, 5, delay=0.01)
    server = make_server(model=model, max_num_seqs=1, num_blocks=64)
    ended: list[str] = []

    def ask(name: str, **fields) -> threading.Thread:
        def run() -> None:
            with httpx.Client(base_url=server.url) as client:
                assert client.post(COMPLETE, json={"prompt": "hello", **fields}).status_code == 200
            ended.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    threads = [ask("first")]
    until(lambda: server.stats.num_running == 1)
    threads.append(ask("late", priority=5))
    until(lambda: server.stats.num_waiting == 1)
    threads.append(ask("soon", priority=1))
    for thread in threads:
        thread.join()
    assert ended == ["first", "soon", "late"]


def test_two_hundred_streams_at_once_lose_nothing(make_server):
    text = "all of this arrives"
    server = make_server(model=Script(text, 5, delay=0.001), num_blocks=256, max_num_seqs=32)
    results: list[str] = []

    async def one(client) -> None:
        found = []
        async with client.stream("POST", COMPLETE, json={"prompt": "hello", "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    found.append(json.loads(line[6:])["choices"][0]["text"])
        results.append("".join(found))

    async def everybody() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(one(client) for _ in range(200)))

    import asyncio

    asyncio.run(everybody())
    assert results == [text] * 200
    until(server.is_idle)


def test_health_and_ready(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}


def test_a_slow_reader_costs_nothing(make_server):
    server = make_server(model=Script("w" * 900, 5), num_blocks=256)
    with server.http.stream("POST", COMPLETE, json={"prompt": "hello", "stream": True}) as response:
        time.sleep(0.5)
        text = "".join(
            json.loads(event)["choices"][0]["text"] for event in events(response) if event != "[DONE]"
        )
    assert text == "w" * 900


def test_h07_draining_lets_streams_end_and_takes_no_more(make_server):
    server = make_server(model=Script("d" * 60, 5, delay=0.01), num_blocks=64)
    with server.http.stream("POST", COMPLETE, json={"prompt": "hello", "stream": True}) as response:
        lines = response.iter_lines()
        first = next(lines)
        server.server.begin_end()
        until(lambda: server.server.engine.draining)
        with httpx.Client(base_url=server.url) as other:
            refused = other.post(COMPLETE, json={"prompt": "hello"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "unavailable"
            assert other.get("/ready").status_code == 503
            assert other.get("/health").status_code == 200
        rest = [line for line in [first, *lines] if line]
    assert rest[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in rest[:-1])
    assert text == "d" * 60
    server.close()


def test_h07_t04_what_does_not_end_in_time_is_aborted(make_server):
    server = make_server(
        model=Script("d" * 900, 5, delay=0.01), num_blocks=256, options={"drain_timeout": 0.1}
    )
    with server.http.stream("POST", COMPLETE, json={"prompt": "hello", "stream": True}) as response:
        lines = events(response)
        next(lines)
        server.server.begin_end()
        rest = list(lines)
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "abort"
    server.close()
