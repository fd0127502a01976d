"""Which keys a step's answers read, counted by spans of 16 positions: only for requests that ask."""

from __future__ import annotations

import numpy as np
import torch

from octavo.batch import SPAN, AttnReads


def note(reads: AttnReads, num_heads: int, window: int | None, position: torch.Tensor | None) -> None:
    """Add a layer to ``reads``.

    ``position`` ``[num_tokens, num_heads, k]`` int32 holds the kept keys, then -1. A row of nothing but -1,
    and every row where it is None, was dense and read all that it sees.
    """
    spans = -(-max(reads.num_keys) // SPAN)
    read = np.zeros((len(reads.num_keys), spans), dtype=np.int64)
    seen = np.stack([num_heads * _visible(n, spans, window) for n in reads.num_keys])
    kept = None if position is None else position[reads.rows].flatten(1).numpy()
    for i in range(len(read)):
        found = kept[i][kept[i] >= 0] if kept is not None else np.empty(0, dtype=np.int32)
        read[i] = np.bincount(found // SPAN, minlength=spans) if len(found) else seen[i]
    reads.layers.append((read, seen))


def _visible(num_keys: int, spans: int, window: int | None) -> np.ndarray:
    """``[spans]`` int64: how many of the keys that a query sees lie in each span."""
    first = 0 if window is None else max(0, num_keys - window)
    start = np.arange(spans, dtype=np.int64) * SPAN
    visible: np.ndarray = np.clip(num_keys - start, 0, SPAN) - np.clip(first - start, 0, SPAN)
    return visible
