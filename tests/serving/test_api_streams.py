"""Log-probabilities, several prompts, many streams, and the end of a server's life, over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import pytest
from http_server import CHAT, COMPLETE, Script, chunks_of, engine_fixtures, events, of, parsed, until

from octavo.bench.serve_client import Reply, call
from octavo.request import SamplingParams


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


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_token_ids_in_a_stream_equal_the_whole(server, path):
    """vLLM's ``return_token_ids``."""
    body = {"max_tokens": 7, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"messages": of("ids")} if path == CHAT else {"prompt": "ids"}
    whole = server.post(path, body).json()
    prompt = (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"]
    kind = {"messages": of("ids")} if path == CHAT else {"prompt": "ids"}
    assert prompt == server.post("/tokenize", kind).json()["tokens"]
    assert len(whole["choices"][0]["token_ids"]) == 7
    chunks = parsed(chunks_of(server, path, body))
    found = [token for c in chunks for token in c["choices"][0].get("token_ids", [])]
    assert found == whole["choices"][0]["token_ids"]
    places = [c if path == CHAT else c["choices"][0] for c in chunks]
    assert [p["prompt_token_ids"] for p in places if p.get("prompt_token_ids")] == [prompt]
    del body["return_token_ids"]
    assert "token_ids" not in server.post(path, body).text


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


def test_200_streams_at_once_lose_nothing(make_server):
    """Each client gets every event of its own answer, and nothing of another's."""
    server = make_server(num_blocks=2048, max_num_seqs=64, budget=256)
    engine, gate = server.server.engine, threading.Event()
    bodies = [
        {"prompt": f"client {i}", "max_tokens": 12 + i % 7, "temperature": 0, "ignore_eos": True}
        for i in range(200)
    ]

    async def ask() -> list[Reply]:
        port = int(server.url.rpartition(":")[2])
        # The engine stands until all are there.
        hold = engine.call(lambda _: gate.wait(30))
        asyncio.run_coroutine_threadsafe(hold, server.server._loop)
        calls = [
            asyncio.ensure_future(call(port, "POST", COMPLETE, body | {"stream": True})) for body in bodies
        ]
        while engine.num_open < len(bodies):
            await asyncio.sleep(0.01)
        gate.set()
        return await asyncio.gather(*calls)

    replies = asyncio.run(ask())
    encode = server.parts.engine.tokenizer.encode
    jobs = [
        (
            encode(body["prompt"]),
            SamplingParams(temperature=0.0, max_tokens=body["max_tokens"], ignore_eos=True),
        )
        for body in bodies
    ]
    alone = engine_fixtures.Tiny(server.parts.engine.tokenizer, num_blocks=2048).run(*jobs)
    for want, reply in zip(alone, replies, strict=True):
        assert reply.done
        assert reply.text() == want.outputs[0].text
        assert reply.chunks()[-1]["choices"][0]["finish_reason"] == "length"
    until(server.is_idle)
    server.parts.scheduler.check_invariants()
