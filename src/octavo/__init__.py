"""Octavo: serve transformers to many users from little memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.startup import lasting_imports

if TYPE_CHECKING:
    from octavo.kernels.topk import topk_attention
    from octavo.llm import LLM
    from octavo.request import CompletionOutput, Logprob, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "topk_attention"]

_HOME = {
    "LLM": "octavo.llm",
    "CompletionOutput": "octavo.request",
    "Logprob": "octavo.request",
    "RequestOutput": "octavo.request",
    "SamplingParams": "octavo.request",
    "topk_attention": "octavo.kernels.topk",
}


def __getattr__(name: str) -> Any:
    """Public names on demand: ``import octavo`` stays free of torch, so that the command line starts fast."""
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    with lasting_imports():
        return getattr(importlib.import_module(_HOME[name]), name)
