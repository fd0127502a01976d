"""Answers that follow a JSON schema or a grammar: llguidance says which tokens may come next.

The mask of a position is computed in a worker thread from the moment its predecessor is known, which is
while the next forward pass runs; the sampler finds it ready.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from octavo.serving.errors import ApiError
from octavo.serving.protocol import ResponseFormat, Tool
from octavo.serving.tools import CLOSE, OPEN
from octavo.tokenizer import Tokenizer

#: Between the parts of JSON: enough for what models like to write, too little to go on for ever.
WHITESPACE = r"[ \n]{0,20}"
#: Schemas larger than this are refused, as JSON text.
MAX_SCHEMA = 256 << 10


class Grammars:
    """Makes guides for one model. The vocabulary is indexed at the first use, which takes a moment."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._indexed: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def guide(self, grammar: str, param: str) -> GrammarGuide:
        """A guide for a grammar (in a worker thread). Raises ApiError for one that is not possible."""
        if not self._eos:
            raise ApiError("this model has no end token, which a grammar needs", param=param)
        matcher = LLMatcher(self._index(), grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some find out only now that they are too large
        if matcher.is_error():
            raise ApiError(f"{param} is not possible: {_reason(matcher)}", param=param)
        return GrammarGuide(matcher, self._pool.submit)

    def _index(self) -> LLTokenizer:
        with self._lock:
            if self._indexed is None:
                source = _Source(self._tokenizer, self._eos[0], self._vocab_size)
                self._indexed = LLTokenizer(TokenizerWrapper(source), eos_token=list(self._eos))
            return self._indexed


class _Source:
    """The vocabulary in the form that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer, eos: int, size: int) -> None:
        self.eos_token_id = eos
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.vocabulary.bytes_of(i) for i in range(size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < size)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_bos=False)


@dataclass(slots=True)
class _Place:
    """One choice's matcher, how many tokens it has taken, and the mask that comes after them."""

    matcher: LLMatcher
    taken: int = 0
    mask: Future[bytes] | None = None


@dataclass(slots=True)
class GrammarGuide:
    """A :class:`octavo.request.Guide`. Its methods are called by the engine's thread only."""

    _start: LLMatcher
    _submit: Callable[..., Future[bytes]]
    _places: dict[int, _Place] = field(default_factory=dict)

    def allowed(self, choice: int, output_token_ids: Sequence[int]) -> bytes:
        """The mask for the token after ``output_token_ids``; see the class of the protocol."""
        self.advance(choice, output_token_ids)
        mask = self._places[choice].mask
        assert mask is not None
        return mask.result()

    def advance(self, choice: int, output_token_ids: Sequence[int]) -> None:
        """Begin to compute that mask, unless it is under way."""
        place = self._places.get(choice)
        if place is None:
            place = self._places[choice] = _Place(self._start.deep_copy())
        new = list(output_token_ids[place.taken :])
        if place.mask is not None:
            if not new:
                return
            place.mask.result()  # never two threads in one matcher
        place.taken = len(output_token_ids)
        place.mask = self._submit(_next_mask, place.matcher, new)


def _next_mask(matcher: LLMatcher, tokens: list[int]) -> bytes:
    if tokens and not matcher.consume_tokens(tokens):
        raise ValueError(_reason(matcher))
    mask: bytes = matcher.compute_bitmask()
    return mask


def _reason(matcher: LLMatcher) -> str:
    """Its error in one line, without the parser's own state behind it."""
    return " ".join(matcher.get_error().split()).partition(" <state>")[0][:300]


def of_format(wanted: ResponseFormat | None) -> str | None:
    """The grammar of ``response_format``, None for free text."""
    if wanted is None or (wanted.type == "text" and wanted.json_schema is None):
        return None
    if wanted.type == "json_object" and wanted.json_schema is None:
        return _of_schema({"type": "object"}, "response_format")
    if wanted.type == "json_schema" and wanted.json_schema is not None:
        return _of_schema(wanted.json_schema.schema, "response_format.json_schema.schema")
    raise ApiError(
        'response_format: type must be "text", "json_object", or "json_schema" with a json_schema',
        param="response_format",
    )


def of_tools(tools: Sequence[Tool], names: Sequence[str]) -> str:
    """The grammar of one call of one of the functions ``names``."""
    calls = []
    for tool in tools:
        if tool.function.name in names:
            parameters = tool.function.parameters or {"type": "object"}
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    _check_size(schema, "tools")
    options = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return (
        f"start: {json.dumps(OPEN)} WS call WS {json.dumps(CLOSE)}\n"
        f"WS: /\\n?/\ncall: %json {json.dumps(options)}\n"
    )


def _of_schema(schema: Any, param: str) -> str:
    _check_size(schema, param)
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as error:
        raise ApiError(f"{param} is not possible: {error}", param=param) from None
    return grammar


def _check_size(schema: Any, param: str) -> None:
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA:
        raise ApiError(f"{param} has {size} characters; at most {MAX_SCHEMA} are allowed", param=param)
