"""An encoder in a thread of its own, reached from asyncio: one forward pass at a time, in turns.

A call that needs many passes queues one after the other, so that a short call between them waits for one
pass and not for all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from octavo.engine.encoder import EncoderEngine, batches
from octavo.engine.metrics import Histogram
from octavo.serving.async_engine import STOPPED, EngineStoppedError, QueueFullError
from octavo.tokenizer.encoder import Encoded


@dataclass(slots=True)
class EncoderMetrics:
    """Tokens and texts that went through the model, and seconds a forward pass; they only rise."""

    tokens: int
    texts: int
    step_time: Histogram


class AsyncEncoder:
    """Runs an encoder. Everything but the forward pass belongs to one event loop.

    ``max_queue``: calls that may be open beside the one that runs.
    """

    failed = False

    def __init__(self, encoder: EncoderEngine, *, max_queue: int = 256) -> None:
        self.encoder = encoder
        self.metrics = EncoderMetrics(0, 0, Histogram())
        self.max_open = 1 + max_queue
        self.num_open = 0
        self.draining = False
        self._stopped = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-encoder")

    @property
    def num_requests(self) -> int:
        """Calls that are open."""
        return self.num_open

    @property
    def alive(self) -> bool:
        """Whether calls are computed."""
        return not self._stopped

    def start(self) -> None:
        """Nothing: the thread starts with the first call."""

    def stop(self) -> None:
        """Wait for the pass that runs; no other begins."""
        self._stopped = True
        self._thread.shutdown(cancel_futures=True)

    async def drain(self, limit: float) -> None:
        """Take no more calls, and wait for the open ones, ``limit`` seconds at most."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), limit)
        except TimeoutError:
            self._stopped = True
            await self._idle.wait()

    async def embed(self, encoded: Sequence[Encoded]) -> torch.Tensor:
        """``[len(encoded), hidden_size]`` float32. Raises QueueFullError or EngineStoppedError.

        A call that is cancelled begins no further pass.
        """
        if self.draining:
            raise EngineStoppedError("the server is shutting down and takes no new requests")
        if self.num_open >= self.max_open:
            raise QueueFullError(
                f"the queue is full: {self.num_open} calls are open and the server takes {self.max_open}"
            )
        self.num_open += 1
        self._idle.clear()
        try:
            out = torch.empty(len(encoded), self.encoder.config.hidden_size)
            for members in batches(encoded):
                out[torch.tensor(members)] = await self._pass([encoded[i] for i in members])
            return out
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

    async def _pass(self, items: Sequence[Encoded]) -> torch.Tensor:
        if self._stopped:
            raise EngineStoppedError(STOPPED)

        def timed() -> tuple[torch.Tensor, float]:
            start = time.monotonic()
            vectors = self.encoder.embed_encoded(items)
            return vectors, time.monotonic() - start

        vectors, seconds = await asyncio.get_running_loop().run_in_executor(self._thread, timed)
        self.metrics.tokens += sum(len(item.ids) for item in items)
        self.metrics.texts += len(items)
        self.metrics.step_time.observe(seconds)
        return vectors
