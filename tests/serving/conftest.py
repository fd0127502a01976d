"""Servers for tests; what they are made of is in ``tests/support/http_server.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from http_server import Running, engine_fixtures
from tiny_checkpoint import write_tiny_model

from octavo import LLM
from octavo.serving.app import Access
from octavo.serving.server import ServerOptions

tokenizer = engine_fixtures.tokenizer
tiny = engine_fixtures.tiny


@pytest.fixture(scope="session")
def make_server(tiny) -> Iterator[Callable[..., Running]]:
    """A function that starts a server; ``model`` replaces the tiny one."""
    running: list[Running] = []

    def make(
        *,
        model: Any = None,
        access: Access | None = None,
        options: dict[str, Any] | None = None,
        **engine: Any,
    ) -> Running:
        parts = tiny(**engine)
        if model is not None:
            parts.model = parts.runner.model = model
        settings = ServerOptions(models=("tiny",), access=access or Access(), **(options or {}))
        running.append(Running(parts, settings))
        return running[-1]

    yield make
    for server in running:
        server.close()


@pytest.fixture(scope="session")
def server(make_server) -> Running:
    """The one that most tests share; they leave it idle."""
    return make_server(num_blocks=256)


@pytest.fixture(scope="session")
def topk_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny model of two layers whose attention keeps 32 keys."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(path, 2)
    llm = LLM(str(path), attn_topk=32, num_blocks=64, num_threads=1)
    running = Running(SimpleNamespace(engine=llm.engine), ServerOptions(models=("tiny",)))
    yield running
    running.close()
