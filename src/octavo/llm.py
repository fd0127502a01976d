"""The offline API: prompts in, answers out, in one process and one thread."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine.encoder import ClassificationOutput, EncoderEngine
from octavo.engine.engine import Engine
from octavo.engine.metrics import EngineMetrics
from octavo.request import RequestOutput, SamplingParams
from octavo.tokenizer import Tokenizer
from octavo.tokenizer.encoder import Text
from octavo.weights.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    import torch

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt of a call; ``encode`` gives its token ids, or raises ValueError."""

    text: str | None
    encode: Callable[[], Sequence[int]]
    params: SamplingParams
    priority: int
    cache_salt: str


class LLM:
    """A model, loaded and ready to answer.

    Args:
        model: a name that ``octavo models`` lists, a folder of safetensors, a ``.gguf`` file, or a
            Hugging Face repository. An encoder serves :meth:`embed` and :meth:`classify`; of the options
            only ``num_threads`` and ``device`` matter to it.
        attention: "fused", "sdpa", "bmm", "loop" or "reference".
        weights: how matrices are kept. "auto": in the checkpoint's own bits, expanded in registers to the
            same numbers. "float32", "float16" or "bfloat16": expanded or rounded at load. "q8_0" or "q4_1": a
            checkpoint that is not quantised is quantised at load. Only "fused" attention has linear
            layers for all of them; beside the others weights are float32.
        activations: "float32", or "int8": what is multiplied with the weights is rounded to 8 bits a value,
            each 32 with a scale of their own. Faster, and other numbers. Only with "fused" attention, and for
            quantised weights; a product with float weights among others keeps float32, with a warning.
        block_size: tokens per KV block, a power of two from 1 to 256.
        kv_dtype: how K and V are stored, "float32" or "float16".
        kv_cache_memory: size of the KV pool, such as "2GiB" or a number of bytes. By default half of
            the memory that the process may still use, but never more than ``max_num_seqs`` sequences
            of ``max_model_len`` need; pages are taken from the system as blocks are first written.
        num_blocks: size of the KV pool in blocks, in place of ``kv_cache_memory``.
        max_model_len: longest prompt and answer together, in tokens; by default the model's own limit.
            What the pool cannot hold is lowered to what it holds, with a warning.
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: tokens that one step computes at most.
        enable_prefix_caching: reuse the K and V of prompts that start alike.
        cache_dir: a folder in which sealed blocks are kept, so that the next process reuses them; one process
            at a time may have it, until :meth:`close` or its end.
        cache_disk: what ``cache_dir`` may take on disk, such as "20GiB" or a number of bytes.
        history: "exact", or "compact": a query reads the blocks that lie wholly before its last
            ``history_window`` tokens in compact form, which takes about a third of float32 K and V's memory
            and gives slightly other numbers. Needs "fused" attention and a block size that is a multiple of
            16.
        history_window: tokens that are always read as stored, a multiple of the block size.
        history_values: how compact blocks hold V, "int8" or "int4".
        history_tokens: the length of conversation that the memory is divided for, between blocks as stored
            and compact ones; by default ``max_model_len``.
        history_budget: caps what a conversation has of blocks, in tokens or bytes ("64k", "1GiB"); beyond it
            its oldest compact blocks are read as summaries, and answers get worse the more they need of
            these. ``RequestOutput.history`` says how much attention fell on them. Needs compact history.
        history_recall: a summary that draws more than this share of a query's attention, between 0 and 1, is
            read as the blocks that it stands for, from memory or ``cache_dir``, where they are there.
        num_threads: CPU threads; by default the CPUs that the process may use.
        seed: makes the seeds that are drawn for requests without one reproducible.
        device: where the model runs.
        attn_topk: keys that attention keeps for each query and head, half of them the most recent, in prompts
            and answers alike; 0 is dense attention, "auto" as many keys as matter, "lean" fewer of these.
            Requests may say otherwise in ``SamplingParams.attn_topk``. Needs "fused" attention and a block
            size that is a multiple of 16.
        attn_topk_mode: "exact", or "fast": only keys of the spans that rank highest compete, and some that
            should be kept are missed. Takes a 31st of float16 K and V's memory more.
        attn_topk_tail: keys that are not kept enter by the means of their spans of 16, so the result is
            nearer to dense; by default with "auto" and "lean" only. Takes a 32nd of float16 K and V's memory
            more.
        topk_planes: keep what top-k attention needs in the cache for requests that ask for it, though the
            engine's own ``attn_topk`` is 0; takes 0.15 (float32) to 0.3 (float16) of K and V's memory.
        dense_layers: layers, by number from 0, whose attention is dense for everybody.

    Raises:
        ValueError: an option out of its range, or a model that cannot be loaded; one sentence each.
    """

    model_name: str

    def __init__(  # noqa: PLR0913 - every option of the engine, by name
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        attention: str = "fused",
        weights: str = "auto",
        activations: str = "float32",
        block_size: int = 16,
        kv_dtype: str = "float32",
        kv_cache_memory: str | int | None = None,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_disk: str | int = "20GiB",
        history: str = "exact",
        history_window: int = 512,
        history_values: str = "int8",
        history_tokens: int | None = None,
        history_budget: str | int | None = None,
        history_recall: float | None = None,
        num_threads: int | None = None,
        seed: int | None = None,
        device: str = "cpu",
        attn_topk: int | str = 0,
        attn_topk_mode: str = "exact",
        attn_topk_tail: bool | None = None,
        topk_planes: bool = False,
        dense_layers: Sequence[int] = (),
    ) -> None:
        from octavo.engine.build import build

        if not isinstance(model, str | os.PathLike):
            raise ValueError(f"model must be a name or a path, got {type(model).__name__}")
        config = EngineConfig(
            model=str(model),
            cache=CacheConfig(
                block_size=block_size,
                kv_dtype=kv_dtype,
                kv_cache_memory=kv_cache_memory,
                num_blocks=num_blocks,
                enable_prefix_caching=enable_prefix_caching,
                cache_dir=os.fspath(cache_dir) if isinstance(cache_dir, os.PathLike) else cache_dir,
                cache_disk=cache_disk,
                history=history,
                history_window=history_window,
                history_values=history_values,
                history_tokens=history_tokens,
                history_budget=history_budget,
                history_recall=history_recall,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
            ),
            attention=attention,
            weights=weights,
            activations=activations,
            device=device,
            num_threads=num_threads,
            seed=seed,
            attn_topk=attn_topk,
            attn_topk_mode=attn_topk_mode,
            attn_topk_tail=attn_topk_tail,
            topk_planes=topk_planes,
            dense_layers=tuple(dense_layers) if isinstance(dense_layers, Sequence) else dense_layers,
        )
        self._attach(build(config), config.model)

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """The offline API over an engine that exists already."""
        llm = cls.__new__(cls)
        llm._attach(engine, engine.config.model)
        return llm

    def _attach(self, engine: Engine | EncoderEngine, model_name: str) -> None:
        self._engine = engine
        self.model_name = model_name
        # Outputs that a step gave for requests of other calls: a generate() may run between two
        # items of an open stream.
        self._inbox: dict[str, list[RequestOutput]] = {}

    @property
    def engine(self) -> Engine:
        """The engine of a model that writes text. Raises ValueError for an encoder."""
        if not isinstance(self._engine, Engine):
            raise ValueError(f"{self.model_name} is an encoder and writes no text: use embed() or classify()")
        return self._engine

    @property
    def encoder(self) -> EncoderEngine:
        """The engine of an encoder. Raises ValueError for a model that writes text."""
        if isinstance(self._engine, Engine):
            raise ValueError(
                f"{self.model_name} is no encoder: embed() and classify() need one, such as minilm"
            )
        return self._engine

    def close(self) -> None:
        """Save what waits to be saved and give ``cache_dir`` free; a no-op without one. Nothing more can be
        asked afterwards."""
        if isinstance(self._engine, Engine):
            self._engine.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self.engine.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once, in the order given.

        Args:
            prompts: text, a list of token ids, or a list in which each item is either.
            sampling_params: one for all prompts, or one per prompt.
            use_tqdm: show a progress bar with tokens per second, on a terminal.
            priority: lower goes first; one for all or one per prompt.
            cache_salt: prompts share cached blocks only under the same salt; one for all or one each.

        Returns one :class:`RequestOutput` per prompt. Among several prompts a bad one costs only
        itself: its output has ``error`` and no choices.

        Raises:
            ValueError: the only prompt is bad, or a list has the wrong length.
        """
        items = _as_prompts(prompts)
        jobs = self._jobs(
            [(p if isinstance(p, str) else None, self._encoder(p)) for p in items],
            sampling_params,
            priority,
            cache_salt,
        )
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        A message is a mapping with "role" and "content". Everything else is as in :meth:`generate`.
        """
        conversations = _as_conversations(messages)
        encoders = [(None, self._chat_encoder(c)) for c in conversations]
        return self._run(self._jobs(encoders, sampling_params, priority, cache_salt), use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Iterator[RequestOutput]:
        """Yield the output so far after every token; the last one is ``finished``.

        The request enters the engine at the first item; a bad prompt raises ValueError there. Closing
        the iterator early aborts the request. Several streams may be open at once.
        """
        encode = self._encoder(prompt)
        text = prompt if isinstance(prompt, str) else None
        params = SamplingParams() if sampling_params is None else sampling_params
        yield from self._stream(_Job(text, encode, params, priority, cache_salt))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Iterator[RequestOutput]:
        """As :meth:`stream`, for one conversation through the model's chat template."""
        encode = self._chat_encoder(messages)
        params = SamplingParams() if sampling_params is None else sampling_params
        yield from self._stream(_Job(None, encode, params, priority, cache_salt))

    def embed(self, texts: Text | Sequence[Text], *, truncate: bool = False) -> torch.Tensor:
        """One vector for each text, ``[len(texts), hidden_size]`` float32, in the order given.

        Encoders only. A text is a string or a pair of strings (a tuple). How vectors are pooled, and
        whether they are normalised, is read from the checkpoint. A text gives the same vector in any company.

        Raises:
            ValueError: a text that is too long for the model, unless ``truncate`` cuts it.
        """
        return self.encoder.embed(_as_texts(texts), truncate=truncate)

    def classify(self, texts: Text | Sequence[Text], *, truncate: bool = False) -> list[ClassificationOutput]:
        """The label and the scores of each text or pair, by the checkpoint's classification head.

        Raises:
            ValueError: as :meth:`embed`, and for a checkpoint without such a head.
        """
        return self.encoder.classify(_as_texts(texts), truncate=truncate)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.reset_prefix_cache()

    def metrics(self) -> EngineMetrics:
        """Counters and times since the start, a copy."""
        return copy.deepcopy(self.engine.metrics)

    def _encoder(self, prompt: Prompt) -> Callable[[], Sequence[int]]:
        def encode() -> Sequence[int]:
            if not isinstance(prompt, str):
                return prompt
            ids = self.tokenizer.encode(prompt)
            if not ids:
                raise ValueError(self.tokenizer.EMPTY_PROMPT)
            return ids

        return encode

    def _chat_encoder(self, messages: Sequence[Message]) -> Callable[[], Sequence[int]]:
        return lambda: self.tokenizer.apply_chat_template(messages)

    def _jobs(
        self,
        prompts: Sequence[tuple[str | None, Callable[[], Sequence[int]]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        cache_salt: str | Sequence[str] | None,
    ) -> list[_Job]:
        count = len(prompts)
        params = _one_each("sampling_params", sampling_params, SamplingParams(), count)
        priorities = _one_each("priority", priority, 0, count)
        salts = _one_each("cache_salt", cache_salt, "", count)
        return [_Job(*p, *rest) for p, *rest in zip(prompts, params, priorities, salts, strict=True)]

    def _submit(self, job: _Job) -> str:
        entry_id = self.engine.add_request(
            job.encode(), job.params, prompt=job.text, priority=job.priority, cache_salt=job.cache_salt
        )
        request_id = str(entry_id)
        self._inbox[request_id] = []
        return request_id

    def _step(self) -> list[str]:
        """One step; outputs go to the inbox of their call. Returns the ids of those that have one."""
        outputs = [output for output in self.engine.step() if output.request_id in self._inbox]
        for output in outputs:
            self._inbox[output.request_id].append(output)
        return [output.request_id for output in outputs]

    def _withdraw(self, request_id: str) -> None:
        self.engine.abort(int(request_id))
        del self._inbox[request_id]

    def _run(self, jobs: Sequence[_Job], use_tqdm: bool) -> list[RequestOutput]:
        results: dict[int, RequestOutput] = {}
        open_jobs: dict[str, int] = {}
        try:
            for index, job in enumerate(jobs):
                try:
                    open_jobs[self._submit(job)] = index
                except ValueError as error:
                    if len(jobs) == 1:
                        raise
                    results[index] = _refused(job, str(error))
            with _Progress(len(jobs), use_tqdm) as progress:
                progress.update(len(results), 0)
                num_tokens = 0
                while open_jobs:
                    # Only what the step touched: a call may hold many thousands of prompts.
                    for request_id in self._step():
                        if request_id not in open_jobs:
                            continue
                        index = open_jobs[request_id]
                        before = _num_output_tokens(results[index]) if index in results else 0
                        results[index] = self._inbox[request_id].pop()
                        num_tokens += _num_output_tokens(results[index]) - before
                        if results[index].finished:
                            del open_jobs[request_id], self._inbox[request_id]
                    progress.update(len(jobs) - len(open_jobs), num_tokens)
        finally:
            for request_id in open_jobs:
                self._withdraw(request_id)
        return [results[index] for index in range(len(jobs))]

    def _stream(self, job: _Job) -> Iterator[RequestOutput]:
        request_id = self._submit(job)
        try:
            while True:
                while not self._inbox[request_id]:
                    self._step()
                output = self._inbox[request_id].pop(0)
                yield output
                if output.finished:
                    return
        finally:
            self._withdraw(request_id)


class _Progress:
    """A bar over the prompts of a call, with tokens per second."""

    def __init__(self, total: int, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total, desc="Prompts", unit="prompt", disable=None if shown else True, dynamic_ncols=True
        )
        self._start = self._shown_at = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, done: int, tokens: int) -> None:
        if self._bar.disable:
            return
        now = time.monotonic()
        if done == self._bar.n and now - self._shown_at < 0.2:
            return
        self._shown_at = now
        rate = tokens / max(now - self._start, 1e-9)
        self._bar.set_postfix_str(f"{tokens} tokens, {rate:.1f} tok/s", refresh=False)
        self._bar.n = done
        self._bar.refresh()


def _num_output_tokens(output: RequestOutput) -> int:
    return sum(len(choice.token_ids) for choice in output.outputs)


def _refused(job: _Job, sentence: str) -> RequestOutput:
    return RequestOutput(
        request_id="", prompt=job.text, prompt_token_ids=[], outputs=[], finished=True, error=sentence
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise ValueError(f"prompts must be text, token ids or a list of them, got {type(prompts).__name__}")
    if len(prompts) and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # told apart above
    for index, item in enumerate(prompts):
        if not isinstance(item, str | Sequence) or isinstance(item, bytes | bytearray):
            raise ValueError(f"prompt {index} must be text or token ids, got {type(item).__name__}")
    return list(prompts)  # type: ignore[arg-type]  # told apart above


def _as_texts(texts: Text | Sequence[Text]) -> list[Text]:
    """A tuple of two strings is one pair; a list is always several texts."""
    if isinstance(texts, str) or (isinstance(texts, tuple) and len(texts) == 2):
        return [texts]  # type: ignore[list-item]  # told apart above
    if not isinstance(texts, Sequence) or isinstance(texts, bytes | bytearray):
        raise ValueError(f"texts must be text or a list of texts, got {type(texts).__name__}")
    return list(texts)


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages or isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]  # told apart above
    return list(messages)  # type: ignore[arg-type]  # told apart above


def _one_each(name: str, value: Any, default: Any, count: int) -> list[Any]:
    """``value`` for each of ``count`` prompts: one for all or a list of as many; None is ``default``."""
    kind = type(default)
    if value is None or isinstance(value, kind):
        return [default if value is None else value] * count
    if not isinstance(value, Sequence) or not all(isinstance(item, kind) for item in value):
        raise ValueError(f"{name} must be a {kind.__name__} or a list of them, got {value!r:.80}")
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
    return list(value)
