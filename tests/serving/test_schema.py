"""Random calls made from our own OpenAPI description: whatever comes, no fault of ours and no hang."""

from __future__ import annotations

import pytest
from http_server import until
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

MESSAGES = [{"role": "user", "content": "a"}]
#: A plain call of each address and the status that it must have: random ones may all be refused.
PLAIN = {
    "/v1/chat/completions": (
        {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        200,
    ),
    "/v1/completions": ({"model": "tiny", "prompt": "a", "max_tokens": 1}, 200),
    "/v1/embeddings": ({"model": "tiny", "input": "a"}, 501),
    "/tokenize": ({"prompt": "a"}, 200),
    "/detokenize": ({"tokens": [97]}, 200),
}


@pytest.mark.parametrize("path", PLAIN)
def test_no_call_is_answered_with_a_500(server, path):
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    operation = schema[path]["POST"]
    strategy = operation.as_strategy()
    body, status = PLAIN[path]
    assert server.http.post(path, json=body).status_code == status

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=strategy)
    def check(case) -> None:
        response = case.call(base_url=server.url, timeout=20)
        assert response.status_code < 500 or response.status_code == 501, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
    until(server.is_idle)
