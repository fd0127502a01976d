"""From what a client sent to what the engine takes: prompts as token ids, and SamplingParams."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.request import MAX_N, SamplingParams
from octavo.serving.errors import ApiError
from octavo.serving.protocol import ChatRequest, CompletionRequest, Sampling, Tool
from octavo.tokenizer import Tokenizer, TokenizerError

#: Choices of one call, over all of its prompts.
MAX_CHOICES = MAX_N
MAX_TOOLS = 128
#: The longest tokens of real vocabularies are runs of some 130 spaces or dashes.
MAX_CHARACTERS_PER_TOKEN = 256
#: What a chat says by fields of its own, and not by chat_template_kwargs.
OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "add_bos", "self")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine; ``text`` is what the client wrote, None for ids and chats."""

    token_ids: list[int]
    text: str | None = None


def sampling_params(request: Sampling, **fixed: Any) -> SamplingParams:
    """The parameters of a request; ``fixed`` are those that its kind of request decides.

    Raises ApiError with the field at fault. Without max_tokens the rest of the context may be used.
    """
    given = {
        "n": request.n,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": request.logit_bias,
        "seed": request.seed,
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "stop_token_ids": request.stop_token_ids,
        "min_tokens": request.min_tokens,
        "attn_topk": request.attn_topk,
    }
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(
            **{"max_tokens": None} | fields | fixed,
            ignore_eos=request.ignore_eos,
            skip_special_tokens=request.skip_special_tokens,
            include_stop_str_in_output=request.include_stop_str_in_output,
        )
    except ValueError as error:
        name = str(error).split(maxsplit=1)[0].split("[")[0]
        raise ApiError(str(error), param=name if name in given or name in fixed else None) from None


def refuse_what_is_missing(request: Sampling) -> None:
    """Parameters that OpenAI or other engines have and this one has not."""
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream: true", param="stream_options")


def completion_params(request: CompletionRequest) -> SamplingParams:
    """SamplingParams of ``/v1/completions``, with the prompt's log-probabilities where it echoes them."""
    refuse_what_is_missing(request)
    if request.suffix:
        raise ApiError(
            "suffix is not supported: no model here was trained to fill in the middle", param="suffix"
        )
    if request.best_of is not None and request.best_of != request.n:
        raise ApiError("best_of is not supported: use n and choose among the choices", param="best_of")
    fixed: dict[str, Any] = {}
    if request.logprobs is not None:
        fixed["logprobs"] = request.logprobs
        if request.echo:
            fixed["prompt_logprobs"] = request.logprobs
    return sampling_params(request, **fixed)


def chat_params(request: ChatRequest) -> SamplingParams:
    """SamplingParams of ``/v1/chat/completions``."""
    refuse_what_is_missing(request)
    if request.modalities not in (None, ["text"]):
        raise ApiError('modalities: only ["text"] is possible', param="modalities")
    limit, alias = request.max_tokens, request.max_completion_tokens
    if limit is not None and alias is not None and limit != alias:
        raise ApiError(
            f"max_tokens ({limit}) and max_completion_tokens ({alias}) mean the same and differ",
            param="max_completion_tokens",
        )
    fixed: dict[str, Any] = {} if alias is None else {"max_tokens": alias}
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.logprobs:
        fixed["logprobs"] = request.top_logprobs or 0
    return sampling_params(request, **fixed)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat may call. ``forced``: the functions of which one must be called, or none."""

    offered: tuple[Tool, ...] = ()
    forced: tuple[str, ...] = ()


def tool_use(request: ChatRequest) -> ToolUse:
    """``tools`` and ``tool_choice`` together. Raises ApiError for a choice that is not among the tools."""
    tools, choice = tuple(request.tools or ()), request.tool_choice
    names = tuple(tool.function.name for tool in tools)
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise ApiError(f'tools[{index}].type must be "function"', param=f"tools[{index}].type")
    if len(tools) > MAX_TOOLS:
        raise ApiError(f"at most {MAX_TOOLS} tools are allowed, got {len(tools)}", param="tools")
    if choice == "none" or (choice in (None, "auto") and not tools):
        return ToolUse()
    if choice in (None, "auto"):
        return ToolUse(tools)
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name in names:
            return ToolUse(tools, (name,))
        raise ApiError("tool_choice must name one of the tools", param="tool_choice")
    if choice != "required":
        raise ApiError(
            'tool_choice must be "none", "auto", "required" or a function of the tools', param="tool_choice"
        )
    if not tools:
        raise ApiError('tool_choice "required" needs tools', param="tool_choice")
    return ToolUse(tools, names)


def check_choices(num_prompts: int, n: int, max_open: int) -> None:
    """Refuse a call that asks for more choices than one call may, or than the server could ever run."""
    most = min(MAX_CHOICES, max_open)
    if num_prompts * n > most:
        raise ApiError(
            f"the call asks for {num_prompts * n} choices ({num_prompts} prompts, n = {n}); "
            f"at most {most} are allowed in one call",
            param="n" if num_prompts == 1 else "prompt",
        )


def split_prompts(prompt: Any, param: str = "prompt", most: int = MAX_CHOICES) -> list[str | list[int]]:
    """The texts of a call, each as text or ids, one or several; at most ``most``. Looks at types only."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(f"{param} is an empty list: give text or token ids", param=param)
    if all(type(item) is int for item in prompt):
        return [prompt]
    if len(prompt) > most:
        raise ApiError(f"{param} holds {len(prompt)} {param}s; at most {most} are allowed", param=param)
    for index, item in enumerate(prompt):
        if not isinstance(item, str) and not (
            isinstance(item, list) and all(type(token) is int for token in item)
        ):
            raise ApiError(f"{param}[{index}] must be text or a list of token ids", param=f"{param}[{index}]")
    checked: list[str | list[int]] = prompt
    return checked


def encode_prompt(tokenizer: Tokenizer, prompt: str | list[int], max_model_len: int) -> Prompt:
    """Token ids of a prompt (in a worker thread). Raises ApiError in one sentence."""
    if not isinstance(prompt, str):
        return Prompt(prompt)
    check_length(len(prompt), max_model_len)
    try:
        ids = tokenizer.encode(prompt)
    except TokenizerError as error:
        raise ApiError(str(error), param="prompt") from None
    if not ids:
        raise ApiError(tokenizer.EMPTY_PROMPT, param="prompt")
    return Prompt(ids, prompt)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    max_model_len: int,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """Token ids of a conversation through the model's template (in a worker thread).

    ``variables`` are more for the template. Tools that leave no trace in the prompt are refused: the
    template has no place for them.
    """
    if len(messages) > max_model_len:
        raise ApiError(
            f"there are {len(messages)} messages, more than {max_model_len} tokens (max_model_len) can hold",
            param="messages",
            code="context_length_exceeded",
        )
    more = dict(variables or {})
    for name in OWN_FIELDS:
        if name in more:
            raise ApiError(f"chat_template_kwargs cannot set {name!r}", param=f"chat_template_kwargs.{name}")
    plain = [plain_message(message, i) for i, message in enumerate(messages)]
    num_characters = sum(len(m["content"]) for m in plain if isinstance(m.get("content"), str))
    check_length(num_characters, max_model_len)
    try:
        ids = tokenizer.apply_chat_template(plain, add_generation_prompt, **more)
        if not tools:
            return Prompt(ids)
        offered = [msgspec.to_builtins(tool) for tool in tools]
        with_tools = tokenizer.apply_chat_template(plain, add_generation_prompt, tools=offered, **more)
        if with_tools == ids:
            raise ApiError("the chat template of this model has no place for tools", param="tools")
        return Prompt(with_tools)
    except (TokenizerError, TypeError) as error:
        raise ApiError(str(error), param="messages") from None


def check_length(num_characters: int, max_model_len: int) -> None:
    """Refuse text that cannot fit whatever its tokens are, before it is tokenized."""
    if num_characters > max_model_len * MAX_CHARACTERS_PER_TOKEN:
        raise ApiError(
            f"the prompt has {num_characters} characters, more than any {max_model_len} tokens "
            "(max_model_len) can stand for",
            code="context_length_exceeded",
        )


def plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it: content as one string, the arguments of tool calls as objects."""
    plain = {name: value for name, value in message.items() if value is not None or name == "content"}
    if isinstance(plain.get("content"), list):
        plain["content"] = _joined_parts(plain["content"], f"messages[{index}].content")
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _joined_parts(parts: list[Any], where: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                f"{where}[{number}] must be a text part; this model takes no other kind", param=where
            )
        texts.append(part["text"])
    return "".join(texts)


def _plain_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        # What a model once wrote need not be JSON: then it goes back as the text that it was.
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
