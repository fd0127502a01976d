"""transformers' ``generate`` on one static, left-padded batch, float32, with its sdpa attention."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PACKAGES = ("transformers", "torch")


class Session:
    """``model`` is a folder of safetensors. It has no prefix cache across calls."""

    def __init__(self, model: str, threads: int, shape: dict[str, int], options: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        factory: Any = AutoModelForCausalLM
        self._model = factory.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()

    def reset(self) -> None:
        """Nothing to forget: every call starts from an empty cache."""

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float, float]:
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
        return out[:, width:].tolist(), first[0] - start, total_s

    def notes(self) -> dict[str, Any]:
        return {"attention": self._model.config._attn_implementation}
