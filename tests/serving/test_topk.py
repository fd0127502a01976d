"""A server whose engine runs top-k attention: what the usage of an answer says of it, whole and streamed."""

from __future__ import annotations

from http_server import CHAT, Running, chunks_of, parsed

ASK = {"messages": [{"role": "user", "content": "a tale of whales " * 12}], "max_tokens": 3, "temperature": 0}


def test_usage_tells_what_was_kept_and_when_asked_what_was_read(topk_server: Running) -> None:
    plain = topk_server.post(CHAT, ASK).json()
    asked = topk_server.post(CHAT, ASK | {"attn_explain": True}).json()
    assert asked["choices"][0]["message"] == plain["choices"][0]["message"]
    assert "attn_reads" not in plain["usage"]
    assert plain["usage"]["attn_topk"]["attn_topk"] == 32
    assert 0 < plain["usage"]["attn_topk"]["kept_keys"] < plain["usage"]["attn_topk"]["visible_keys"]
    (reads,) = asked["usage"]["attn_reads"]
    spans = -(-(asked["usage"]["total_tokens"] - 1) // reads["span"])
    assert [len(layer) for layer in reads["share"]] == [spans, spans]
    stream = ASK | {"attn_explain": True, "stream": True, "stream_options": {"include_usage": True}}
    last = parsed(chunks_of(topk_server, CHAT, stream))[-1]
    assert last["usage"]["attn_reads"] == [reads]


def test_a_dense_request_has_nothing_of_it(topk_server: Running) -> None:
    usage = topk_server.post(CHAT, ASK | {"attn_explain": True, "attn_topk": 0}).json()["usage"]
    assert not {"attn_topk", "attn_reads"} & usage.keys()
    topk_server.refused(CHAT, ASK | {"attn_explain": 1}, 400, "attn_explain")
