"""Rows of the cases for admission (S), the prefix cache (P), sampling (A) and text (T), over HTTP."""

from __future__ import annotations

import json
import math
import threading

import pytest
import torch
from http_server import CHAT, COMPLETE, Script, chunks_of, engine_fixtures, of, parsed, until

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
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 999999}, ["temperature", "100", "999999"]),
        ({"top_p": -1}, ["top_p", "0", "1", "-1"]),
        ({"logprobs": 10**6}, ["logprobs", "100", "1000000"]),
    ],
)
def test_a01_a04_an_absurd_value_is_told_its_range(server, fields, words):
    server.refused(COMPLETE, {"prompt": "x", **fields}, 400, *words)


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


class OnlyTwo(engine_fixtures.TinyModel):
    """Gives minus infinity to all tokens but two."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def logits(self, hidden, rows):
        out = torch.full((len(rows), engine_fixtures.HEAD_WIDTH), -math.inf)
        for place, token in enumerate(self.tokens):
            out[:, token] = -float(place)
        return out


def test_a05_log_probabilities_are_finite_json(make_server, server):
    two = server.post("/tokenize", {"prompt": "ab"}).json()["tokens"]
    own = make_server(model=OnlyTwo(*two), num_blocks=64)
    body = {"max_tokens": 3, "logprobs": 100, "temperature": 0, "ignore_eos": True}
    response = own.post(COMPLETE, {"prompt": "x", **body})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    answer = json.loads(response.text, parse_constant=refuse)
    (choice,) = answer["choices"]
    assert choice["text"] == "aaa"
    for best in choice["logprobs"]["top_logprobs"]:
        assert best["a"] == pytest.approx(-math.log1p(math.exp(-1)))
        assert len(best) > 2
        assert all(-1e5 < value <= 0 for value in best.values())


def test_a06_ids_past_the_tokenizer_are_never_sampled(server):
    body = {"max_tokens": 200, "temperature": 100.0, "seed": 3, "ignore_eos": True, "n": 2}
    answer = server.complete("wide", **body, return_token_ids=True)
    ids = [token for choice in answer["choices"] for token in choice["token_ids"]]
    assert len(ids) == 400
    # The head has five more; at this temperature each would come with one part in 264.
    assert max(ids) < engine_fixtures.VOCAB < engine_fixtures.HEAD_WIDTH


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
    assert one["usage"]["prompt_tokens"] == 7


def test_a11_choices_share_the_blocks_of_their_prompt(make_server):
    server = make_server(model=Script("y" * 200, 14, delay=0.01), num_blocks=256)
    body = {"prompt": "fourteen bytes", "n": 4, "stream": True}
    with server.http.stream("POST", COMPLETE, json=body) as response:
        lines = response.iter_lines()  # kept: its end would close the connection
        next(lines)
        until(lambda: server.stats.num_running == 4)
        view = server.http.get("/v1/cache").json()
    # Three whole blocks of four tokens, in the tables of all; what follows is each one's own.
    assert sorted(view["refs"], reverse=True)[:4] == [4, 4, 4, 1]
    assert view["tokens"]["computed"] < 2 * 14 + view["tokens"]["generated"]
    until(server.is_idle)


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
