"""A server in a process of its own, and a client so lean that it leaves the processor to it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Seconds in which a server must be ready.
START_LIMIT_S = 120.0
#: Longest line of an answer, bytes.
LINE_LIMIT = 16 << 20

_COMMAND = [sys.executable, "-c", "from octavo.cli import main; main()", "serve"]


class ServerProcess:
    """``octavo serve`` on a free port of 127.0.0.1; ``start_s`` is the time until it was ready, and
    ``start_cpu_s`` the CPU time that it took.

    Raises RuntimeError, with the last line that it wrote, when it does not come up.
    """

    def __init__(self, model: str, options: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the process
        start = time.monotonic()
        self.process = subprocess.Popen(
            [*_COMMAND, model, "--port", "0", *options],
            stderr=self._said,
            env=os.environ | {"NO_COLOR": "1"} | dict(env or {}),
        )
        self.port = self._wait_for_port(start + START_LIMIT_S)
        self.start_s = time.monotonic() - start
        self.start_cpu_s = self.cpu_seconds()[1]

    def _wait_for_port(self, deadline: float) -> int:
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.said())
            # The line comes before the loop that accepts: the system holds early connections for it.
            if found:
                return int(found[1])
            time.sleep(0.02)
        last = (self.said().strip().splitlines() or ["it said nothing"])[-1]
        self.close()
        raise RuntimeError(f"the server did not start: {last}")

    def said(self) -> str:
        """All that it wrote to stderr so far."""
        self._said.seek(0)
        return self._said.read()

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM now."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time so far of the event loop, which is the main thread, and of the whole process."""
        pid, found = self.process.pid, []
        for path in (f"/proc/{pid}/task/{pid}/stat", f"/proc/{pid}/stat"):
            with open(path) as file:
                fields = file.read().rpartition(")")[2].split()  # a name may hold spaces
            found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return found[0], found[1]

    def kill(self) -> None:
        """End it at once, as ``kill -9`` does."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.kill()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(slots=True)
class Reply:
    """What came back. ``events``: (time, data) of each server-sent event; times are of perf_counter."""

    start: float
    status: int = 0
    body: bytes = b""
    events: list[tuple[float, bytes]] = field(default_factory=list)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def done(self) -> bool:
        """Whether the stream came to its end."""
        return bool(self.events) and self.events[-1][1] == b"[DONE]"

    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(data) for _, data in self.events if data != b"[DONE]"]

    def text(self) -> str:
        """Of completions and of chats."""
        parts = []
        for chunk in self.chunks():
            for choice in chunk.get("choices", ()):
                parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return "".join(parts)

    def token_times(self) -> list[float]:
        """When each event with text came."""
        return [
            when
            for when, data in self.events
            if data != b"[DONE]" and (b'"text":"' in data or b'"delta":{"content":"' in data)
        ]

    def usage(self) -> dict[str, Any]:
        """The usage chunk; empty without one."""
        found: list[dict[str, Any]] = [c["usage"] for c in self.chunks() if c.get("usage")]
        return found[-1] if found else {}


async def call(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    raw: bytes | None = None,
    into: Reply | None = None,
    until: Callable[[Reply], bool] = lambda reply: False,
) -> Reply:
    """One call on a connection of its own.

    ``raw`` replaces the encoded ``body``. ``into`` is filled while the answer comes. The client hangs up once
    ``until`` says so of what has come, and when it is cancelled.
    """
    reply = into if into is not None else Reply(time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LINE_LIMIT)
    try:
        data = raw if raw is not None else (b"" if body is None else json.dumps(body).encode())
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        reply.status = int((await reader.readline()).split()[1])
        chunked, streamed = False, False
        while (line := await reader.readline()) not in (b"\r\n", b""):
            chunked |= line.lower().startswith(b"transfer-encoding: chunked")
            streamed |= line.lower().startswith(b"content-type: text/event-stream")
        if not streamed:
            assert not chunked, "only streams are sent in chunks"
            reply.body = await reader.read(-1)
            return reply
        # A chunk holds whole events, so the lines of its framing can be passed over.
        while line := await reader.readline():
            if line.startswith(b"data: "):
                reply.events.append((time.perf_counter(), line[6:].strip()))
                if until(reply):
                    break
        return reply
    finally:
        writer.close()
