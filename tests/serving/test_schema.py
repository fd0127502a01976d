"""Random calls made from our own OpenAPI description: whatever comes, no fault of ours and no hang."""

from __future__ import annotations

import pytest
from http_server import until
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
def test_no_call_is_answered_with_a_500(server, path):
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    operation = schema[path]["POST"]
    statuses: set[int] = set()

    strategy = operation.as_strategy()

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=strategy)
    def check(case) -> None:
        response = case.call(base_url=server.url, timeout=20)
        statuses.add(response.status_code)
        assert response.status_code < 500 or response.status_code == 501, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
    assert statuses - {400}, "every call was refused: the description and the server differ"
    until(server.is_idle)
