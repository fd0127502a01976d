"""What every request passes: an id, the key, and the caps on body size and time. Plain ASGI."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from octavo.serving.errors import INTERNAL, ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("octavo")

#: Open without a key: they say nothing but "alive" and "ready".
OPEN_PATHS = frozenset({"/health", "/ready"})

ID, SALT = "octavo.request_id", "octavo.salt"


async def answer(send: Send, error: ApiError) -> None:
    """Send an error as the whole answer."""
    body = error.body()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})


class RequestId:
    """Gives every request an id and its answer the header, and turns what nobody caught into a 500."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[ID] = uuid.uuid4().hex
        started = ended = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, ended
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", scope[ID].encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            if started:
                raise
            await answer(send_with_id, error)
        except Exception:
            log.exception("request %s failed", scope[ID])
            if ended:  # the application has answered with a 500 of its own
                return
            if started:
                raise
            await answer(send_with_id, ApiError(INTERNAL, 500))


class ApiKeys:
    """Denies everything but ``OPEN_PATHS`` without a key. A caller's salt is the digest of its key."""

    def __init__(self, app: App, *, keys: Sequence[str], shared_cache: bool) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._shared = shared_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests:
            given = self._digest(scope)
            # All are compared, each in constant time: how long it takes says nothing.
            known = [hmac.compare_digest(given, digest) for digest in self._digests]
            if any(known):
                scope[SALT] = "" if self._shared else given.hex()
            elif scope["path"] not in OPEN_PATHS:
                await answer(
                    send,
                    ApiError(
                        "this server needs an API key: send it as 'Authorization: Bearer KEY'",
                        401,
                        code="invalid_api_key",
                        # Browsers look at the first challenge of a line only.
                        headers={"WWW-Authenticate": 'Basic realm="octavo (the key is the password)"'},
                    ),
                )
                return
        await self._app(scope, receive, send)

    @staticmethod
    def _digest(scope: Scope) -> bytes:
        value = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = value.partition(b" ")
        if kind.lower() == b"basic":
            # A browser that opens the page can ask its user for a password, but for nothing else.
            try:
                key = base64.b64decode(key.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                key = b""
        elif kind.lower() != b"bearer":
            key = b""
        return hashlib.sha256(key.strip()).digest()


class BodyLimit:
    """Refuses bodies that are too large, before they are read, or too slow in coming."""

    def __init__(self, app: App, *, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not length.isdigit() or int(length) > self._max_bytes:
            raise self._too_large()
        deadline = asyncio.get_running_loop().time() + self._seconds
        num_bytes, whole = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    f"the body did not come within {self._seconds:g} s", 408, code="timeout"
                ) from None
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if num_bytes > self._max_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            f"the body is larger than the {self._max_bytes} bytes that this server takes",
            413,
            code="body_too_large",
        )
