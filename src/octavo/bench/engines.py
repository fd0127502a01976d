"""The engines that the throughput bench compares: a row in ``ENGINES`` is all that a new one needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Reply:
    """The answers to one batch of prompts; times in seconds from the moment that all were handed over.

    ``first_token_s`` is when the first token of the *last* request to get one was there.
    """

    token_ids: list[list[int]]
    first_token_s: float
    total_s: float


class Session(Protocol):
    """A loaded engine, greedy, that goes on past the end token."""

    def reset(self) -> None:
        """Forget every prompt that was seen, so that the next starts cold."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Reply:
        """Answer all prompts, each with exactly ``new_tokens`` tokens."""
        ...

    def notes(self) -> dict[str, Any]:
        """What is worth knowing about how it ran."""
        ...


class OctavoSession:
    """Octavo through its offline API, the prompts handed over at once."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        from octavo.llm import LLM

        self._llm = LLM(model, num_threads=threads, **options)
        self._cached = 0

    def reset(self) -> None:
        self._llm.reset_prefix_cache()
        self._cached = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Reply:
        from octavo.request import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        start = time.monotonic()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        total_s = time.monotonic() - start
        for output in outputs:
            if output.error is not None:
                raise ValueError(output.error)
        self._cached += sum(output.num_cached_tokens for output in outputs)
        firsts = [o.metrics.first_token_time for o in outputs if o.metrics and o.metrics.first_token_time]
        return Reply([o.outputs[0].token_ids for o in outputs], max(firsts) - start, total_s)

    def notes(self) -> dict[str, Any]:
        return {"num_cached_tokens": self._cached}


class TransformersSession:
    """transformers' ``generate`` on one static, left-padded batch, with its sdpa attention."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        from octavo.bench.handover import transformers_model

        torch.set_num_threads(threads)
        self._model = transformers_model(model)

    def reset(self) -> None:
        """Nothing to forget: every call starts from an empty cache."""

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> Reply:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        first: list[float] = []

        def note_first(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            first.append(time.monotonic())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        start = time.monotonic()
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[note_first],
        )
        total_s = time.monotonic() - start
        return Reply(out[:, width:].tolist(), first[0] - start, total_s)

    def notes(self) -> dict[str, Any]:
        return {"attention": self._model.config._attn_implementation}


#: name -> constructor(model, threads, options); the first row is the one that the others are compared with.
ENGINES: dict[str, Callable[[str, int, dict[str, Any]], Session]] = {
    "octavo": OctavoSession,
    "transformers": TransformersSession,
}
