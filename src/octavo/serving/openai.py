"""OpenAI's calls over the engine: check, tokenize, submit, and answer whole or as a stream."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from octavo.engine import sampler
from octavo.engine.engine import Engine
from octavo.request import RequestOutput, SamplingParams
from octavo.serving import grammar, inputs, metrics
from octavo.serving.answers import ChatForm, Chunks, CompletionForm, Form, Head, whole
from octavo.serving.async_engine import AsyncEngine, EngineStoppedError, QueueFullError, Stream
from octavo.serving.errors import ApiError
from octavo.serving.inputs import Prompt
from octavo.serving.logs import RequestLog
from octavo.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from octavo.serving.service import RETRY_AFTER, Answer, Caller, Service, encode, time_limit, without_paths
from octavo.serving.tools import CLOSE
from octavo.tokenizer import Tokenizer


@dataclass(slots=True)
class _Call:
    """One call: its prompts in the engine, and what came back so far."""

    head: Head
    form: Form
    log: RequestLog
    streams: list[Stream] = field(default_factory=list)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)

    def take(self, place: int, output: RequestOutput) -> None:
        """Keep an output. Raises ApiError when the engine could not compute it."""
        self.outputs[place] = output
        if output.error is not None:
            # These two are what the client asked for; the rest is a fault of ours.
            asked = output.error.startswith((sampler.IMPOSSIBLE_GRAMMAR, sampler.NOTHING_LEFT))
            status, code = (400, "impossible_output") if asked else (500, "engine_error")
            raise ApiError(without_paths(output.error), status, code=code)

    @property
    def in_order(self) -> list[RequestOutput]:
        return [self.outputs[place] for place in sorted(self.outputs)]


class OpenAI(Service):
    """The service behind the routes of a server whose model writes text."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        *,
        models: Sequence[str],
        grammars: grammar.Grammars,
        max_model_len: int,
        request_timeout: float = 3600.0,
        log_prompts: bool = False,
        tokenizer_threads: int = 2,
    ) -> None:
        super().__init__(models=models, max_model_len=max_model_len, tokenizer_threads=tokenizer_threads)
        self.engine = engine
        self.tokenizer = tokenizer
        self._grammars = grammars
        self._timeout = request_timeout
        self._log_prompts = log_prompts

    def close(self) -> None:
        super().close()
        self._grammars.close()

    async def render_metrics(self) -> bytes:
        """``GET /metrics``."""
        engine = self.engine

        def snapshot(it: Engine) -> metrics.Snapshot:
            return metrics.Snapshot(
                copy.deepcopy(it.metrics),
                it.scheduler_stats,
                engine.num_open,
                engine.draining,
                it.disk_stats,
            )

        return metrics.render(await engine.call(snapshot), self.models[0])

    async def tokenize(self, request: TokenizeRequest) -> bytes:
        """``POST /tokenize``."""
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError("give either prompt or messages", param="prompt")
        if request.messages is not None:
            prompt = await self._chat_prompt(
                request.messages, add_generation_prompt=request.add_generation_prompt
            )
            ids = prompt.token_ids
        else:
            text, add = request.prompt or "", None if request.add_special_tokens else False
            inputs.check_length(len(text), self.max_model_len)
            ids = await self.in_thread(lambda: self.tokenizer.encode(text, add_bos=add))
        return encode({"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len})

    def tokenizer_info(self) -> bytes:
        """``GET /tokenizer_info``: the texts of the tokens that end and begin a prompt, null without one."""
        ids = self.tokenizer.eos_token_ids
        bos = self.tokenizer.bos_token_id
        return encode(
            {
                "eos_token": self.tokenizer.id_to_text(ids[0]) if ids else None,
                "bos_token": None if bos is None else self.tokenizer.id_to_text(bos),
            }
        )

    async def detokenize(self, request: DetokenizeRequest) -> bytes:
        """``POST /detokenize``."""
        self.check_model(request.model)
        text = await self.in_thread(
            lambda: self.tokenizer.decode(request.tokens, request.skip_special_tokens)
        )
        return encode({"prompt": text})

    async def complete(self, request: CompletionRequest, caller: Caller) -> Answer:
        """``POST /v1/completions``."""
        model = self.check_model(request.model)
        params = inputs.completion_params(request)
        given = inputs.split_prompts(request.prompt)
        inputs.check_choices(len(given), params.n, self.engine.max_open)
        prompts = await self.in_thread(
            lambda: [inputs.encode_prompt(self.tokenizer, item, self.max_model_len) for item in given]
        )
        form = CompletionForm(
            self.tokenizer,
            prompts,
            n=params.n,
            echo=request.echo,
            logprobs=request.logprobs,
            token_ids=request.return_token_ids,
        )
        call = _Call(
            self._head("cmpl", model, form, caller, request.stream), form, RequestLog(caller.request_id)
        )
        wanted = grammar.of_format(request.response_format)
        jobs = [
            (prompt, await self._guided(params, wanted, "response_format", request)) for prompt in prompts
        ]
        return await self._answer(request, caller, call, jobs)

    async def chat(self, request: ChatRequest, caller: Caller) -> Answer:
        """``POST /v1/chat/completions``."""
        model = self.check_model(request.model)
        params = inputs.chat_params(request)
        inputs.check_choices(1, params.n, self.engine.max_open)
        tools = inputs.tool_use(request)
        wanted, source = grammar.of_format(request.response_format), "response_format"
        if tools.offered and wanted is not None:
            raise ApiError("response_format and tools cannot be combined", param="response_format")
        if tools.forced:
            wanted, source = grammar.of_tools(tools.offered, tools.forced), "tools"
        elif tools.offered and request.parallel_tool_calls is False:
            # One call at most: the answer ends with it.
            params = replace(params, stop=(*params.stop_strings, CLOSE))
        params = await self._guided(params, wanted, source, request)
        prompt = await self._chat_prompt(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            tools=tools.offered,
            variables=request.chat_template_kwargs,
        )
        form = ChatForm(
            self.tokenizer,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            tools=bool(tools.offered),
            token_ids=request.return_token_ids,
        )
        head = self._head("chatcmpl", model, form, caller, request.stream)
        call = _Call(head, form, RequestLog(caller.request_id))
        return await self._answer(request, caller, call, [(prompt, params)])

    async def _guided(
        self, params: SamplingParams, wanted: str | None, param: str, request: Sampling
    ) -> SamplingParams:
        """``params`` with a guide of its own for the grammar ``wanted``."""
        if wanted is None:
            return params
        if request.ignore_eos:
            raise ApiError(f"ignore_eos and {param} exclude each other", param="ignore_eos")
        guide = await self.in_thread(lambda: self._grammars.guide(wanted, param))
        return replace(params, guide=guide)

    # ---- the one path of both

    async def _answer(
        self,
        request: Sampling,
        caller: Caller,
        call: _Call,
        jobs: Sequence[tuple[Prompt, SamplingParams]],
    ) -> Answer:
        call.log.prompts([prompt for prompt, _ in jobs] if self._log_prompts else ())
        deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            await self._submit(request, caller, call, jobs)
            if request.stream:
                wants_usage = request.stream_options is not None and request.stream_options.include_usage
                chunks = Chunks(call.form, call.head, wants_usage)
                return Answer(
                    events=self._events(call, chunks, deadline),
                    on_end=lambda: self._end(call, asyncio.CancelledError()),
                )
            async with time_limit(deadline, self._timeout):
                async for place, output in merge(call.streams):
                    call.take(place, output)
        except BaseException as error:
            self._end(call, error)
            raise
        self._end(call, None)
        made = partial(_whole_of, call)
        return Answer(whole=await self._beside(made) if call.form.scored else made())

    async def _beside(self, make: Callable[[], bytes]) -> bytes:
        """Log-probabilities of a long prompt are a second's work, which the event loop must not do."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, make)

    async def _events(self, call: _Call, chunks: Chunks, deadline: float) -> AsyncIterator[bytes]:
        """Server-sent events. An error becomes an event of its own, and then the stream ends."""
        failure: BaseException | None = None
        try:
            async with time_limit(deadline, self._timeout):
                async for place, output in merge(call.streams):
                    made = partial(_events_of, chunks, place, output)
                    events = await self._beside(made) if call.form.scored else made()
                    if events:
                        yield events
                    call.take(place, output)
            if chunks.include_usage:
                yield _event(chunks.last(call.in_order))
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            failure = error
            yield b"data: " + error.body() + b"\n\n"
        except EngineStoppedError as error:
            failure = error
            yield b"data: " + ApiError(str(error), 503).body() + b"\n\n"
        except BaseException as error:
            failure = error
            raise
        finally:
            self._end(call, failure)

    async def _submit(
        self,
        request: Sampling,
        caller: Caller,
        call: _Call,
        jobs: Sequence[tuple[Prompt, SamplingParams]],
    ) -> None:
        for prompt, params in jobs:
            try:
                stream = await self.engine.submit(
                    prompt.token_ids,
                    params,
                    label=caller.request_id,
                    priority=request.priority,
                    cache_salt=caller.salted(request.cache_salt),
                )
            except ValueError as error:
                name = str(error).split(maxsplit=1)[0]
                known = name in request.__struct_fields__
                raise ApiError(str(error), param=name if known else None) from None
            except QueueFullError as error:
                raise ApiError(
                    str(error), 429, code="queue_full", headers={"Retry-After": RETRY_AFTER}
                ) from None
            except EngineStoppedError as error:
                raise ApiError(str(error), 503, code="unavailable") from None
            call.streams.append(stream)

    def _end(self, call: _Call, error: BaseException | None) -> None:
        """However it ended: nothing of the call is left in the engine, and the log has its line."""
        for stream in call.streams:
            self.engine.abort(stream)
        call.log.end(call.in_order, error)

    def _head(self, prefix: str, model: str, form: Form, caller: Caller, stream: bool) -> Head:
        kind = form.chunk_object if stream else form.whole_object
        return Head(id=f"{prefix}-{caller.request_id}", created=int(time.time()), model=model, object=kind)

    async def _chat_prompt(self, messages: Sequence[dict[str, Any]], **settings: Any) -> Prompt:
        return await self.in_thread(
            lambda: inputs.encode_chat(self.tokenizer, messages, self.max_model_len, **settings)
        )


def _whole_of(call: _Call) -> bytes:
    return encode(whole(call.form, call.head, call.in_order))


def _events_of(chunks: Chunks, place: int, output: RequestOutput) -> bytes:
    return b"".join(map(_event, chunks.of(place, output)))


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


async def merge(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of several streams as they come, with the place of their stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    # One place: a reader that is slow holds the tasks back, and the streams keep only the latest.
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException] = asyncio.Queue(1)

    async def pump(place: int, stream: Stream) -> None:
        try:
            async for output in stream:
                await queue.put((place, output))
        except EngineStoppedError as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(pump(place, stream)) for place, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= item[1].finished
            yield item
    finally:
        for task in tasks:
            task.cancel()
