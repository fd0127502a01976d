"""Long dialogues across a restart: the next turn after ``kill -9``, and kills at random moments."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.serve_client import Reply, ServerProcess, call
from octavo.cache.disk_store import DiskStore
from octavo.engine.resources import parse_size
from octavo.tokenizer import Tokenizer

#: From disk the first token is to come so many times sooner than computed again.
GOAL = 5.0
#: What was sealed so many seconds before a kill must be on disk.
SETTLED_S = 1.0
REPLY_TOKENS = 32
#: Tokens that the chat template puts around a message, about.
MESSAGE_TOKENS = 6

#: Kills: the prompts that are asked again and again, their tokens, and how many at once when the kill comes.
NUM_PROMPTS, PROMPT_TOKENS, AT_ONCE, CHECKED = 24, (100, 700), 6, 2
KILL_WITHIN_S = 3.0

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``options`` are the server's; ``kill_disk`` bounds the store that is written while it is killed, so
    small that blocks are given up all the time."""

    model: str
    conversations: int = 16
    tokens: int = 4096
    kills: int = 200
    kill_disk: str = "160MiB"
    seed: int = 0
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What was said, the last by the user; and what the user says next."""

    messages: list[Message]
    follow_up: str


def dialogues(texts: Sequence[str], tokenizer: Tokenizer, lengths: Sequence[int]) -> list[Dialogue]:
    """Chats strung together to about so many tokens each; no two share a passage, or begin alike.

    Raises ValueError when there are too few texts.
    """
    rest = iter(texts)
    made: list[Dialogue] = []
    for number, length in enumerate(lengths):
        messages: list[Message] = []
        size = 0
        while size < length or len(messages) % 2 == 0:
            text = next(rest, None)
            if text is None:
                raise ValueError(
                    f"the chats make {len(made)} dialogues of {length} tokens, not {len(lengths)}"
                )
            if not messages:
                text = f"Dialogue {number}. {text}"
            messages.append({"role": ("user", "assistant")[len(messages) % 2], "content": text})
            size += len(tokenizer.encode(text)) + MESSAGE_TOKENS
        made.append(Dialogue(messages, f"{next(rest, '')} And what did I say first?"))
    return made


def read_texts(path: Path) -> list[str]:
    """All that was said, in order, of a file with a JSON list of texts a line. Raises ValueError."""
    try:
        chats = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    texts = [text for chat in chats if isinstance(chat, list) for text in chat]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path}: expected a JSON list of texts a line")
    return [text for text in texts if text.strip()]


def _body(messages: Sequence[Message], max_tokens: int) -> dict[str, Any]:
    return {
        "messages": list(messages),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def send(server: ServerProcess, messages: Sequence[Message], max_tokens: int = REPLY_TOKENS) -> Reply:
    """A streamed turn with its log-probabilities. Raises RuntimeError when it is not answered to its end."""
    reply = await call(server.port, "POST", "/v1/chat/completions", _body(messages, max_tokens))
    if reply.status != 200 or not reply.done:
        raise RuntimeError(f"a turn was answered with {reply.status}: {reply.body[:200]!r}")
    return reply


def ask(server: ServerProcess, messages: Sequence[Message], max_tokens: int = REPLY_TOKENS) -> Reply:
    """As :func:`send`, alone."""
    return asyncio.run(send(server, messages, max_tokens))


def scored(reply: Reply) -> list[tuple[str, float]]:
    """Every token of an answer with its log-probability, as they were sent."""
    return [
        (token["token"], token["logprob"])
        for chunk in reply.chunks()
        for choice in chunk.get("choices", ())
        for token in (choice.get("logprobs") or {}).get("content") or ()
    ]


# ---- the next turn after a restart


def restart(
    settings: Settings,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    folder: Path,
    report: Callable[[str], None],
) -> dict[str, Any]:
    chats = dialogues(texts, tokenizer, [settings.tokens] * settings.conversations)
    on_disk = (*settings.options, "--cache-dir", str(folder))
    turns = []
    with ServerProcess(settings.model, on_disk) as server:
        for number, chat in enumerate(chats, 1):
            reply = ask(server, chat.messages)
            said = [
                {"role": "assistant", "content": reply.text()},
                {"role": "user", "content": chat.follow_up},
            ]
            turns.append([*chat.messages, *said])
            report(f"dialogue {number}: {reply.usage()['prompt_tokens']} tokens")
        time.sleep(1.5 * SETTLED_S)
        server.kill()
    file_bytes = (folder / "data.mdb").stat().st_size
    warm = _next_turns(settings.model, on_disk, turns)
    report(f"from disk: first token after {warm['first_token_s']['median']:.3f} s")
    cold = _next_turns(settings.model, settings.options, turns)
    report(f"computed again: first token after {cold['first_token_s']['median']:.3f} s")
    answers = zip(warm.pop("answers"), cold.pop("answers"), strict=True)
    same = sum(a == b and len(a) == REPLY_TOKENS for a, b in answers)
    faults = (
        [f"{len(turns) - same} answers from disk differ from a cold engine's"] if same < len(turns) else []
    )
    ratio = cold["first_token_s"]["median"] / warm["first_token_s"]["median"]
    return {
        "conversations": len(turns),
        "file_bytes": file_bytes,
        "from_disk": warm,
        "computed_again": cold,
        "same_answers": same,
        "times_sooner": round(ratio, 2),
        "goal": GOAL,
        "met": ratio >= GOAL,
        "faults": faults,
    }


def _next_turns(model: str, options: Sequence[str], turns: Sequence[Sequence[Message]]) -> dict[str, Any]:
    """One after the other on a server that has just started."""
    with ServerProcess(model, options) as server:
        replies = [ask(server, messages) for messages in turns]
        start_s = server.start_s
    first = [reply.token_times()[0] - reply.start for reply in replies]
    used = [reply.usage() for reply in replies]
    details = [usage["prompt_tokens_details"] for usage in used]
    return {
        "start_s": round(start_s, 2),
        "first_token_s": {
            "median": round(statistics.median(first), 4),
            "all": [round(seconds, 4) for seconds in first],
        },
        "prompt_tokens": sum(usage["prompt_tokens"] for usage in used),
        "cached_tokens": sum(detail["cached_tokens"] for detail in details),
        "disk_cached_tokens": sum(detail["disk_cached_tokens"] for detail in details),
        "answers": [scored(reply) for reply in replies],
    }


# ---- kills at random moments


class Kills:
    """A server that is killed while it computes and writes, again and again, on one folder."""

    def __init__(self, settings: Settings, texts: Sequence[str], tokenizer: Tokenizer, folder: Path) -> None:
        self.faults: list[str] = []
        self._settings, self._folder = settings, folder
        self._draw = random.Random(settings.seed)
        lengths = [self._draw.randint(*PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
        self._chats = dialogues(texts, tokenizer, lengths)
        self._options = (*settings.options, "--cache-dir", str(folder), "--cache-disk", settings.kill_disk)

    def rows(self, report: Callable[[str], None]) -> Any:
        """What came of it so far, after each kill."""
        settings = self._settings
        with ServerProcess(settings.model, settings.options) as server:
            expected = [scored(ask(server, chat.messages)) for chat in self._chats]
        report(f"{len(expected)} answers of a cold engine")
        row = {
            "kills": 0,
            "opened": 0,
            "answers_compared": 0,
            "disk_cached_tokens": 0,
            "damaged": 0,
            "evicted": 0,
        }
        while row["kills"] < settings.kills:
            with ServerProcess(settings.model, self._options) as server:
                row["opened"] += 1
                for number in self._draw.sample(range(len(self._chats)), CHECKED):
                    reply = ask(server, self._chats[number].messages)
                    row["answers_compared"] += 1
                    row["disk_cached_tokens"] += reply.usage()["prompt_tokens_details"]["disk_cached_tokens"]
                    if scored(reply) != expected[number]:
                        self.faults.append(
                            f"after kill {row['kills']} answer {number} is not a cold engine's"
                        )
                asyncio.run(self._load_until_killed(server))
                said = server.said()
                row["damaged"] += said.count("is damaged")
            row["kills"] += 1
            store = DiskStore(self._folder, parse_size(settings.kill_disk))
            row["blocks"], row["file_bytes"] = len(store.index.entries), store.file_bytes
            broken = len(list(store.verify()))
            store.close()
            if broken or "is damaged" in said:
                self.faults.append(f"after kill {row['kills']} {broken} records are damaged")
            report(f"kill {row['kills']}: {row['blocks']} blocks on disk, {len(self.faults)} faults")
            yield row

    async def _load_until_killed(self, server: ServerProcess) -> None:
        """Prompts that share a beginning with what is known and go on as never before."""
        tasks = []
        for _ in range(AT_ONCE):
            chat = self._draw.choice(self._chats)
            own = f"{chat.follow_up} {self._draw.random()}"
            said = [{"role": "assistant", "content": "Well."}, {"role": "user", "content": own}]
            body = _body([*chat.messages, *said], 4 * REPLY_TOKENS)
            tasks.append(asyncio.ensure_future(call(server.port, "POST", "/v1/chat/completions", body)))
        await asyncio.sleep(self._draw.random() * KILL_WITHIN_S)
        server.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
