"""Routes: each reads a body, calls the service, and sends what it gives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from octavo.serving import cache_view, logs, metrics, protocol
from octavo.serving.async_engine import EngineStoppedError
from octavo.serving.embeddings import Embeddings
from octavo.serving.errors import INTERNAL, ApiError
from octavo.serving.middleware import ID, SALT, ApiKeys, App, BodyLimit, RequestId
from octavo.serving.openai import OpenAI
from octavo.serving.service import Answer, Caller, Service
from octavo.serving.sse import ClientGoneError, EventStream, until_disconnect

T = TypeVar("T")

STATIC = Path(__file__).parent / "static"

#: The page loads nothing but its own files, and runs nothing that is written into it.
PAGE_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"

#: nginx's number for a client that closed its connection; nobody reads the answer.
CLIENT_CLOSED = 499

_BODIES: dict[str, Any] = {
    "/v1/chat/completions": protocol.ChatRequest,
    "/v1/completions": protocol.CompletionRequest,
    "/v1/embeddings": protocol.EmbeddingRequest,
    "/tokenize": protocol.TokenizeRequest,
    "/detokenize": protocol.DetokenizeRequest,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may ask, and how much."""

    api_keys: tuple[str, ...] = ()
    shared_cache: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body: int = 8 << 20
    body_timeout: float = 30.0


def create_app(service: OpenAI | Embeddings, access: Access) -> App:
    """The whole server as an ASGI application."""
    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    _add_error_handlers(app)
    _add_model_routes(app, service)
    _add_state_routes(app, service)
    if isinstance(service, Embeddings):
        _add_encoder_routes(app, service)
    else:
        _add_decoder_routes(app, service)
        _add_cache_routes(app, service, bool(access.api_keys) and not access.shared_cache)
    _describe_bodies(app)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    inner: App = BodyLimit(app, max_bytes=access.max_body, seconds=access.body_timeout)
    inner = ApiKeys(inner, keys=access.api_keys, shared_cache=access.shared_cache)
    # A browser asks for permission without a key, so this comes before the keys.
    inner = CORSMiddleware(
        inner,
        allow_origins=access.cors_origins,
        allow_methods=["GET", "POST", "DELETE"],
        # Clients for browsers send headers of their own, which nothing here reads.
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )
    return RequestId(inner)


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


async def _body(request: Request, kind: type[T]) -> T:
    """The body as ``kind``. Refuses other content types: a form on a foreign page can send those unasked."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            f"the body must be JSON with Content-Type: application/json, got {content_type!r:.60}", 415
        )
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGoneError from None
    value: T = protocol.decode(body, kind)
    return value


def _caller(request: Request) -> Caller:
    return Caller(request.scope[ID], request.scope.get(SALT, ""))


async def _answer(request: Request, kind: type[T], ask: Callable[[T, Caller], Awaitable[Answer]]) -> Response:
    parsed = await _body(request, kind)
    found = await until_disconnect(request.receive, _awaited(ask(parsed, _caller(request))))
    if found.events is not None:
        return EventStream(found.events, found.on_end)
    assert found.whole is not None
    return _json(found.whole)


def _refuse(app: FastAPI, service: Service, paths: Sequence[str], what: str) -> None:
    """Routes that the served model is of the wrong kind for; ``what`` says of which it is."""

    def add(path: str) -> None:
        @app.post(path, name=path.rpartition("/")[2], response_class=Response)
        async def refuse(request: Request) -> Response:
            """Refused: the model that is served is of another kind."""
            model = service.check_model((await _body(request, _BODIES[path])).model)
            raise ApiError(f"{model} {what}", 501, param="model", code="not_supported")

    for path in paths:
        add(path)


def _add_decoder_routes(app: FastAPI, service: OpenAI) -> None:
    @app.post("/v1/chat/completions", response_class=Response)
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(request, protocol.ChatRequest, service.chat)

    @app.post("/v1/completions", response_class=Response)
    async def completions(request: Request) -> Response:
        """Continue one text or several."""
        return await _answer(request, protocol.CompletionRequest, service.complete)

    @app.get("/tokenizer_info", response_class=Response)
    async def tokenizer_info() -> Response:
        """The tokenizer's own tokens, by their text."""
        return _json(service.tokenizer_info())

    _refuse(
        app,
        service,
        ["/v1/embeddings"],
        "generates text; embeddings need an encoder model, and this server has none",
    )

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": PAGE_POLICY})


def _add_encoder_routes(app: FastAPI, service: Embeddings) -> None:
    @app.post("/v1/embeddings", response_class=Response)
    async def embeddings(request: Request) -> Response:
        """Vectors of texts."""
        return await _answer(request, protocol.EmbeddingRequest, service.embed)

    what = "is an encoder and writes no text; this server answers POST /v1/embeddings"
    _refuse(app, service, ["/v1/chat/completions", "/v1/completions"], what)

    @app.get("/", include_in_schema=False)
    @app.get("/v1/cache", response_class=Response)
    @app.delete("/v1/cache", response_class=Response)
    async def nothing(request: Request) -> Response:
        """Refused: an encoder has no chat and no KV cache."""
        raise ApiError(f"{service.models[0]} {what}", 501, code="not_supported")


def _add_model_routes(app: FastAPI, service: OpenAI | Embeddings) -> None:
    @app.post("/tokenize", response_class=Response)
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return _json(await service.tokenize(await _body(request, protocol.TokenizeRequest)))

    @app.post("/detokenize", response_class=Response)
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return _json(await service.detokenize(await _body(request, protocol.DetokenizeRequest)))

    @app.get("/v1/models", response_class=Response)
    async def models() -> Response:
        """The models that this server has."""
        return _json(service.list_models())

    @app.get("/v1/models/{name:path}", response_class=Response)
    async def model(name: str) -> Response:
        """One of them."""
        return _json(service.describe_model(name))


async def _awaited(call: Awaitable[T]) -> T:
    return await call


def _add_state_routes(app: FastAPI, service: OpenAI | Embeddings) -> None:
    engine = service.engine

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """Whether the process and its engine are alive."""
        if engine.failed:
            raise ApiError("the engine has failed: restart the server", 503, code="failed")
        return _json(b'{"status":"ok"}')

    @app.get("/ready", response_class=Response)
    async def ready() -> Response:
        """Whether requests are taken: the model is loaded and the server is not shutting down."""
        if engine.draining or not engine.alive:
            raise ApiError("the server takes no requests now", 503, code="not_ready")
        return _json(b'{"status":"ready"}')

    @app.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """For Prometheus."""

        return Response(await service.render_metrics(), media_type=metrics.CONTENT_TYPE)


def _add_cache_routes(app: FastAPI, service: OpenAI, tenants: bool) -> None:
    engine = service.engine

    @app.get("/v1/cache", response_class=Response)
    async def cache(request: Request) -> Response:
        """The KV pool and the prefix cache, block by block."""
        salt = request.scope.get(SALT, "") if tenants else None
        return _json(await engine.call(lambda it: cache_view.look(it, salt)))

    @app.delete("/v1/cache", response_class=Response)
    async def reset() -> Response:
        """Forget every cached prefix; what runs goes on."""
        await engine.call(lambda it: it.reset_prefix_cache())
        return _json(b'{"status":"reset"}')


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        if not error.logged:
            logs.refused(request.scope[ID], request.url.path, error)
        return _json(error.body(), error.status, error.headers)

    @app.exception_handler(EngineStoppedError)
    async def stopped(request: Request, error: EngineStoppedError) -> Response:
        return _json(ApiError(str(error), 503, code="unavailable").body(), 503)

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _json(ApiError(INTERNAL, 500).body(), 500)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        sentences = {
            404: "there is nothing at this address",
            405: f"{request.method} is not possible at this address",
        }
        sentence = sentences.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        return _json(ApiError(sentence, error.status_code).body(), error.status_code, headers)


def _describe_bodies(app: FastAPI) -> None:
    """Put the schemas of the bodies into the OpenAPI description: FastAPI does not read them itself."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        description = make()
        kinds = list(_BODIES.values())
        schemas, components = msgspec.json.schema_components(
            kinds, ref_template="#/components/schemas/{name}"
        )
        description.setdefault("components", {}).setdefault("schemas", {}).update(components)
        for path, schema in zip(_BODIES, schemas, strict=True):
            description["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema}},
            }
        return description

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
