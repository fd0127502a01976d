"""One engine on one workload in a process of its own, so that its peak memory is its own.

The job comes as JSON on stdin, the measurement goes as JSON to stdout; whatever else is printed goes
to stderr. Run by :mod:`octavo.bench.throughput`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from octavo.bench.engines import ENGINES, Session
from octavo.bench.workloads import Workload

WARM_UP_PROMPT = 32
WARM_UP_TOKENS = 4


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Load the engine, warm it up, run the workload ``repeats`` times from cold."""
    workload = Workload(**job["workload"])
    start = time.monotonic()
    session = ENGINES[job["engine"]](job["model"], job["threads"], job["options"])
    load_s = time.monotonic() - start
    session.generate([chat[0][-WARM_UP_PROMPT:] for chat in workload.turns], WARM_UP_TOKENS)
    load_peak = peak_bytes()
    forget_peak()
    runs: list[dict[str, float]] = []
    token_ids: list[list[int]] = []
    for _ in range(job["repeats"]):
        session.reset()
        timings, token_ids = play(session, workload)
        runs.append(timings)
    return {
        "load_s": load_s,
        "runs": runs,
        "peak_bytes": peak_bytes(),
        "load_peak_bytes": load_peak,
        "token_ids": token_ids,
        "notes": session.notes(),
    }


def play(session: Session, workload: Workload) -> tuple[dict[str, float], list[list[int]]]:
    """One pass over the workload: its speeds, and what each chat was answered (all turns in a row).

    ``first_token_s`` sums, over the turns, the wait until every chat had its first token. Prefill and
    decode are told apart only where one request runs alone: elsewhere they overlap.
    """
    histories: list[list[int]] = [[] for _ in workload.turns]
    answers: list[list[int]] = [[] for _ in workload.turns]
    total_s = first_s = 0.0
    for turn in range(len(workload.turns[0])):
        prompts = [history + chat[turn] for history, chat in zip(histories, workload.turns, strict=True)]
        reply = session.generate(prompts, workload.new_tokens)
        for answer in reply.token_ids:
            if len(answer) != workload.new_tokens:
                raise ValueError(f"asked for {workload.new_tokens} tokens, got {len(answer)}")
        total_s += reply.total_s
        first_s += reply.first_token_s
        histories = [prompt + answer for prompt, answer in zip(prompts, reply.token_ids, strict=True)]
        answers = [seen + answer for seen, answer in zip(answers, reply.token_ids, strict=True)]
    timings = {"total_s": total_s, "first_token_s": first_s, "tok_s": workload.num_new_tokens / total_s}
    if workload.single:
        timings["prefill_tok_s"] = workload.num_prompt_tokens / first_s
        timings["decode_tok_s"] = (workload.num_new_tokens - 1) / (total_s - first_s)
    return timings, answers


def peak_bytes() -> int:
    """The most resident memory since the start or the last :func:`forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("this system does not report VmHWM")


def forget_peak() -> None:
    """Start the peak again from what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    job = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            result = measure(job)
        except ValueError as error:
            result = {"error": str(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
