"""Starts :mod:`octavo.bench.worker` in an engine's environment and reads what it says, within a limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from octavo.bench.worker import peak_bytes, tree

WORKER = Path(__file__).parent / "worker.py"
#: Loading, and compiling where an engine does that, until the first run starts.
LOAD_LIMIT_S = 900.0


def measure(
    python: Path, job: dict[str, Any], limit_s: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run one job; what it measured, with what became of it.

    Returns what the "ready" event said, ``runs`` (the "run" events in order), and one of ``failed`` (a
    sentence) or ``stopped_s`` (the limit that a run did not keep) where it did not reach its end. A run
    that is stopped leaves its peak memory in ``peak_bytes``.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said, sigterm_unwinds():
        child = subprocess.Popen(
            [python, "-P", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
            text=True,
            start_new_session=True,
        )
        try:
            found = _listen(child, job, limit_s)
        finally:
            _end(child)
        if "failed" not in found and "stopped_s" not in found and not found.pop("ended", False):
            said.seek(0)
            lines = [line.strip() for line in said if line.strip()]
            last = lines[-1] if lines else "nothing was said"
            found["failed"] = f"the process ended with {child.returncode}: {last}"
    return found


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends this process through its finally clauses: what it started must not outlive it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _listen(child: subprocess.Popen[str], job: dict[str, Any], limit_s: float) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(child.stdout, lines), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # it ended already, and has said why
        child.stdin.write(json.dumps(job | {"spawned": time.monotonic()}))
        child.stdin.close()
    found: dict[str, Any] = {"runs": []}
    limit = LOAD_LIMIT_S
    running = False
    while True:
        try:
            line = lines.get(timeout=limit)
        except queue.Empty:
            if not running:
                return found | {"failed": f"it was not ready to run after {limit:.0f} s"}
            return found | {"stopped_s": limit_s, "peak_bytes": peak_bytes(tree(child.pid))}
        if line is None:
            child.wait()
            return found
        event = json.loads(line)
        kind = event.pop("event")
        if kind == "ready":
            found |= event
        elif kind == "run":
            found["runs"].append(event)
        elif kind == "error":
            return found | {"failed": event["what"]}
        elif kind == "end":
            found["ended"] = True
        running = kind == "start"
        limit = limit_s if running else LOAD_LIMIT_S


def _pump(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _end(child: subprocess.Popen[str]) -> None:
    """The child and whatever it started: it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
