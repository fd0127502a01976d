"""The server under a pool that holds a quarter of the live history: nothing fails, and no bit changes.

Conversations are scripted, so that each turn is a known request: a server with room for all of them answers
each once. Then another one, with a small pool, is asked turns at random, a few at a time, for a given time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.history import Message, ask, dialogues, scored, send
from octavo.bench.serve_client import ServerProcess, call
from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine import resources
from octavo.tokenizer import Tokenizer

#: The part of the live history that the pool holds.
SHARE = 0.25
LARGE = "2GiB"
#: Of the server's metrics: that the pool was indeed too small.
COUNTED = {
    "preemptions": "vllm:num_preemptions_total",
    "evictions": "octavo:evictions_total",
    "prompt_tokens": "vllm:prefix_cache_queries_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``conversations`` of ``tokens`` tokens, ``clients`` at a time; each has ``turns`` known turns, the last
    with its whole history. ``options`` are the server's; ``history`` and ``kv_dtype`` become some too."""

    model: str
    minutes: float = 20.0
    conversations: int = 16
    tokens: int = 2048
    turns: int = 3
    clients: int = 4
    seed: int = 0
    options: tuple[str, ...] = ()
    history: str = "exact"
    kv_dtype: str = "float32"


@dataclass(slots=True)
class _Load:
    answers: int = 0
    counted: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def small_pool(settings: Settings, config: ModelConfig) -> int:
    """Bytes of the pool that holds ``SHARE`` of the conversations, as the engine itself divides it."""
    wanted = EngineConfig(
        model=settings.model,
        cache=CacheConfig(history=settings.history, kv_dtype=settings.kv_dtype, kv_cache_memory=LARGE),
        scheduler=SchedulerConfig(max_model_len=settings.tokens),
    )
    large = resources.parse_size(LARGE)
    resolved, _ = resources.resolve(wanted, config, 2 * large)
    each = large / resources.num_sequences(resolved, settings.tokens)
    return int(SHARE * settings.conversations * each)


def run(
    settings: Settings,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    config: ModelConfig,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """What was asked and what came of it; ``faults`` has a sentence for each answer that is not right."""
    lengths = [settings.tokens - 256] * settings.conversations
    chats = dialogues(texts, tokenizer, lengths)
    asked = [turn for chat in chats for turn in _turns(chat.messages, settings.turns)]
    pool = small_pool(settings, config)
    options = (
        *settings.options,
        f"--kv-dtype={settings.kv_dtype}",
        f"--history={settings.history}",
        f"--history-tokens={settings.tokens}",
    )
    with ServerProcess(settings.model, (*options, f"--kv-cache-memory={LARGE}")) as server:
        expected = [scored(ask(server, messages)) for messages in asked]
    report(f"{len(expected)} answers with {LARGE}")
    load = _Load()
    with ServerProcess(settings.model, (*options, f"--kv-cache-memory={pool}")) as server:
        asyncio.run(_press(settings, server, asked, expected, load, report))
        if server.process.poll() is not None:
            load.faults.append(f"the server ended with {server.process.returncode}")
        if "Traceback" in server.said():
            load.faults.append("the server wrote a traceback")
    if not load.answers:
        load.faults.append("nothing was answered")
    return {
        "minutes": settings.minutes,
        "conversations": settings.conversations,
        "tokens": settings.tokens,
        "known_turns": len(asked),
        "clients": settings.clients,
        "history": settings.history,
        "kv_dtype": settings.kv_dtype,
        "pool_bytes": pool,
        "answers_compared": load.answers,
        **load.counted,
        "faults": load.faults,
    }


def _turns(messages: Sequence[Message], count: int) -> list[list[Message]]:
    """Beginnings of a conversation that end with the user, the last of them all of it."""
    asks = [i + 1 for i, message in enumerate(messages) if message["role"] == "user"]
    chosen = sorted({asks[-1 - i * len(asks) // (2 * count)] for i in range(count)})
    return [list(messages[:end]) for end in chosen]


async def _press(
    settings: Settings,
    server: ServerProcess,
    asked: Sequence[Sequence[Message]],
    expected: Sequence[list[tuple[str, float]]],
    load: _Load,
    report: Callable[[str], None],
) -> None:
    end = time.monotonic() + 60 * settings.minutes

    async def client(number: int) -> None:
        draw = random.Random(f"{settings.seed}/{number}")
        while time.monotonic() < end:
            which = draw.randrange(len(asked))
            try:
                reply = await send(server, asked[which])
            except (RuntimeError, OSError) as error:
                load.faults.append(f"turn {which}: {error}")
                return
            load.answers += 1
            if scored(reply) != expected[which]:
                load.faults.append(f"turn {which} is not answered as with a large pool")
            if load.answers % 50 == 0:
                report(f"{load.answers} answers compared, {len(load.faults)} faults")

    await asyncio.gather(*(client(number) for number in range(settings.clients)))
    if server.process.poll() is None:
        said = (await call(server.port, "GET", "/metrics")).body.decode()
        load.counted = {name: _counter(said, metric) for name, metric in COUNTED.items()}


def _counter(metrics: str, name: str) -> int:
    """The value of a counter in Prometheus' text."""
    (line,) = (line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return int(float(line.rpartition(" ")[2]))
