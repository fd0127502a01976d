"""Errors in the form that OpenAI's clients understand: one clear sentence each."""

from __future__ import annotations

import msgspec

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "internal_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

#: What a client hears of a fault of ours; the rest is in the log.
INTERNAL = "the server failed on this request; its log says more under the id in the X-Request-Id header"


class ApiError(Exception):
    """An answer that is an error. ``param`` names the field at fault; ``headers`` go with the answer."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}
        #: Whether the log has a line about it.
        self.logged = False

    def body(self) -> bytes:
        """The JSON object ``{"error": {"message", "type", "param", "code"}}``."""
        return error_body(self.message, self.status, self.param, self.code)


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> bytes:
    """As :meth:`ApiError.body`; ``status`` gives the type."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": code or str(status)}}
    )
