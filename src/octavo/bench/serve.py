"""What people behind HTTP get: times to the first token, gaps between tokens, and how much at once."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.bench.machine import machine, versions
from octavo.bench.serve_client import Reply, ServerProcess, call
from octavo.bench.serve_load import Chat, Load, arriving, at_once, read_chats

#: A turn is good when its first token came within so many seconds, and its tokens with such a mean gap.
FIRST_TOKEN_LIMIT_S, GAP_LIMIT_S = 2.0, 0.15
HTTP_STREAMS, HTTP_PROMPT, HTTP_TOKENS = 32, 64, 64
LONG_PROMPT, LONG_STREAMS = 4096, 16
#: Tokens that each stream has when the clock starts, and seconds of quiet before the long prompt comes.
LONG_WARM_TOKENS, LONG_QUIET_S = 8, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``rates`` in chats a second, ``shares`` 0 to 1; ``sections`` are of ``SECTIONS``."""

    model: str
    data: Path
    seconds: float = 20.0
    rates: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    streams: tuple[int, ...] = (1, 4, 16, 64)
    shares: tuple[float, ...] = (0.0, 0.5, 0.9)
    step_ms: tuple[int, ...] = (0, 100, 200)
    repeats: int = 3
    max_turns: int = 6
    long_prompt: int = LONG_PROMPT
    quiet_s: float = LONG_QUIET_S
    sections: tuple[str, ...]
    options: tuple[str, ...] = ()


#: Fewer and smaller, for a quick look.
QUICK: dict[str, Any] = {
    "rates": (1.0, 4.0),
    "streams": (1, 4),
    "shares": (0.0, 0.9),
    "step_ms": (0, 20),
    "max_turns": 2,
    "long_prompt": 512,
}
SECTIONS = ("rates", "streams", "shares", "http", "long")


def check_sections(names: Sequence[str]) -> None:
    """Raises ValueError for a section that does not exist, and for none."""
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"{name!r:.60} is not a section; these are: {', '.join(SECTIONS)}")
    if not names:
        raise ValueError(f"name a section: {', '.join(SECTIONS)}")


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p95 and p99 in milliseconds, nearest rank; None without values."""
    ordered = sorted(values)
    return {
        f"p{p}": round(1000 * ordered[max(0, -(-len(ordered) * p // 100) - 1)], 2) if ordered else None
        for p in (50, 95, 99)
    }


def summary(replies: Sequence[Reply], seconds: float) -> dict[str, Any]:
    """What the turns of a scenario of ``seconds`` add up to; those that were cut off count as begun only."""
    ended = [reply for reply in replies if reply.done]
    times = {id(reply): reply.token_times() for reply in replies}
    first = [times[id(r)][0] - r.start for r in replies if times[id(r)]]
    gaps = [b - a for reply in replies for a, b in pairwise(times[id(reply)])]
    good = [
        reply
        for reply in ended
        if times[id(reply)]
        and times[id(reply)][0] - reply.start <= FIRST_TOKEN_LIMIT_S
        and _mean_gap(times[id(reply)]) <= GAP_LIMIT_S
    ]
    used = [reply.usage() for reply in ended]
    prompt = sum(u["prompt_tokens"] for u in used)
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in used)
    return {
        "seconds": round(seconds, 2),
        "turns_begun": len(replies),
        "turns_ended": len(ended),
        "refused": sum(reply.status not in (0, 200) for reply in replies),
        "time_to_first_token_ms": percentiles(first),
        "inter_token_ms": percentiles(gaps),
        # An event is a token, but for those that wait for the rest of a character.
        "output_tokens_per_s": round(sum(len(t) for t in times.values()) / seconds, 2),
        "turns_per_s": round(len(ended) / seconds, 3),
        "good_turns_per_s": round(len(good) / seconds, 3),
        "prompt_tokens": prompt,
        "cached_share": round(cached / prompt, 4) if prompt else None,
    }


def _mean_gap(times: Sequence[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def run(
    settings: Settings, report: Callable[[str], None], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Every section, one after the other; ``save`` gets the result so far after each row."""
    chats = read_chats(settings.data, settings.max_turns)
    result: dict[str, Any] = {
        "model": settings.model,
        "machine": machine(),
        "versions": versions(),
        "data": settings.data.name,
        "limits": {"first_token_s": FIRST_TOKEN_LIMIT_S, "mean_gap_s": GAP_LIMIT_S},
        "server_options": list(settings.options),
    }
    if "http" in settings.sections:
        result["http"] = _http(settings, chats, report)
        save(result)
    if "long" in settings.sections:
        result["long"] = []
        for step_ms in settings.step_ms:
            row = _long(settings, chats, step_ms)
            speed = row["prefill_tokens_per_s"]
            report(f"long prompt, --step-ms {step_ms}: gaps {row['during_ms']}, prefill {speed} tok/s")
            result["long"].append(row)
            save(result)
    loads = [name for name in ("rates", "streams", "shares") if name in settings.sections]
    if loads:
        with ServerProcess(settings.model, settings.options) as server:
            result["start_s"] = round(server.start_s, 2)
            for name in loads:
                result[name] = []
                for value in getattr(settings, name):
                    row = asyncio.run(_load(server.port, chats, name, value, settings.seconds))
                    speed = row["output_tokens_per_s"]
                    report(f"{name} {value:g}: {row['turns_ended']} turns, {speed} tok/s")
                    result[name].append(row)
                    save(result)
    return result


def read_earlier(path: Path) -> dict[str, Any]:
    """The result in ``path``; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def joined(earlier: dict[str, Any], result: dict[str, Any], command: str) -> dict[str, Any]:
    """``result`` and those sections of ``earlier`` that it has not, if they are of the same model, data and
    options. ``commands`` says how each section was measured."""
    commands = {name: command for name in SECTIONS if name in result}
    if any(earlier.get(name) != result[name] for name in ("model", "data", "server_options", "machine")):
        return {"commands": commands} | result
    kept = {name: earlier[name] for name in (*SECTIONS, "start_s") if name in earlier}
    return {"commands": earlier.get("commands", {}) | commands} | kept | result


async def _load(port: int, chats: Sequence[Chat], name: str, value: float, seconds: float) -> dict[str, Any]:
    await call(port, "DELETE", "/v1/cache")
    load = Load(port, chats, value if name == "shares" else 0.5)
    start = time.perf_counter()
    if name == "rates":
        await arriving(load, value, seconds)
    else:
        await at_once(load, int(value) if name == "streams" else 16, seconds)
    took = time.perf_counter() - start
    await _until_idle(port)
    return {name: value, "most_open": load.most_open, **summary(load.replies, took)}


async def _until_idle(port: int) -> None:
    while (await call(port, "GET", "/v1/cache")).json()["blocks"]["used"]:
        await asyncio.sleep(0.05)


# ---- what HTTP itself costs


def _http(settings: Settings, chats: Sequence[Chat], report: Callable[[str], None]) -> dict[str, Any]:
    """The same requests at once through the offline engine and through the server, in turns."""
    from octavo.llm import LLM
    from octavo.request import SamplingParams

    llm = LLM(settings.model)
    text = " ".join(ask for chat in chats for ask, _ in chat.turns)
    ids = llm.tokenizer.encode(text)
    need = HTTP_STREAMS * HTTP_PROMPT
    ids = (ids * (need // len(ids) + 1))[:need]
    prompts = [ids[i : i + HTTP_PROMPT] for i in range(0, need, HTTP_PROMPT)]
    params = SamplingParams(temperature=0, max_tokens=HTTP_TOKENS, ignore_eos=True)
    offline, online, texts, same = [], [], [], True
    loop_s = process_s = 0.0
    with ServerProcess(settings.model, settings.options) as server:
        for _ in range(settings.repeats):
            llm.engine.reset_prefix_cache()
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            offline.append(time.perf_counter() - start)
            texts = [output.outputs[0].text for output in outputs]
            before = server.cpu_seconds()
            replies, took = asyncio.run(_all_at_once(server.port, prompts))
            after = server.cpu_seconds()
            loop_s += after[0] - before[0]
            process_s += after[1] - before[1]
            online.append(took)
            same &= [reply.text() for reply in replies] == texts
    tokens = HTTP_STREAMS * HTTP_TOKENS
    ratios = [there / here - 1 for here, there in zip(offline, online, strict=True)]
    row = {
        "streams": HTTP_STREAMS,
        "prompt_tokens": HTTP_PROMPT,
        "new_tokens": HTTP_TOKENS,
        "offline_s": offline,
        "http_s": online,
        "offline_tokens_per_s": round(tokens / statistics.median(offline), 1),
        "http_tokens_per_s": round(tokens / statistics.median(online), 1),
        "cost": round(statistics.median(ratios), 4),
        # Of CPU time, which the neighbours change less than they change the clock's.
        "event_loop_us_per_token": round(1e6 * loop_s / (tokens * settings.repeats), 1),
        "event_loop_cpu_share": round(loop_s / process_s, 4),
        "same_answers": same,
    }
    report(
        f"HTTP at {HTTP_STREAMS} streams costs {row['cost']:.1%}, of CPU {row['event_loop_cpu_share']:.1%}"
    )
    return row


async def _all_at_once(port: int, prompts: Sequence[list[int]]) -> tuple[list[Reply], float]:
    await call(port, "DELETE", "/v1/cache")
    start = time.perf_counter()
    replies = await asyncio.gather(
        *(call(port, "POST", "/v1/completions", completion_body(prompt, HTTP_TOKENS)) for prompt in prompts)
    )
    return list(replies), time.perf_counter() - start


def completion_body(prompt: list[int] | str, num_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


# ---- a long prompt into running answers


def _long(settings: Settings, chats: Sequence[Chat], step_ms: int) -> dict[str, Any]:
    text = " ".join(ask for chat in chats for ask, _ in chat.turns)
    with ServerProcess(settings.model, [*settings.options, "--step-ms", str(step_ms)]) as server:
        return {"step_ms": step_ms, **asyncio.run(_long_prompt(server.port, text, settings))}


async def _long_prompt(port: int, text: str, settings: Settings) -> dict[str, Any]:
    length = settings.long_prompt
    found = (await call(port, "POST", "/tokenize", {"prompt": text})).json()
    ids = found["tokens"]
    need = length + max(length, LONG_STREAMS * HTTP_PROMPT)
    ids = (ids * (need // len(ids) + 1))[:need]
    room = found["max_model_len"] - HTTP_PROMPT
    alone = await _first_token(port, ids[:length])
    streams = [Reply(time.perf_counter()) for _ in range(LONG_STREAMS)]
    tasks = [
        asyncio.ensure_future(
            call(
                port,
                "POST",
                "/v1/completions",
                completion_body(ids[i * HTTP_PROMPT : (i + 1) * HTTP_PROMPT], min(room, 4000)),
                into=reply,
            )
        )
        for i, reply in enumerate(streams)
    ]
    try:
        while any(len(reply.events) < LONG_WARM_TOKENS for reply in streams):
            ended = next((task.result() for task in tasks if task.done()), None)
            if ended is not None:
                raise RuntimeError(f"a stream ended too early: {ended.status} {ended.body[:200]!r}")
            await asyncio.sleep(0.01)
        quiet = time.perf_counter()
        await asyncio.sleep(settings.quiet_s)
        came = time.perf_counter()
        took = await _first_token(port, ids[-length:])
        assert not any(reply.done for reply in streams), "a stream ended too early"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    before = _gaps(streams, quiet, came)
    during = _gaps(streams, came, came + took)
    median = statistics.median(before)
    limit = max(3 * median, 0.25)
    p99 = percentiles(during)["p99"]
    return {
        "streams": LONG_STREAMS,
        "prompt_tokens": length,
        "before_ms": percentiles(before),
        "during_ms": percentiles(during) | {"max": round(1000 * max(during), 2) if during else None},
        "goal_ms": round(1000 * limit, 2),
        "met": p99 is not None and p99 <= 1000 * limit,
        "time_to_first_token_s": round(took, 3),
        "prefill_tokens_per_s": round(length / took, 1),
        "alone_prefill_tokens_per_s": round(length / alone, 1),
        "tokens_per_s_before": round(len(before) / (came - quiet), 1),
        "tokens_per_s_during": round(len(during) / took, 1),
    }


async def _first_token(port: int, prompt: list[int]) -> float:
    """Seconds to the only token of an answer."""
    await call(port, "DELETE", "/v1/cache")
    reply = await call(port, "POST", "/v1/completions", completion_body(prompt, 1))
    assert reply.done, (reply.status, reply.body, reply.events[-1:])
    return reply.events[0][0] - reply.start


def _gaps(streams: Sequence[Reply], start: float, end: float) -> list[float]:
    """Between events of one stream, the later of which came from ``start`` to ``end``."""
    return [
        later - earlier
        for reply in streams
        for earlier, later in pairwise(reply.token_times())
        if start < later <= end
    ]
