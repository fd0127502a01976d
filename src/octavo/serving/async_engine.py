"""The engine in a thread of its own, reached from asyncio.

Two threads and two one-way streets between them. Into the engine's thread go *calls* (functions of the
engine), taken between steps in the order they came. Out of it come outputs, one hop to the event loop a
step, whatever the number of requests. Outputs are cumulative, so each stream keeps only the latest: a
reader that is slow loses nothing and costs no memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.engine.engine import Engine
from octavo.request import RequestOutput, SamplingParams

log = logging.getLogger("octavo")

T = TypeVar("T")

#: Steps that raise, one after the other, before the engine is given up.
MAX_FAILED_STEPS = 3

ENGINE_FAILED = "the engine has failed and takes no more requests: restart the server"
STOPPED = "the server has stopped"


class QueueFullError(Exception):
    """As many sequences are open as the server takes; try again later."""


class EngineStoppedError(Exception):
    """The engine takes no requests: it is draining, stopped or has failed. The text says which."""


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[Engine], Any]
    future: asyncio.Future[Any]


class Stream:
    """The outputs of one request, on the event loop's side.

    Iterating gives the latest output whenever there is a newer one, up to and with the finished one.
    """

    def __init__(self, entry_id: int, num_choices: int) -> None:
        self.entry_id = entry_id
        self.num_choices = num_choices
        self._latest: RequestOutput | None = None
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._latest = output
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while True:
            await self._news.wait()
            self._news.clear()
            output, self._latest = self._latest, None
            if output is not None:
                yield output
                if output.finished:
                    return
            if self._failure is not None:
                raise self._failure


class AsyncEngine:
    """Runs an engine in a thread. Everything but the thread's own loop belongs to one event loop.

    ``max_queue``: sequences that may wait beyond those that can run (``max_num_seqs``).
    """

    def __init__(self, engine: Engine, *, max_queue: int = 256) -> None:
        self.max_open = engine.config.scheduler.max_num_seqs + max_queue
        self.num_open = 0
        self.draining = False
        self.failed = False
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: deque[_Call] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    # ---- on the event loop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """What ``function`` returns or raises, run in the engine's thread between two steps."""
        if self.failed or self._stopping:
            raise EngineStoppedError(ENGINE_FAILED if self.failed else STOPPED)
        assert self._loop is not None, "start() comes first"
        call = _Call(function, self._loop.create_future())
        with self._wake:
            self._calls.append(call)
            self._wake.notify()
        result: T = await call.future
        return result

    async def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        label: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Stream:
        """Queue a prompt. Raises ValueError for a bad one, QueueFullError, or EngineStoppedError."""
        self._check_open(params.n)
        self._count(params.n)
        stream = Stream(-1, params.n)

        def add(engine: Engine) -> int:
            entry_id = engine.add_request(
                token_ids, params, label=label, priority=priority, cache_salt=cache_salt
            )
            # Before any output of it can be delivered, and in the same order.
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._streams.__setitem__, entry_id, stream)
            return entry_id

        call = asyncio.ensure_future(self.call(add))
        try:
            stream.entry_id = await asyncio.shield(call)
        except asyncio.CancelledError:
            # The client hung up meanwhile; the request may be in the engine already.
            call.add_done_callback(lambda done: self._abandon(done, stream))
            raise
        except Exception:
            self._count(-params.n)
            raise
        return stream

    def abort(self, stream: Stream) -> None:
        """End a request; a no-op when it has finished. Its blocks are free at the next step."""
        if self._streams.pop(stream.entry_id, None) is not None:
            self._count(-stream.num_choices)
            entry_id = stream.entry_id
            self._spawn(self.call(lambda engine: engine.abort(entry_id)))

    async def drain(self, limit: float) -> None:
        """Take no more requests, and wait until the running ones end; after ``limit`` seconds they are
        aborted, and their streams end with what they have."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), limit)
        except TimeoutError:
            log.warning("%d requests did not end within %g s and are aborted", len(self._streams), limit)
            await self.abort_all()

    async def abort_all(self) -> None:
        """End every request; each stream gets its last output, with finish_reason "abort"."""
        if self.failed:
            return
        ids = list(self._streams)
        outputs = await self.call(lambda engine: [engine.abort(entry_id) for entry_id in ids])
        self._deliver([output for output in outputs if output is not None])

    def stop(self) -> None:
        """End the thread after the step that it is in, and wait for it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._refuse_calls(STOPPED)

    @property
    def num_requests(self) -> int:
        """Requests in the engine."""
        return len(self._streams)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs and the engine has not failed."""
        return self._thread.is_alive() and not self.failed

    def _check_open(self, num_choices: int) -> None:
        if self.failed:
            raise EngineStoppedError(ENGINE_FAILED)
        if self.draining:
            raise EngineStoppedError("the server is shutting down and takes no new requests")
        if self.num_open + num_choices > self.max_open:
            raise QueueFullError(
                f"the queue is full: {self.num_open} sequences are open and the server takes {self.max_open}"
            )

    def _count(self, change: int) -> None:
        self.num_open += change
        if self.num_open:
            self._idle.clear()
        else:
            self._idle.set()

    def _abandon(self, call: asyncio.Future[int], stream: Stream) -> None:
        if call.cancelled() or call.exception() is not None:
            self._count(-stream.num_choices)
        else:
            stream.entry_id = call.result()
            self.abort(stream)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            entry_id = int(output.request_id)
            stream = self._streams.get(entry_id)
            if stream is None:
                continue
            stream.put(output)
            if output.finished:
                del self._streams[entry_id]
                self._count(-stream.num_choices)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Let it run by itself; an engine that has stopped meanwhile is no news."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), EngineStoppedError | None):
            log.error("a call of the engine failed: %s", task.exception())

    def _refuse_calls(self, sentence: str) -> None:
        while self._calls:
            _settle(self._calls.popleft().future, None, EngineStoppedError(sentence))

    def _give_up(self) -> None:
        self.failed = True
        self._refuse_calls(ENGINE_FAILED)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineStoppedError(ENGINE_FAILED))
            self._count(-stream.num_choices)

    # ---- in the engine's thread

    def _run(self) -> None:
        failures = 0
        while self._wait_for_work():
            while self._calls:
                self._answer(self._calls.popleft())
            if not self._engine.has_unfinished():
                continue
            try:
                outputs = self._engine.step()
            except Exception:
                # The engine itself ends the requests of a step that was cut short; what comes here
                # again and again is a fault that no request can be blamed for.
                log.exception("an engine step failed")
                failures += 1
                if failures >= MAX_FAILED_STEPS:
                    self._hand_over(self._give_up)
                    return
                continue
            failures = 0
            if outputs:
                self._hand_over(self._deliver, outputs)

    def _answer(self, call: _Call) -> None:
        try:
            result = call.function(self._engine)
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self._hand_over(_settle, call.future, None, error)
        else:
            self._hand_over(_settle, call.future, result, None)

    def _hand_over(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._stopping or self._calls or self._engine.has_unfinished()):
                self._wake.wait()
            return not self._stopping


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # its waiter was cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
