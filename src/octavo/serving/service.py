"""What serving any model needs: its names, what it says about itself, and threads for its tokenizer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from octavo.serving.errors import ApiError

T = TypeVar("T")

#: Seconds after which a client that was told that the queue is full may try again.
RETRY_AFTER = "1"

encode = msgspec.json.Encoder().encode
_PATH = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. ``salt`` keeps the callers' cached blocks apart; "" is shared by all without a key."""

    request_id: str
    salt: str = ""

    def salted(self, own: str | None) -> str:
        """The cache salt of a request that asks for ``own``."""
        return f"{self.salt}:{own}" if own is not None else self.salt


@dataclass(slots=True)
class Answer:
    """The whole object, or the events of a stream; ``on_end`` must be called when that is over."""

    whole: bytes | None = None
    events: AsyncIterator[bytes] | None = None
    on_end: Callable[[], None] = lambda: None


class Service:
    """``models`` are the names under which the one model is served; ``max_model_len`` is in tokens."""

    def __init__(self, *, models: Sequence[str], max_model_len: int, tokenizer_threads: int) -> None:
        self.models = tuple(models)
        self.max_model_len = max_model_len
        self.created = int(time.time())
        self._pool = ThreadPoolExecutor(tokenizer_threads, thread_name_prefix="octavo-tokenizer")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> str:
        """The served name. Raises ApiError (404) for any other; no name means the one that is served."""
        if name is None:
            return self.models[0]
        if name not in self.models:
            raise ApiError(
                f"the model {name!r:.100} is not served here; this server has {', '.join(self.models)}",
                404,
                param="model",
                code="model_not_found",
            )
        return name

    def list_models(self) -> bytes:
        """``GET /v1/models``."""
        return encode({"object": "list", "data": [self._model(name) for name in self.models]})

    def describe_model(self, name: str) -> bytes:
        """``GET /v1/models/{name}``."""
        return encode(self._model(self.check_model(name)))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "octavo",
            "max_model_len": self.max_model_len,
        }

    async def in_thread(self, function: Callable[[], T]) -> T:
        """What ``function`` returns, run beside the event loop; its ValueError becomes an ApiError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        except ValueError as error:
            raise ApiError(str(error)) from None


def without_paths(sentence: str) -> str:
    """An engine's sentence without the server's file names."""
    return _PATH.sub("...", sentence)


class time_limit:
    """``async with``: an ApiError (408) when the call takes longer than the server allows.

    ``deadline`` is in the event loop's time, ``seconds`` what it was made from.
    """

    def __init__(self, deadline: float, seconds: float) -> None:
        self._timer = asyncio.timeout_at(deadline)
        self._seconds = seconds

    async def __aenter__(self) -> None:
        await self._timer.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timer.__aexit__(*error)
        except TimeoutError:
            raise ApiError(
                f"the request took longer than the {self._seconds:g} s that this server allows",
                408,
                code="timeout",
            ) from None
