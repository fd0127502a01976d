"""One structured line a request. What people write to the model is never in it unless asked for."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

import structlog

from octavo.request import RequestOutput
from octavo.serving.errors import ApiError
from octavo.serving.inputs import Prompt

_log = structlog.get_logger("octavo.request")


def configure(*, as_json: bool, level: str = "info") -> None:
    """Send structlog and the standard library's loggers to stderr, in one form."""
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    last: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
            foreign_pre_chain=shared,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("octavo").setLevel(level.upper())


def refused(request_id: str, path: str, error: ApiError) -> None:
    """The line of a call that never reached the engine. Its sentence may quote the client: it stays out."""
    code = error.code or str(error.status)
    param = error.param if code != "unknown_parameter" else None  # the client's own word
    _log.info("refused", id=request_id, path=path[:100], status=str(error.status), code=code, param=param)


class RequestLog:
    """The line of one request, written when it ends, however it ends."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._start = time.monotonic()
        self._prompts: list[Any] = []
        self._done = False

    def prompts(self, prompts: Sequence[Prompt]) -> None:
        """What to log of the prompts; nothing, unless the server was told to."""
        self.texts([prompt.text if prompt.text is not None else prompt.token_ids for prompt in prompts])

    def texts(self, texts: Sequence[str | list[int]]) -> None:
        """As :meth:`prompts`, of texts and token ids."""
        self._prompts = list(texts)

    def end(self, outputs: Sequence[RequestOutput], error: BaseException | None) -> None:
        """Write the line of generated answers, once."""
        fields: dict[str, Any] = {
            "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
            "output_tokens": sum(len(c.token_ids) for output in outputs for c in output.outputs),
            "finish_reason": ",".join(
                sorted({c.finish_reason or "abort" for output in outputs for c in output.outputs})
            ),
            **_times(outputs),
        }
        from_disk = sum(output.num_disk_tokens for output in outputs)
        if from_disk:
            fields["disk_cached_tokens"] = from_disk
        preemptions = sum(output.metrics.num_preemptions for output in outputs if output.metrics)
        if preemptions:
            fields["preemptions"] = preemptions
        self.end_of(fields, error)

    def end_of(self, fields: dict[str, Any], error: BaseException | None) -> None:
        """Write the line with ``fields``, once."""
        if self._done:
            return
        self._done = True
        line = {"id": self._id, "status": _status(error), **fields}
        line["total_s"] = round(time.monotonic() - self._start, 4)
        if isinstance(error, ApiError):
            error.logged = True
        if isinstance(error, ApiError) and error.code is not None:
            line["code"] = error.code
        if self._prompts:
            line["prompts"] = self._prompts
        _log.info("request", **line)


def _times(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    found = [output.metrics for output in outputs if output.metrics is not None]
    queued = [m.first_scheduled_time - m.arrival_time for m in found if m.first_scheduled_time is not None]
    first = [m.first_token_time - m.arrival_time for m in found if m.first_token_time is not None]
    times = {}
    if queued:
        times["queued_s"] = round(max(queued), 4)
    if first:
        times["first_token_s"] = round(min(first), 4)
    return times


def _status(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "disconnected"
    return str(error.status) if isinstance(error, ApiError) else type(error).__name__
