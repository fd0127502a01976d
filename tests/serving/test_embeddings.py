"""``/v1/embeddings`` over a small encoder: the offline engine's vectors, whatever the form of the call."""

from __future__ import annotations

import base64
import struct
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from encoder_checkpoint import TEXTS
from encoder_server import start
from http_server import CHAT, COMPLETE, Running, until

from octavo.engine.encoder import BATCH_TOKENS

EMBED = "/v1/embeddings"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start(tmp_path_factory.mktemp("encoder"))
    yield running
    running.close()


def vectors(server: Running, given: Any, **fields: Any) -> torch.Tensor:
    response = server.post(EMBED, {"input": given, **fields})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["object"] == "list"
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return torch.tensor([item["embedding"] for item in answer["data"]])


def test_vectors_are_those_of_the_offline_engine(server):
    want = server.parts.engine.embed(TEXTS)
    torch.testing.assert_close(vectors(server, TEXTS), want, atol=1e-6, rtol=0)
    for text, row in zip(TEXTS, want, strict=True):
        torch.testing.assert_close(vectors(server, text)[0], row, atol=1e-5, rtol=0)


def test_h05_base64_and_token_ids(server):
    plain = vectors(server, TEXTS)
    response = server.post(EMBED, {"input": TEXTS, "encoding_format": "base64"})
    for item, row in zip(response.json()["data"], plain, strict=True):
        numbers = struct.unpack("<32f", base64.b64decode(item["embedding"]))
        assert list(numbers) == row.tolist()
    # The ids of /tokenize stand for their text.
    ids = [server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]
    torch.testing.assert_close(vectors(server, ids), plain, atol=1e-6, rtol=0)
    torch.testing.assert_close(vectors(server, ids[0])[0], plain[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(vectors(server, [ids[1], TEXTS[0]]), plain[[1, 0]], atol=1e-5, rtol=0)
    detokenized = server.post("/detokenize", {"tokens": ids[0], "skip_special_tokens": True}).json()
    assert detokenized["prompt"] == TEXTS[0]


def test_usage_counts_the_models_own_tokens(server):
    answer = server.post(EMBED, {"input": ["the cat sat", "why"], "model": "small"}).json()
    assert answer["model"] == "small"
    assert answer["usage"] == {"prompt_tokens": 5 + 3, "total_tokens": 8}


def test_openais_client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        # Without encoding_format it asks for base64 and decodes that itself.
        answer = client.embeddings.create(model="small", input=TEXTS)
        plain = client.embeddings.create(model="small", input=TEXTS, encoding_format="float")
        for packed, item in zip(answer.data, plain.data, strict=True):
            assert packed.embedding == pytest.approx(item.embedding, abs=1e-7)
        assert answer.usage.total_tokens == plain.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="small", input="why", dimensions=8)
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.embeddings.create(model="other", input="why")
        with pytest.raises(openai.APIStatusError, match="encoder"):
            client.chat.completions.create(model="small", messages=[{"role": "user", "content": "a"}])


def test_a_text_that_is_too_long_is_refused_or_cut(server):
    long = "cat " * 30
    server.refused(EMBED, {"input": ["why", long]}, 400, "text 1", "32 tokens", "takes 24")
    server.refused(EMBED, {"input": [5] * 25}, 400, "25 tokens", "takes 24")
    server.refused(EMBED, {"input": [5] * 25, "truncate": True}, 400, "25 tokens")
    cut = vectors(server, long, truncate=True)
    torch.testing.assert_close(cut, vectors(server, "cat " * 22), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": []}, ["input is an empty list"]),
        ({"input": [[]]}, ["the list of token ids is empty"]),
        ({"input": ["a", 1]}, ["input[1] must be text or a list"]),
        ({"input": [1, "a"]}, ["input[0] must be text or a list"]),
        ({"input": [[1], [2.5]]}, ["input[1] must be text or a list"]),
        ({"input": [-1]}, ["a whole number from 0"]),
        ({"input": [40]}, ["token 40 is not one of the model's 40"]),
        ({"input": ["a"] * 2049}, ["2049 inputs", "2048"]),
        ({"input": 3}, ["input"]),
        ({}, ["input is required"]),
        ({"input": "a", "encoding_format": "int8"}, ["float", "base64", "int8"]),
        ({"input": "a", "n": 2}, ["'n' is not a parameter"]),
        ({"input": "cat " * 10_000}, ["more than any 24 tokens"]),
    ],
)
def test_bad_input_gets_one_sentence(server, fields, words):
    server.refused(EMBED, fields, 400, *words)


def test_half_a_character_is_no_text(server):
    headers = {"Content-Type": "application/json"}
    response = server.http.post(EMBED, content=b'{"input": "\\ud800"}', headers=headers)
    assert response.status_code == 400


def test_what_an_encoder_cannot_do_is_one_sentence(server):
    messages = [{"role": "user", "content": "a"}]
    server.refused(CHAT, {"messages": messages}, 501, "small is an encoder", EMBED)
    server.refused(COMPLETE, {"prompt": "a"}, 501, "small is an encoder", EMBED)
    server.refused("/tokenize", {"messages": messages}, 400, "encoder")
    for method, path in (("GET", "/"), ("GET", "/v1/cache"), ("DELETE", "/v1/cache")):
        response = server.http.request(method, path)
        assert response.status_code == 501, path
        assert "small is an encoder" in response.json()["error"]["message"]


def test_many_texts_go_through_the_model_in_passes(server):
    texts = [TEXTS[i % len(TEXTS)] for i in range(1500)]
    tokens = sum(len(item.ids) for item in server.parts.engine.encode(texts))
    assert tokens > 2 * BATCH_TOKENS
    want = server.parts.engine.embed(TEXTS)
    got = vectors(server, texts)
    for i, row in enumerate(got):
        assert (row - want[i % len(TEXTS)]).abs().max() < 1e-5


def test_metrics_count_tokens(server):
    def count() -> float:
        text = server.http.get("/metrics").text
        (line,) = [li for li in text.splitlines() if li.startswith("octavo:prompt_tokens_total{")]
        return float(line.split()[-1])

    before = count()
    vectors(server, ["the cat sat", "why"])
    assert count() - before == 8
    assert "/v1/embeddings" in server.http.get("/openapi.json").json()["paths"]
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200


def test_the_queue_has_an_end_and_a_drained_server_refuses(tmp_path):
    server = start(tmp_path, max_queue=0, drain_timeout=10)
    engine = server.parts.engine
    inside, go = threading.Event(), threading.Event()
    embed = engine.embed_encoded

    def slow(items):
        inside.set()
        go.wait(10)
        return embed(items)

    engine.embed_encoded = slow
    got: list[httpx.Response] = []
    caller = threading.Thread(target=lambda: got.append(server.post(EMBED, {"input": "why"})))
    caller.start()
    assert inside.wait(10)
    refused = server.post(EMBED, {"input": "why"})
    assert refused.status_code == 429
    assert refused.headers["Retry-After"]
    server.server.begin_end()
    until(lambda: server.server.engine.draining)
    assert server.post(EMBED, {"input": "why"}).status_code == 503
    go.set()
    caller.join(10)
    assert got[0].status_code == 200  # what was under way is answered
    server.close()


def test_a_client_that_hangs_up_begins_no_further_pass(tmp_path):
    server = start(tmp_path)
    engine = server.parts.engine
    inside, go = threading.Event(), threading.Event()
    passes = []
    embed = engine.embed_encoded

    def slow(items):
        passes.append(len(items))
        inside.set()
        go.wait(10)
        return embed(items)

    engine.embed_encoded = slow
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(EMBED, json={"input": [TEXTS[3]] * 2000}, timeout=2.0)
    assert inside.is_set()
    until(lambda: server.server.engine.num_open == 0)
    go.set()
    assert vectors(server, "why").shape == (1, 32)
    assert len(passes) == 2
    server.close()
