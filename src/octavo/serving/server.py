"""The life of the server: listen, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

import uvicorn

from octavo.engine.encoder import EncoderEngine
from octavo.engine.engine import Engine
from octavo.serving.app import Access, create_app
from octavo.serving.async_encoder import AsyncEncoder
from octavo.serving.async_engine import AsyncEngine
from octavo.serving.connection import Connection
from octavo.serving.embeddings import Embeddings
from octavo.serving.grammar import Grammars
from octavo.serving.openai import OpenAI

log = logging.getLogger("octavo")

#: Seconds a thread of Python may keep the interpreter while the engine's waits for it. The default of
#: 5 ms would be lost on every step that ends while the event loop is busy.
SWITCH_INTERVAL = 0.0005

#: Longest request line and headers, bytes.
MAX_HEADERS = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to serve. Times in seconds."""

    models: tuple[str, ...]
    access: Access = field(default_factory=Access)
    max_queue: int = 256
    max_connections: int = 1024
    request_timeout: float = 3600.0
    keep_alive: float = 30.0
    drain_timeout: float = 30.0
    log_prompts: bool = False
    tokenizer_threads: int = 2


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ValueError, in one sentence, when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot listen on {host}:{port}: {reason}") from None
    return listener


def _service(engine: Engine | EncoderEngine, options: ServerOptions) -> OpenAI | Embeddings:
    if isinstance(engine, EncoderEngine):
        return Embeddings(
            AsyncEncoder(engine, max_queue=options.max_queue),
            models=options.models,
            request_timeout=options.request_timeout,
            log_prompts=options.log_prompts,
        )
    return OpenAI(
        AsyncEngine(engine, max_queue=options.max_queue),
        engine.tokenizer,
        models=options.models,
        grammars=Grammars(engine.tokenizer, engine.eos_token_ids, engine.vocab_size),
        max_model_len=engine.max_model_len,
        request_timeout=options.request_timeout,
        log_prompts=options.log_prompts,
        tokenizer_threads=options.tokenizer_threads,
    )


class Server(uvicorn.Server):
    """uvicorn with our own end: SIGTERM and the first SIGINT drain, the second SIGINT stops at once."""

    def __init__(self, engine: Engine | EncoderEngine, options: ServerOptions) -> None:
        self.service = _service(engine, options)
        self.engine = self.service.engine
        self._drain_timeout = options.drain_timeout
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                create_app(self.service, options.access),
                lifespan="off",
                http=Connection,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEADERS,
                # uvicorn refuses at this number, counting the one that asks.
                limit_concurrency=options.max_connections + 1,
                timeout_keep_alive=max(1, round(options.keep_alive)),
                timeout_graceful_shutdown=5,
            )
        )

    async def run_on(self, listener: socket.socket) -> None:
        """Serve until told to end."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()
        try:
            await self.serve(sockets=[listener])
        finally:
            self.service.close()
            await asyncio.to_thread(self.engine.stop)

    def begin_end(self) -> None:
        """Drain, then stop. May be called from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        if self._draining is None:
            log.info("draining: %d requests are under way", self.engine.num_requests)
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self.engine.drain(self._drain_timeout)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. A second Ctrl-C does not wait for anybody."""
        if sig == signal.SIGINT and self._draining is not None:
            # What uvicorn says about the answers that are cut is no news.
            logging.getLogger("uvicorn.error").disabled = True
            self.force_exit = self.should_exit = True
        else:
            self.begin_end()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, signals are not raised again at the end: a drained server exits with 0.

        What comes while the process ends changes nothing any more.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, self.handle_exit)
        try:
            yield
        finally:
            for sig in (signal.SIGTERM, signal.SIGINT):
                signal.signal(sig, signal.SIG_IGN)


def run(engine: Engine | EncoderEngine, options: ServerOptions, listener: socket.socket) -> int:
    """Serve until a signal; returns the exit code: 0 after draining, 1 when stopped at once."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    server = Server(engine, options)
    asyncio.run(server.run_on(listener))
    if isinstance(engine, Engine):
        engine.close()
    return 1 if server.force_exit else 0
