"""Chats that are replayed against a server: what people said, and how long the answers were."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.serve_client import Reply, call

#: Tokens of an English word, about; answers are asked for by tokens, the file holds words.
TOKENS_PER_WORD = 1.3
#: Words of the system prompt of each chat.
SYSTEM_WORDS = 100


@dataclass(frozen=True, slots=True)
class Chat:
    """``turns``: what the user says, and the tokens of the answer to it."""

    turns: tuple[tuple[str, int], ...]


def read_chats(path: Path, max_turns: int) -> list[Chat]:
    """One JSON list of turns a line, the first of the user. Raises ValueError for another form."""
    chats = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, list) or not all(isinstance(text, str) for text in said):
            raise ValueError(f"{path}, line {number}: expected a JSON list of texts")
        pairs = list(zip(said[::2], said[1::2], strict=False))[:max_turns]
        turns = tuple((ask, round(len(reply.split()) * TOKENS_PER_WORD) or 1) for ask, reply in pairs)
        if turns:
            chats.append(Chat(turns))
    if not chats:
        raise ValueError(f"{path} holds no chat of two turns")
    return chats


def system_prompt(chats: Sequence[Chat], share: float, number: int, num_words: int = SYSTEM_WORDS) -> str:
    """A system prompt whose first ``share`` is the same in every chat; the rest is of chat ``number``."""
    words = [word for chat in chats for ask, _ in chat.turns for word in ask.split()]
    shared = [words[i % len(words)] for i in range(round(num_words * share))]
    own = random.Random(f"{number}/{share}")
    rest = [own.choice(words) for _ in range(num_words - len(shared))]
    return " ".join([*shared, *rest])


@dataclass(slots=True)
class Load:
    """One scenario while it runs. ``replies`` are the turns in the order in which they began."""

    port: int
    chats: Sequence[Chat]
    share: float
    replies: list[Reply] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def chat(self) -> None:
        """The next chat, turn after turn, each with all that was said before."""
        number = next(self._numbers)
        messages = [{"role": "system", "content": system_prompt(self.chats, self.share, number)}]
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for ask, num_tokens in self.chats[number % len(self.chats)].turns:
                messages.append({"role": "user", "content": ask})
                reply = Reply(time.perf_counter())
                self.replies.append(reply)
                await call(
                    self.port, "POST", "/v1/chat/completions", chat_body(messages, num_tokens), into=reply
                )
                messages.append({"role": "assistant", "content": reply.text()})
        finally:
            self.num_open -= 1

    async def one_after_another(self) -> None:
        while True:
            await self.chat()


def chat_body(messages: list[dict[str, str]], num_tokens: int) -> dict[str, Any]:
    return {
        "messages": messages,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def at_once(load: Load, count: int, seconds: float) -> None:
    """``count`` chats at any time, for so long; then they hang up."""
    await _stop_after(seconds, [asyncio.ensure_future(load.one_after_another()) for _ in range(count)])


async def arriving(load: Load, rate: float, seconds: float) -> None:
    """Chats that arrive as a Poisson process of ``rate`` a second, for so long; then they hang up."""
    gaps, tasks = random.Random(f"arrivals/{rate}"), []
    end = time.perf_counter() + seconds
    while (wait := gaps.expovariate(rate)) < end - time.perf_counter():
        await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(load.chat()))
    await _stop_after(end - time.perf_counter(), tasks)


async def _stop_after(seconds: float, tasks: list[asyncio.Task[None]]) -> None:
    try:
        if not tasks:
            await asyncio.sleep(seconds)
            return
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
