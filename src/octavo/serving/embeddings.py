"""``/v1/embeddings`` over an encoder: check, tokenize, embed, and answer with numbers or base64."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import torch

from octavo.serving import inputs, metrics
from octavo.serving.async_encoder import AsyncEncoder
from octavo.serving.async_engine import QueueFullError
from octavo.serving.errors import ApiError
from octavo.serving.logs import RequestLog
from octavo.serving.protocol import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from octavo.serving.service import RETRY_AFTER, Answer, Caller, Service, encode, time_limit

#: OpenAI's own limit.
MAX_INPUTS = 2048
FORMATS = ("float", "base64")


class Embeddings(Service):
    """The service behind the routes of a server that has an encoder."""

    def __init__(
        self,
        engine: AsyncEncoder,
        *,
        models: tuple[str, ...],
        request_timeout: float = 3600.0,
        log_prompts: bool = False,
    ) -> None:
        # One thread: truncation is a setting of the tokenizer while it lasts.
        super().__init__(models=models, max_model_len=engine.encoder.config.max_tokens, tokenizer_threads=1)
        self.engine = engine
        self._encoder = engine.encoder
        self._timeout = request_timeout
        self._log_prompts = log_prompts

    async def render_metrics(self) -> bytes:
        """``GET /metrics``."""
        done = self.engine.metrics
        snapshot = metrics.EncoderSnapshot(
            done.tokens, done.texts, done.step_time, self.engine.num_open, self.engine.draining
        )
        return metrics.render(snapshot, self.models[0])

    async def tokenize(self, request: TokenizeRequest) -> bytes:
        """``POST /tokenize``: the ids that stand for the text in :meth:`embed`."""
        self.check_model(request.model)
        if request.messages is not None or request.prompt is None:
            raise ApiError(f"{self.models[0]} is an encoder: give prompt, a text", param="prompt")
        if not request.add_special_tokens:
            raise ApiError(
                "add_special_tokens: false is not possible: an encoder wants its own tokens around a text",
                param="add_special_tokens",
            )
        ids = (await self._encode([request.prompt], False, "prompt"))[0].ids
        return encode({"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len})

    async def detokenize(self, request: DetokenizeRequest) -> bytes:
        """``POST /detokenize``."""
        self.check_model(request.model)
        skip = request.skip_special_tokens
        text = await self.in_thread(
            lambda: self._encoder.tokenizer.decode(request.tokens, skip_special_tokens=skip)
        )
        return encode({"prompt": text})

    async def embed(self, request: EmbeddingRequest, caller: Caller) -> Answer:
        """``POST /v1/embeddings``."""
        model = self.check_model(request.model)
        width = self._encoder.config.hidden_size
        if request.encoding_format not in FORMATS:
            raise ApiError(
                f'encoding_format must be "float" or "base64", got {request.encoding_format!r:.60}',
                param="encoding_format",
            )
        if request.dimensions not in (None, width):
            raise ApiError(
                f"dimensions: vectors of {model} have {width} and cannot be cut, got {request.dimensions}",
                param="dimensions",
            )
        texts = inputs.split_prompts(request.input, "input", MAX_INPUTS)
        log = RequestLog(caller.request_id)
        log.texts(texts if self._log_prompts else ())
        num_tokens = 0
        try:
            async with time_limit(asyncio.get_running_loop().time() + self._timeout, self._timeout):
                encoded = await self._encode(texts, request.truncate, "input")
                num_tokens = sum(len(item.ids) for item in encoded)
                try:
                    vectors = await self.engine.embed(encoded)
                except QueueFullError as error:
                    raise ApiError(
                        str(error), 429, code="queue_full", headers={"Retry-After": RETRY_AFTER}
                    ) from None
        except BaseException as error:
            log.end_of({"prompt_tokens": num_tokens, "texts": len(texts)}, error)
            raise
        log.end_of({"prompt_tokens": num_tokens, "texts": len(texts)}, None)
        data = [
            {"object": "embedding", "index": i, "embedding": _written(row, request.encoding_format)}
            for i, row in enumerate(vectors)
        ]
        used = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return Answer(whole=encode({"object": "list", "data": data, "model": model, "usage": used}))

    async def _encode(self, texts: list[str | list[int]], truncate: bool, param: str) -> Any:
        def work() -> Any:
            for text in texts:
                if isinstance(text, str):
                    inputs.check_length(len(text), self.max_model_len)
            try:
                return self._encoder.encode(texts, truncate=truncate)
            except ValueError as error:
                raise ApiError(str(error), param=param) from None

        return await self.in_thread(work)


def _written(vector: torch.Tensor, form: str) -> list[float] | str:
    """As numbers, or as base64 of float32, little-endian."""
    values = vector.numpy()
    if form == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    numbers: list[float] = values.tolist()
    return numbers
