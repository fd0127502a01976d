"""The soak in 20 seconds on a tiny model, and that it finds what it is there to find."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from http_server import Script
from tiny_checkpoint import write_tiny_model

from octavo.bench import soak

SAID = ["How are you?", "Fine, thank you, and you?", "Fine too", "Good to hear"]
OPTIONS = ("--kv-cache-memory=1MiB", "--max-num-seqs=8", "--max-queue=6", "--step-ms=20", "--threads=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-model"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("".join(json.dumps([f"{text} {i}" for text in SAID]) + "\n" for i in range(20)))
    return path


def settings(folder: Path, data: Path, seconds: float) -> soak.Settings:
    return soak.Settings(
        model=str(folder),
        data=data,
        minutes=seconds / 60,
        num_clients=20,
        max_tokens=24,
        system_words=40,
        options=OPTIONS,
        restart_limit_s=30,  # of a machine that other tests share
    )


@pytest.mark.slow
def test_nothing_is_left_of_mixed_traffic(folder, data):
    result = soak.run(settings(folder, data, 4), report=print)
    assert result["faults"] == []
    assert result["passed"]
    calls = Counter(result["calls"])
    assert all(calls[kind] for kind in ("answered", "hung up", "rubbish", "told 429")), calls
    assert result["answers_compared"] > 10
    assert result["pool_at_rest"]["used"] == 0


def test_the_soak_finds_a_block_in_use_and_a_wrong_answer(folder, make_server, monkeypatch):
    traffic = soak.Traffic()
    server = make_server(model=Script("x" * 900, 5, delay=0.01), num_blocks=256)
    port = int(server.url.rpartition(":")[2])
    monkeypatch.setattr(soak, "IDLE_LIMIT_S", 0.1)

    async def look_while_one_runs() -> None:
        running = asyncio.ensure_future(
            soak.call(port, "POST", soak.COMPLETE, {"prompt": "hello", "stream": True})
        )
        while not (await soak._look(port))["blocks"]["used"]:
            await asyncio.sleep(0.01)
        await soak._rest(port, traffic)
        running.cancel()

    asyncio.run(look_while_one_runs())
    assert any("blocks are in use" in fault for fault in traffic.faults)
    assert any("sequences_open" in fault for fault in traffic.faults)
    traffic = soak.Traffic(asked=[soak.Asked("x", 4, "surely not this", "length")])
    soak._compare(str(folder), traffic, print)
    assert len(traffic.faults) == 1
