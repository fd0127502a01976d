"""Random calls made from our own OpenAPI description: whatever comes, no fault of ours and no hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import encoder_server
import pytest
from http_server import Running, until
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

#: A plain call of each operation and the status that it must have: random ones may all be refused.
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
DECODER: dict[tuple[str, str], tuple[Any, int]] = {
    ("POST", "/v1/chat/completions"): (CHAT | {"model": "tiny"}, 200),
    ("POST", "/v1/completions"): ({"model": "tiny", "prompt": "a", "max_tokens": 1}, 200),
    ("POST", "/v1/embeddings"): ({"model": "tiny", "input": "a"}, 501),
    ("POST", "/tokenize"): ({"prompt": "a"}, 200),
    ("POST", "/detokenize"): ({"tokens": [97]}, 200),
    ("GET", "/tokenizer_info"): (None, 200),
    ("GET", "/v1/models"): (None, 200),
    ("GET", "/v1/models/{name}"): (None, 404),
    ("GET", "/v1/cache"): (None, 200),
    ("DELETE", "/v1/cache"): (None, 200),
    ("GET", "/health"): (None, 200),
    ("GET", "/ready"): (None, 200),
    ("GET", "/metrics"): (None, 200),
}
ENCODER: dict[tuple[str, str], tuple[Any, int]] = {
    **{key: call for key, call in DECODER.items() if key[1] != "/tokenizer_info"},
    ("POST", "/v1/chat/completions"): (CHAT, 501),
    ("POST", "/v1/completions"): ({"prompt": "a"}, 501),
    ("POST", "/v1/embeddings"): ({"model": "small", "input": "a"}, 200),
    ("POST", "/detokenize"): ({"tokens": [7]}, 200),
    ("GET", "/v1/cache"): (None, 501),
    ("DELETE", "/v1/cache"): (None, 501),
}
CASES = [("decoder", *key) for key in DECODER] + [("encoder", *key) for key in ENCODER]


@pytest.fixture(scope="module")
def servers(server, tmp_path_factory) -> Iterator[dict[str, Running]]:
    encoder = encoder_server.start(tmp_path_factory.mktemp("encoder"))
    yield {"decoder": server, "encoder": encoder}
    encoder.close()


def described(server: Running) -> Any:
    return schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())


@pytest.mark.parametrize(("kind", "operations"), [("decoder", DECODER), ("encoder", ENCODER)])
def test_every_operation_is_among_those_that_are_tried(servers, kind, operations):
    paths = servers[kind].http.get("/openapi.json").json()["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == set(
        operations
    )


@pytest.mark.parametrize(("kind", "method", "path"), CASES)
def test_no_call_is_answered_with_a_500(servers, kind, method, path):
    server = servers[kind]
    body, status = (DECODER if kind == "decoder" else ENCODER)[method, path]
    assert server.http.request(method, path, json=body).status_code == status

    @settings(
        max_examples=15 if method == "POST" else 4,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=described(server)[path][method].as_strategy())
    def check(case) -> None:
        response = case.call(base_url=server.url, timeout=20)
        assert response.status_code < 500 or response.status_code == 501, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
    if kind == "decoder":
        until(server.is_idle)
