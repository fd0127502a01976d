"""What clients may send, as msgspec structs. A field that is not listed here is refused, never ignored.

The names, types and defaults are OpenAI's; the last group of :class:`Sampling` are the extras of local
engines. Ranges are checked by ``SamplingParams``.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from octavo.serving.errors import ApiError

#: The decoder's own limits; msgspec refuses nesting deeper than the interpreter's stack by itself.
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``include_usage``: end the stream with a chunk that has no choices but the usage."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A named schema that the answer must satisfy. ``strict`` is always so here."""

    name: str
    schema: dict[str, Any] | bool = {}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``type``: "text", "json_object" (any JSON object) or "json_schema"."""

    type: str
    json_schema: JsonSchema | None = None


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool; functions are the only type."""

    type: str
    function: FunctionSpec


class Sampling(msgspec.Struct, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    #: Taken and not used: they ask nothing of an engine.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    #: Extras.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = 0
    cache_salt: str | None = None
    attn_topk: int | None = None
    return_token_ids: bool = False


class CompletionRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/completions``. ``prompt``: text, token ids, or a list in which each item is either."""

    prompt: str | list[Any]
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    modalities: list[str] | None = None
    reasoning_effort: str | None = None


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/embeddings``. ``input``: text, token ids (taken as they are), or a list of either.

    ``truncate`` is ours: cut texts that are too long.
    """

    model: str | None = None
    input: str | list[Any]
    encoding_format: str = "float"
    dimensions: int | None = None
    truncate: bool = False
    user: str | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /tokenize``: ``prompt`` or ``messages``, one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


def decode(body: bytes, kind: type[Any]) -> Any:
    """The body as ``kind``. Raises ApiError in one sentence, with the field at fault as ``param``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {_one_line(str(error))}", code="invalid_json") from None


def _refusal(text: str) -> ApiError:
    match = _AT.match(text)
    assert match is not None
    what, path = match["what"], (match["path"] or "$").removeprefix("key` in `").removeprefix("$").lstrip(".")
    unknown = _UNKNOWN.fullmatch(what)
    if unknown is not None:
        field = ".".join(part for part in (path, unknown["field"]) if part)[:100]
        return ApiError(
            f"{field!r} is not a parameter of this endpoint", param=field, code="unknown_parameter"
        )
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing is not None:
        field = ".".join(part for part in (path, missing[1]) if part)
        return ApiError(f"{field} is required", param=field, code="missing_parameter")
    where = path or "the body"
    return ApiError(f"{where}: {_one_line(what[:1].lower() + what[1:])}", param=path or None)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
