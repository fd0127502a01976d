"""A server that is killed, and the one after it: the next turn comes from disk."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
from tiny_checkpoint import write_tiny_model

from octavo import LLM, SamplingParams
from octavo.bench.serve_client import ServerProcess
from octavo.cli.app import exit_code

OPTIONS = ("--threads=1", "--kv-cache-memory=8MiB", "--topk-planes")


def say(server: ServerProcess, messages: list[dict[str, str]], **fields) -> dict:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "logprobs": True, **fields}
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    answer = httpx.post(url, json=body | {"ignore_eos": True}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scored(answer: dict) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


def from_disk(answer: dict) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    assert 0 <= details["disk_cached_tokens"] <= details["cached_tokens"]
    return details["disk_cached_tokens"]


def test_after_kill_9_the_next_turn_is_read_from_disk_dense_and_top_k(tmp_path: Path, capsys):
    write_tiny_model(tmp_path / "model")
    model, folder = str(tmp_path / "model"), tmp_path / "cache"
    options = (*OPTIONS, f"--cache-dir={folder}", "--cache-disk=64MiB")
    kinds = [{}, {"attn_topk": 8}]
    dialogues = [[{"role": "user", "content": f"{kind} " + "Tell me of the whale. " * 20}] for kind in kinds]
    with ServerProcess(model, options) as server:
        for dialogue, kind in zip(dialogues, kinds, strict=True):
            reply = say(server, dialogue, **kind)
            assert from_disk(reply) == 0
            dialogue.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
            dialogue.append({"role": "user", "content": "And then?"})
        assert exit_code(["cache", "stats", str(folder)]) == 1
        owner = f"is in use by process {server.process.pid}: one process at a time may have it"
        assert owner in capsys.readouterr().err
        time.sleep(1.0)
        server.kill()
    with ServerProcess(model, options) as server:
        warm = [say(server, dialogue, **kind) for dialogue, kind in zip(dialogues, kinds, strict=True)]
        again = say(server, dialogues[0])
        metrics = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
        assert "blocks on disk in" in server.said()
    cold = LLM(model, num_threads=1, num_blocks=256, topk_planes=True)
    for answer, dialogue, kind in zip(warm, dialogues, kinds, strict=True):
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True, **kind)
        (choice,) = cold.chat(dialogue, params)[0].outputs
        expected = [
            entries[token].logprob for token, entries in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
        assert scored(answer) == expected
        assert answer["choices"][0]["message"]["content"] == choice.text
    for answer in warm:
        assert from_disk(answer) > 400
        assert from_disk(answer) == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert from_disk(again) == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 400
    total = sum(map(from_disk, warm))
    assert f'octavo:disk_hits_total{{model_name="model"}} {total:.1f}' in metrics
    assert 'octavo:disk_blocks_damaged_total{model_name="model"} 0.0' in metrics
