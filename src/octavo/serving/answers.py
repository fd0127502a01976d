"""From the engine's outputs to OpenAI's objects: whole answers, and chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.request import CompletionOutput, RequestOutput
from octavo.serving.inputs import Prompt
from octavo.serving.logprobs import chat_logprobs, completion_logprobs
from octavo.serving.tools import ToolCallParser
from octavo.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str
    object: str

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}


@dataclass(slots=True)
class _Sent:
    """How much of a choice the client has."""

    characters: int = 0
    tokens: int = 0
    started: bool = False
    ended: bool = False
    parser: ToolCallParser | None = None


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of a call, each prompt once whatever its n, and what top-k attention read and left out.

    ``disk_cached_tokens`` are those of ``cached_tokens`` that came from disk, ``compact_cached_tokens`` those
    that are read in compact form, ``summarised_cached_tokens`` those of these that are read in summaries.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    used: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
            "disk_cached_tokens": sum(output.num_disk_tokens for output in outputs),
            "compact_cached_tokens": sum(output.num_compact_tokens for output in outputs),
            "summarised_cached_tokens": sum(output.num_summarised_tokens for output in outputs),
        },
    }
    reports = [output.attn_topk for output in outputs if output.attn_topk is not None]
    if reports:
        used["attn_topk"] = asdict(sum(reports[1:], start=reports[0]))
    histories = [output.history for output in outputs if output.history is not None]
    if histories:
        used["history"] = asdict(sum(histories[1:], start=histories[0]))
    reads = [output.attn_reads for output in outputs if output.attn_reads is not None]
    if reads:
        used["attn_reads"] = [asdict(each) for each in reads]
    return used


class CompletionForm:
    """``/v1/completions``. Choice i of prompt p has the index ``p * n + i``."""

    whole_object = chunk_object = "text_completion"

    @staticmethod
    def prompt_ids(output: RequestOutput) -> dict[str, Any]:
        """Nothing: a call may have several prompts, so each choice has its own."""
        return {}

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        *,
        n: int,
        echo: bool,
        logprobs: int | None,
        token_ids: bool,
    ) -> None:
        self.token_ids = token_ids
        self._tokenizer = tokenizer
        self._n = n
        self._logprobs = logprobs
        self.scored = logprobs is not None
        self._echo = echo
        self._heads = [
            (prompt.text if prompt.text is not None else tokenizer.decode(prompt.token_ids)) if echo else ""
            for prompt in prompts
        ]

    def choice(self, place: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """A whole choice of the prompt at ``place``."""
        return self._object(place, output, choice, _Sent())

    def pieces(
        self, place: int, output: RequestOutput, choice: CompletionOutput, sent: _Sent
    ) -> Iterator[dict[str, Any]]:
        """What is new in a choice since ``sent``."""
        new = len(choice.text) > sent.characters or (self._echo and not sent.started)
        if new or choice.finish_reason is not None:
            yield self._object(place, output, choice, sent)

    def _object(
        self, place: int, output: RequestOutput, choice: CompletionOutput, sent: _Sent
    ) -> dict[str, Any]:
        first = not sent.started
        head = self._heads[place] if first else ""
        logprobs = None
        if self._logprobs is not None and choice.logprobs is not None:
            ids = choice.token_ids[sent.tokens :]
            entries: list[Any] = list(choice.logprobs[sent.tokens :])
            offset = sent.characters + len(self._heads[place])
            if first and self._echo and output.prompt_logprobs is not None:
                ids = [*output.prompt_token_ids, *ids]
                entries = [*output.prompt_logprobs, *entries]
                offset = 0
            logprobs = completion_logprobs(self._tokenizer, ids, entries, self._logprobs, offset)
        found = {
            "index": place * self._n + choice.index,
            "text": head + choice.text[sent.characters :],
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.token_ids:
            found["token_ids"] = choice.token_ids[sent.tokens :]
            found["prompt_token_ids"] = output.prompt_token_ids if first else None
        return found


class ChatForm:
    """``/v1/chat/completions``."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, logprobs: int | None, tools: bool, token_ids: bool) -> None:
        self.token_ids = token_ids
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self.scored = logprobs is not None
        self._tools = tools

    def prompt_ids(self, output: RequestOutput) -> dict[str, Any]:
        """What ``return_token_ids`` adds to the answer, or to its first chunk."""
        return {"prompt_token_ids": output.prompt_token_ids} if self.token_ids else {}

    def choice(self, place: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """A whole choice."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        reason = choice.finish_reason
        if self._tools:
            parser = ToolCallParser()
            deltas = parser.push(choice.text, final=True)
            message["content"] = "".join(d["content"] for d in deltas if "content" in d) or None
            if parser.calls:
                message["tool_calls"] = parser.calls
                reason = "tool_calls" if reason == "stop" else reason
        found = {
            "index": choice.index,
            "message": message,
            "logprobs": self._scored(choice, 0),
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
        }
        return {**found, "token_ids": choice.token_ids} if self.token_ids else found

    def pieces(
        self, place: int, output: RequestOutput, choice: CompletionOutput, sent: _Sent
    ) -> Iterator[dict[str, Any]]:
        """What is new in a choice since ``sent``, the role first."""
        if not sent.started:
            yield self._piece(choice, {"role": "assistant", "content": ""}, None, None)
        text, reason = choice.text[sent.characters :], choice.finish_reason
        deltas: list[dict[str, Any]] = [{"content": text}] if text else []
        if self._tools:
            sent.parser = sent.parser or ToolCallParser()
            deltas = sent.parser.push(text, final=reason is not None)
            if sent.parser.calls and reason == "stop":
                reason = "tool_calls"
        if reason is not None and not deltas:
            deltas = [{}]
        for number, delta in enumerate(deltas):
            last = number == len(deltas) - 1
            scored = self._scored(choice, sent.tokens) if last else None
            piece = self._piece(choice, delta, scored, reason if last else None)
            if self.token_ids:
                piece["token_ids"] = choice.token_ids[sent.tokens :] if last else []
            yield piece

    def _piece(
        self, choice: CompletionOutput, delta: dict[str, Any], logprobs: Any, reason: str | None
    ) -> dict[str, Any]:
        piece = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return piece if reason is None else {**piece, "stop_reason": choice.stop_reason}

    def _scored(self, choice: CompletionOutput, start: int) -> dict[str, Any] | None:
        if self._logprobs is None or choice.logprobs is None:
            return None
        return chat_logprobs(
            self._tokenizer, choice.token_ids[start:], choice.logprobs[start:], self._logprobs
        )


Form = CompletionForm | ChatForm


@dataclass(slots=True)
class Chunks:
    """The chunks of a stream, from cumulative outputs; remembers what the client has."""

    form: Form
    head: Head
    include_usage: bool
    _sent: dict[tuple[int, int], _Sent] = field(default_factory=dict)

    def of(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The chunks that ``output`` of the prompt at ``place`` adds; one choice in each."""
        for choice in output.outputs:
            sent = self._sent.setdefault((place, choice.index), _Sent())
            if sent.ended:
                continue
            pieces = list(self.form.pieces(place, output, choice, sent))
            sent.characters = len(choice.text)
            if not pieces:
                continue
            prompt = self.form.prompt_ids(output) if not sent.started else {}
            sent.tokens = len(choice.token_ids)
            sent.started, sent.ended = True, choice.finish_reason is not None
            for piece in pieces:
                yield self._chunk([piece], None) | prompt
                prompt = {}

    def last(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The chunk after all others, with no choices but the usage."""
        return self._chunk([], usage(outputs))

    def _chunk(self, choices: list[dict[str, Any]], used: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {**self.head.fields(), "choices": choices}
        return {**chunk, "usage": used} if self.include_usage else chunk


def whole(form: Form, head: Head, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The answer to a call that did not ask for a stream."""
    choices = [
        form.choice(place, output, choice)
        for place, output in enumerate(outputs)
        for choice in output.outputs
    ]
    prompt = form.prompt_ids(outputs[0])
    return {**head.fields(), "choices": choices, "usage": usage(outputs), **prompt}
