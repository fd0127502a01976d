"""Octavo through its offline API, the prompts handed over at once."""

from __future__ import annotations

import time
from typing import Any

from octavo import LLM, SamplingParams

PACKAGES = ("octavo", "torch", "numpy")


class Session:
    """``options`` go to ``LLM``."""

    def __init__(self, model: str, threads: int, shape: dict[str, int], options: dict[str, Any]) -> None:
        self._llm = LLM(model, num_threads=threads, **options)
        self._cached = 0

    def reset(self) -> None:
        self._llm.reset_prefix_cache()
        self._cached = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float, float]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        start = time.monotonic()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        total_s = time.monotonic() - start
        for output in outputs:
            if output.error is not None:
                raise ValueError(output.error)
        self._cached += sum(output.num_cached_tokens for output in outputs)
        firsts = [o.metrics.first_token_time for o in outputs if o.metrics and o.metrics.first_token_time]
        return [o.outputs[0].token_ids for o in outputs], max(firsts) - start, total_s

    def notes(self) -> dict[str, Any]:
        return {"num_cached_tokens": self._cached}
