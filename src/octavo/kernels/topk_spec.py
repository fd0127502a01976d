"""What top-k attention's implementations share: the numbers that decide a row, and what is kept of it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TopkSpec(NamedTuple):
    """``recent`` of the ``topk`` places (at most as many as there are keys) are for the last visible keys."""

    topk: int
    recent: int
    causal: bool
    scale: float
    l2: bool


class Kept(NamedTuple):
    """What the backward pass needs of the forward one.

    ``lse`` ``[b, h, n]``; ``position`` int32 and ``weight`` ``[b, h, n, topk]``: a row's kept keys in
    order of position and their softmax weights, then -1 and 0 in unused places. ``position`` and
    ``weight`` have no rows when nothing was to be saved.
    """

    lse: torch.Tensor
    position: torch.Tensor
    weight: torch.Tensor

    @staticmethod
    def empty(q: torch.Tensor, topk: int, *, save: bool) -> Kept:
        """Room for the rows of ``q`` ``[b, h, n, d]``; float16 and bfloat16 are computed in float32."""
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        shape = (*q.shape[:3], topk) if save else (0, topk)
        return Kept(
            torch.empty(q.shape[:3], dtype=dtype, device=q.device),
            torch.empty(shape, dtype=torch.int32, device=q.device),
            torch.empty(shape, dtype=dtype, device=q.device),
        )


def empty_heads(x: torch.Tensor) -> torch.Tensor:
    """Shaped as ``x`` ``[b, h, n, d]``, in memory as ``[b, n, h, d]``: heads merge without a copy."""
    b, h, n, d = x.shape
    return torch.empty(b, n, h, d, dtype=x.dtype, device=x.device).transpose(1, 2)
