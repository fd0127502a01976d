"""The sampler's choice in a few lines of numpy, one row at a time: what the native one has to do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.kernels.sample import Draw

Exp = Callable[[np.ndarray], np.ndarray]


def draw(row: np.ndarray, how: Draw, exp: Exp = np.exp) -> int:
    """The token of ``row`` [vocab] float32, whose maximum is finite; ``exp`` is of float32 arrays."""
    x = soften(row, how)
    ids = keep(x, how, exp)
    return int(ids[np.argmax(x[ids] + gumbel(how.key, ids))])


def soften(row: np.ndarray, how: Draw) -> np.ndarray:
    """What overflows is as good as forbidden."""
    with np.errstate(over="ignore"):
        y: np.ndarray = (row - row.max()) / np.float32(how.temperature)
    return y


def keep(x: np.ndarray, how: Draw, exp: Exp = np.exp) -> np.ndarray:
    """Ids that top_k, top_p and min_p leave, rising. ``x`` has its maximum at 0.

    Tokens as probable as the last one that is kept are kept too: nothing depends on an order of ties.
    """
    ids = np.flatnonzero(x > -np.inf)
    if 0 < how.top_k < ids.size:
        ids = ids[x[ids] >= np.sort(x[ids])[-how.top_k]]
    if how.top_p < 1.0:
        weights = exp(x[ids])
        falling = np.sort(weights)[::-1]
        reached = np.cumsum(falling, dtype=np.float64)
        last = int(np.searchsorted(reached, how.top_p * weights.sum(dtype=np.float64)))
        ids = ids[weights >= falling[min(last, falling.size - 1)]]
    if how.min_p > 0.0:
        ids = ids[exp(x[ids]) >= np.float32(how.min_p)]
    return ids


def gumbel(key: tuple[int, int], ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise of token ids: u is a float32, the logarithms are of float64."""
    h = ids.astype(np.uint32) * np.uint32(0x9E3779B1)
    for word in key:
        h ^= np.uint32(word)
        h ^= h >> np.uint32(16)
        h *= np.uint32(0x85EBCA6B)
        h ^= h >> np.uint32(13)
        h *= np.uint32(0xC2B2AE35)
        h ^= h >> np.uint32(16)
    u = (h.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    u = np.minimum(u, np.float32(1.0 - 2.0**-24))
    noise: np.ndarray = -np.log(-np.log1p(-u.astype(np.float64)))
    return noise.astype(np.float32)
