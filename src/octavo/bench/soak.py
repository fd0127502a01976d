"""Mixed traffic for a long time, clients that hang up and clients that send rubbish; then what is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.machine import machine, versions
from octavo.bench.serve_client import Reply, ServerProcess, call
from octavo.bench.serve_load import Chat, read_chats, system_prompt

if TYPE_CHECKING:
    from octavo.request import RequestOutput

HANG_UP, RUBBISH = 0.2, 0.05
MOST_GROWTH = 0.05
RESTART_LIMIT_S = 5.0
#: Seconds in which everything must have come to rest.
IDLE_LIMIT_S = 60.0

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
_BODIES = (
    b"",
    b"{",
    b"[1, 2",
    b"null",
    b"\xff\xfe\x00",
    b'{"prompt": 5}',
    b'{"messages": "x", "prompt": "x"}',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "nope": 1}',
    b'{"prompt": [999999999]}',
    b'{"prompt": "x", "temperature": "hot"}',
    b'{"messages": [{"role": 1}]}',
    b"[" * 100_000,
    b'{"prompt": "' + b"x" * 10_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``num_clients`` should be more than the server runs and queues, so that some are told 429."""

    model: str
    data: Path
    minutes: float
    num_clients: int = 24
    max_tokens: int = 48
    system_words: int = 120
    seed: int = 0
    restart_limit_s: float = RESTART_LIMIT_S
    options: tuple[str, ...] = (
        "--kv-cache-memory=256MiB",
        "--max-num-seqs=12",
        "--max-queue=8",
        "--step-ms=100",
    )


@dataclass(slots=True)
class Asked:
    """A request at temperature 0 that came to its end; ``prompt`` is text or messages."""

    prompt: Any
    max_tokens: int
    text: str
    finish_reason: str


@dataclass(slots=True)
class Traffic:
    """What the clients saw. ``faults`` are sentences; there should be none."""

    counts: Counter[str] = field(default_factory=Counter)
    asked: list[Asked] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def run(settings: Settings, report: Callable[[str], None]) -> dict[str, Any]:
    """The soak and its verdict: ``passed``, and a sentence in ``faults`` for each law that was broken."""
    chats = read_chats(settings.data, max_turns=4)
    traffic = Traffic()
    options = list(settings.options)
    with ServerProcess(settings.model, options) as server:
        first_start = server.start_s
        asyncio.run(_fill_the_pool(server.port, chats))
        before = server.resident_bytes()
        asyncio.run(_traffic(server.port, settings, chats, traffic))
        pool = asyncio.run(_rest(server.port, traffic))
        after = server.resident_bytes()
        if server.process.poll() is not None:
            traffic.faults.append(f"the server ended with {server.process.returncode}")
        if "Traceback" in server.said():
            traffic.faults.append("the server wrote a traceback")
        server.kill()
    with ServerProcess(settings.model, options) as again:
        restart_s, restart_cpu_s = again.start_s, again.start_cpu_s
        asyncio.run(_answers(again.port, traffic))
    report(f"{sum(traffic.counts.values())} calls: {dict(traffic.counts)}")
    _compare(settings.model, traffic, report)
    growth = after / before - 1
    if growth > MOST_GROWTH:
        traffic.faults.append(f"resident memory grew by {growth:.1%}, more than {MOST_GROWTH:.0%}")
    if restart_s > settings.restart_limit_s:
        traffic.faults.append(f"the restart took {restart_s:.1f} s, more than {settings.restart_limit_s:g}")
    return {
        "model": settings.model,
        "machine": machine(),
        "versions": versions(),
        "minutes": settings.minutes,
        "clients": settings.num_clients,
        "server_options": options,
        "calls": dict(traffic.counts),
        "answers_compared": len(traffic.asked),
        "pool_at_rest": pool,
        "resident_bytes": [before, after],
        "resident_growth": round(growth, 4),
        "start_s": round(first_start, 2),
        "restart_s": round(restart_s, 2),
        # What the neighbours do not change much.
        "restart_cpu_s": round(restart_cpu_s, 2),
        "faults": traffic.faults,
        "passed": not traffic.faults,
    }


async def _fill_the_pool(port: int, chats: Sequence[Chat]) -> None:
    """Prompts that share nothing, until every block was written: its pages come from the system only then."""
    number = 0
    while (await _look(port))["blocks"]["free"] and number < 500:
        bodies = [_body(system_prompt(chats, 0.0, -1 - i), 4, 0.0) for i in range(number, number + 8)]
        await asyncio.gather(*(call(port, "POST", COMPLETE, body) for body in bodies))
        number += 8


async def _look(port: int) -> dict[str, Any]:
    found: dict[str, Any] = (await call(port, "GET", "/v1/cache")).json()
    return found


def _body(prompt: Any, max_tokens: int, temperature: float, **more: Any) -> dict[str, Any]:
    where = "prompt" if isinstance(prompt, str) else "messages"
    return {where: prompt, "max_tokens": max_tokens, "temperature": temperature, **more}


async def _traffic(port: int, settings: Settings, chats: Sequence[Chat], traffic: Traffic) -> None:
    end = time.monotonic() + 60 * settings.minutes

    async def client(number: int) -> None:
        draw = random.Random(f"{settings.seed}/{number}")
        while time.monotonic() < end:
            if draw.random() < RUBBISH:
                await _send_rubbish(port, draw, traffic)
            else:
                await _ask(port, settings, chats, draw, traffic)

    await asyncio.gather(*(client(number) for number in range(settings.num_clients)))


async def _send_rubbish(port: int, draw: random.Random, traffic: Traffic) -> None:
    path, raw = draw.choice((COMPLETE, CHAT, "/tokenize", "/v1/embeddings")), draw.choice(_BODIES)
    reply = await call(port, "POST", path, raw=raw)
    traffic.counts["rubbish"] += 1
    if not 400 <= reply.status < 500 or set(reply.json()) != {"error"}:
        traffic.faults.append(f"{raw[:40]!r} to {path} was answered with {reply.status}")


async def _ask(
    port: int, settings: Settings, chats: Sequence[Chat], draw: random.Random, traffic: Traffic
) -> None:
    chat = draw.choice(chats)
    prompt: Any = system_prompt(
        chats, draw.choice((0.0, 0.5, 1.0)), draw.randrange(40), settings.system_words
    )
    path = COMPLETE
    if draw.random() < 0.5:
        path = CHAT
        prompt = [{"role": "system", "content": prompt}, {"role": "user", "content": chat.turns[0][0]}]
    temperature, streamed = draw.choice((0.0, 0.0, 1.0)), draw.random() < 0.7
    max_tokens = draw.randint(1, settings.max_tokens)
    body = _body(prompt, max_tokens, temperature, stream=streamed)
    if draw.random() < HANG_UP:
        await _hang_up(port, path, body, draw, traffic)
        return
    reply = await call(port, "POST", path, body)
    if reply.status == 429:
        traffic.counts["told 429"] += 1
        await asyncio.sleep(draw.uniform(0.2, 1.0))  # about what Retry-After says
        return
    if reply.status != 200 or (streamed and not reply.done):
        traffic.faults.append(f"a good call to {path} was answered with {reply.status}: {reply.body[:200]!r}")
        return
    traffic.counts["answered"] += 1
    if temperature == 0:
        text, reason = (reply.text(), _reason(reply.chunks())) if streamed else _whole(reply)
        traffic.asked.append(Asked(prompt, max_tokens, text, reason))


async def _hang_up(port: int, path: str, body: dict[str, Any], draw: random.Random, traffic: Traffic) -> None:
    if body["stream"]:
        enough = draw.randint(1, 8)
        await call(port, "POST", path, body, until=lambda reply: len(reply.events) >= enough)
    else:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call(port, "POST", path, body), draw.uniform(0.0, 0.5))
    traffic.counts["hung up"] += 1


def _reason(chunks: Sequence[dict[str, Any]]) -> str:
    found = [c["choices"][0]["finish_reason"] for c in chunks if c.get("choices")]
    return str(found[-1])


def _whole(reply: Reply) -> tuple[str, str]:
    (choice,) = reply.json()["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"]


async def _rest(port: int, traffic: Traffic) -> dict[str, Any]:
    """The pool when all has ended: nothing in use, nothing lost."""
    end = time.monotonic() + IDLE_LIMIT_S
    while True:
        look = await _look(port)
        busy = look["blocks"]["used"] or look["requests"]["running"] or look["requests"]["waiting"]
        if not busy or time.monotonic() > end:
            break
        await asyncio.sleep(0.1)
    blocks: dict[str, Any] = look["blocks"]
    if busy or any(look["refs"]) or look["tables"]:
        traffic.faults.append(f"at rest, blocks are in use: {blocks}, {look['requests']}")
    if sum(blocks.values()) != look["num_blocks"] or sum(look["cached"]) != blocks["cached"]:
        traffic.faults.append(f"blocks are lost: {blocks} of {look['num_blocks']}")
    metrics = (await call(port, "GET", "/metrics")).body.decode()
    (open_line,) = [line for line in metrics.splitlines() if line.startswith("octavo:sequences_open{")]
    if float(open_line.split()[-1]) != 0:
        traffic.faults.append(f"at rest, {open_line}")
    return blocks


async def _answers(port: int, traffic: Traffic) -> None:
    reply = await call(port, "POST", COMPLETE, _body("Hello", 4, 0.0))
    if reply.status != 200:
        traffic.faults.append(f"after the restart a call was answered with {reply.status}")


def _compare(model: str, traffic: Traffic, report: Callable[[str], None]) -> None:
    """Every answer at temperature 0 with what the offline engine gives to the same prompt, alone in its batch
    or not: that makes no difference."""
    from octavo.llm import LLM
    from octavo.request import SamplingParams

    llm = LLM(model, kv_cache_memory="1GiB")
    for kind, ask in ((str, llm.generate), (list, llm.chat)):
        asked = [one for one in traffic.asked if isinstance(one.prompt, kind)]
        params = [SamplingParams(temperature=0, max_tokens=one.max_tokens) for one in asked]
        outputs: Sequence[RequestOutput] = ask([one.prompt for one in asked], params) if asked else []
        for one, output in zip(asked, outputs, strict=True):
            choice = output.outputs[0]
            if (choice.text, choice.finish_reason) != (one.text, one.finish_reason):
                traffic.faults.append(
                    f"an answer differs from the offline engine's: {one.text[:60]!r} ({one.finish_reason}), "
                    f"{choice.text[:60]!r} ({choice.finish_reason})"
                )
    report(f"{len(traffic.asked)} answers compared with the offline engine's")
