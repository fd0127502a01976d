"""One engine on one workload in a process of its own; it may be a peer's Python, without Octavo.

Started by path, with nothing but the standard library: the engine comes from ``sessions/<engine>.py``
beside this file, which imports what the environment has. The job comes as JSON on stdin; what was
measured goes to stdout as JSON, an object a line as soon as it is known; everything else that is printed
goes to stderr. Run by :mod:`octavo.bench.throughput`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

WARM_UP_PROMPT = 32
WARM_UP_TOKENS = 4

#: The answers' token ids; seconds from the moment that all prompts were handed over until the *last*
#: request to get a first token had it; seconds until all were done.
Reply = tuple[list[list[int]], float, float]


class Session(Protocol):
    """A loaded engine, greedy, that goes on past the end token. ``sessions/*.py`` each have one.

    Made as ``Session(model, threads, shape, options)``; ``shape`` says how many requests there are and
    how long they get, for engines that must know it when they start. May have ``close()``.
    """

    def reset(self) -> None:
        """Forget every prompt that was seen, so that the next starts cold."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Reply:
        """Answer all prompts, handed over at once, each with exactly ``new_tokens`` tokens."""
        ...

    def notes(self) -> dict[str, Any]:
        """What is worth knowing about how it ran."""
        ...


def load_engine(name: str) -> Any:
    """The module ``sessions/<name>.py``, by path: its folder must not hide packages of the same name."""
    path = Path(__file__).parent / "sessions" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"session_{name}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"there is no engine {name!r}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(job: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Load the engine, time its first token, run the workload ``repeats`` times, each cold but warmed up."""
    turns, new_tokens = job["turns"], job["new_tokens"]
    start = time.monotonic()
    module = load_engine(job["engine"])
    session = module.Session(job["model"], job["threads"], shape_of(turns, new_tokens), job["options"])
    load_s = time.monotonic() - start
    try:
        _run(session, job, load_s, module.PACKAGES, say)
    finally:
        close = getattr(session, "close", None)
        if close is not None:
            close()
    say({"event": "end"})


def _run(
    session: Session,
    job: dict[str, Any],
    load_s: float,
    packages: Sequence[str],
    say: Callable[[dict[str, Any]], None],
) -> None:
    turns, new_tokens = job["turns"], job["new_tokens"]
    # Backwards, so that nothing which is cached of them fits the workload.
    warm_up = [chat[0][-WARM_UP_PROMPT:][::-1] for chat in turns]
    session.generate(warm_up[:1], 1)
    start_up_s = time.monotonic() - job["spawned"]
    load_peak = peak_bytes(tree())
    say(
        {
            "event": "ready",
            "load_s": load_s,
            "start_up_s": start_up_s,
            "load_peak_bytes": load_peak,
            "versions": versions(packages),
        }
    )
    for _ in range(job["repeats"]):
        session.reset()
        session.generate(warm_up, WARM_UP_TOKENS)
        forget_peak(tree())
        say({"event": "start"})
        timings, token_ids = play(session, turns, new_tokens)
        say(
            {
                "event": "run",
                "timings": timings,
                "token_ids": token_ids,
                "peak_bytes": peak_bytes(tree()),
                "notes": session.notes(),
            }
        )


def shape_of(turns: Sequence[Sequence[Sequence[int]]], new_tokens: int) -> dict[str, int]:
    """``num_seqs`` chats; ``max_len``: tokens of the longest one at its end."""
    longest = max(sum(map(len, chat)) + len(chat) * new_tokens for chat in turns)
    return {"num_seqs": len(turns), "max_len": longest}


def play(
    session: Session, turns: Sequence[Sequence[list[int]]], new_tokens: int
) -> tuple[dict[str, float], list[list[int]]]:
    """One pass over the workload: its speeds, and what each chat was answered (all turns in a row).

    ``first_token_s`` sums, over the turns, the wait until every chat had its first token. Prefill and
    decode are told apart only where one request runs alone: elsewhere they overlap.
    """
    histories: list[list[int]] = [[] for _ in turns]
    answers: list[list[int]] = [[] for _ in turns]
    total_s = first_s = 0.0
    num_prompt_tokens = 0
    for turn in range(len(turns[0])):
        prompts = [history + chat[turn] for history, chat in zip(histories, turns, strict=True)]
        replies, until_first_s, until_done_s = session.generate(prompts, new_tokens)
        if len(replies) != len(prompts) or any(len(reply) != new_tokens for reply in replies):
            got = sorted({len(reply) for reply in replies})
            raise ValueError(
                f"asked for {len(prompts)} answers of {new_tokens} tokens, got {len(replies)} of {got}"
            )
        total_s += until_done_s
        first_s += until_first_s
        num_prompt_tokens += sum(map(len, prompts))
        histories = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
        answers = [seen + reply for seen, reply in zip(answers, replies, strict=True)]
    num_new_tokens = sum(map(len, answers))
    timings = {"total_s": total_s, "first_token_s": first_s, "tok_s": num_new_tokens / total_s}
    if len(turns) == 1 and len(turns[0]) == 1 and new_tokens > 1:
        timings["prefill_tok_s"] = num_prompt_tokens / first_s
        timings["decode_tok_s"] = (new_tokens - 1) / (total_s - first_s)
    return timings, answers


def tree(root: int | None = None) -> list[int]:
    """A process, by default this one, and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # The name in brackets may hold anything; the parent comes after it.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [os.getpid() if root is None else root]
    for pid in found:
        found += parents.get(pid, [])
    return found


def peak_bytes(pids: Sequence[int] | None = None) -> int:
    """The most resident memory of each process since its start or :func:`forget_peak`, added up."""
    total = 0
    for pid in [os.getpid()] if pids is None else pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue  # it ended meanwhile
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    if total == 0:
        raise ValueError("this system does not report VmHWM")
    return total


def forget_peak(pids: Sequence[int] | None = None) -> None:
    """Start the peak again from what is resident now (proc(5), clear_refs)."""
    for pid in [os.getpid()] if pids is None else pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Installed versions, None where a package is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def main() -> None:
    """Errors go out as an event with what was said; the traceback goes to stderr."""
    job = json.load(sys.stdin)
    # Engines print what they like, C++ ones past sys.stdout: the real stdout is kept for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(event: dict[str, Any]) -> None:
        answers.write(json.dumps(event) + "\n")
        answers.flush()

    try:
        measure(job, say)
    except Exception as error:
        # Whatever a peer raises is a finding to report; its kind is part of it.
        say({"event": "error", "what": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
