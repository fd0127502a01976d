"""A server on 127.0.0.1 over the tiny engine, in a thread, so that a test can look into it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

from octavo.request import RequestOutput, SamplingParams
from octavo.serving.server import Server, ServerOptions, listen

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"

_spec = importlib.util.spec_from_file_location(
    "tiny_engine_fixtures", Path(__file__).parents[1] / "engine" / "conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
engine_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(engine_fixtures)

TinyModel = engine_fixtures.TinyModel


class Script(TinyModel):
    """Puts out a given text: after ``prompt_length`` tokens the bytes of ``text``, then the end token.

    ``delay`` seconds a step; ``steps`` counts them.
    """

    def __init__(self, text: str | bytes, prompt_length: int, *, delay: float = 0.0, end: int = 256) -> None:
        super().__init__()
        data = text.encode() if isinstance(text, str) else text
        letters = {c: i for i, c in enumerate(sorted(engine_fixtures.pre_tokenizers.ByteLevel.alphabet()))}
        from octavo.tokenizer.vocabulary import BYTE_OF_CHAR

        id_of = {BYTE_OF_CHAR[c]: i for c, i in letters.items()}
        self.script = [id_of[byte] for byte in data]
        self.prompt_length = prompt_length
        self.end = end
        self.delay = delay
        self.steps = 0

    def forward(self, batch, kv_cache, attention):
        self.steps += 1
        if self.delay:
            time.sleep(self.delay)
        hidden = super().forward(batch, kv_cache, attention)
        hidden[:, 0] = batch.positions
        return hidden

    def logits(self, hidden, rows):
        out = torch.full((len(rows), engine_fixtures.HEAD_WIDTH), -10.0)
        for row, position in enumerate(hidden[rows, 0].tolist()):
            place = int(position) + 1 - self.prompt_length
            token = self.script[place] if 0 <= place < len(self.script) else self.end
            out[row, token] = 10.0
        return out


class Running:
    """A server that runs, its engine's parts, and a client for it."""

    def __init__(self, parts: Any, options: ServerOptions) -> None:
        self.parts = parts
        self.server = Server(parts.engine, options)
        self.exit_error: BaseException | None = None
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=30)
        until(lambda: self.server.started)

    def _run(self, listener) -> None:
        try:
            asyncio.run(self.server.run_on(listener))
        except BaseException as error:  # noqa: BLE001 - shown by close()
            self.exit_error = error

    def close(self) -> None:
        self.http.close()
        if self._thread.is_alive():
            self.server.begin_end()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not end"
        assert self.exit_error is None, self.exit_error

    @property
    def stats(self):
        return self.parts.engine.scheduler_stats

    def is_idle(self) -> bool:
        stats = self.stats
        return not (
            stats.num_running or stats.num_waiting or stats.used_blocks or self.server.engine.num_open
        )

    def post(self, path: str, body: Any = None, **kw: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kw)

    def complete(self, prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, text: str = "hi", **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        response = self.post("/v1/chat/completions", {"messages": messages, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, body: Any, status: int = 400, *words: str, **kw: Any) -> dict[str, Any]:
        """The error object of a call that must be refused, after a look at its form."""
        response = self.post(path, body, **kw)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        for word in words:
            assert word in error["message"], error
        return error


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def run_offline(server: Running, ids: list[int], params: SamplingParams) -> RequestOutput:
    """What an engine of its own makes of a prompt."""
    (output,) = engine_fixtures.Tiny(server.parts.engine.tokenizer).run((ids, params))
    return output


def events(response: httpx.Response) -> Iterator[str]:
    """The data of each server-sent event."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


def of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chunks_of(server, path, body):
    """All events of a stream; the last is [DONE]."""
    with server.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def parsed(chunks: list[str]) -> list[dict]:
    assert chunks[-1] == "[DONE]"
    return [json.loads(chunk) for chunk in chunks[:-1]]
