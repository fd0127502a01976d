"""Tokens and log-probabilities of rows of logits; the law of the arithmetic is in ``csrc/sample.h``.

Every function takes rows ``[width]``, float32 and dense, of one width, and is, row by row, a function of
that row and its own parameters alone: neither the batch nor the number of threads changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.kernels.native import ThreadPool, _native

Rows = Sequence[np.ndarray] | np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one row's token is drawn; ``key`` are two 32-bit words that its noise is a hash of."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Scores:
    """For row i, entries 0 to ``num_best[i]``: the best tokens, equal ones by id, and then the target.

    ``ids`` and ``ranks`` int64 and ``logprobs`` float64 are ``[n, max(num_best) + 1]``.
    """

    ids: np.ndarray
    ranks: np.ndarray
    logprobs: np.ndarray
    num_best: np.ndarray


def best(rows: Rows, pool: ThreadPool) -> tuple[np.ndarray, np.ndarray]:
    """Each row's largest value, float32 ``[n]``, and the lowest id that has it, int64 ``[n]``.

    Where a row holds a NaN, the value is NaN.
    """
    addresses, width = _addresses(rows)
    values, ids = np.empty(len(rows), dtype=np.float32), np.empty(len(rows), dtype=np.int64)
    if addresses:
        _native.best(rows=addresses, width=width, value=values.ctypes.data, id=ids.ctypes.data, pool=pool)
    return values, ids


def draw(rows: Rows, draws: Sequence[Draw], pool: ThreadPool, isa: str = "auto") -> np.ndarray:
    """Each row's token, int64 ``[n]``; -1 where the maximum is not finite or there is a NaN.

    Raises ValueError for parameters that are not one for each row, or a temperature of 0.
    """
    addresses, width = _addresses(rows)
    params = [
        _native.DrawParams(temperature=d.temperature, top_k=d.top_k, top_p=d.top_p, min_p=d.min_p, key=d.key)
        for d in draws
    ]
    ids = np.empty(len(rows), dtype=np.int64)
    if addresses:
        _native.draw(rows=addresses, width=width, params=params, id=ids.ctypes.data, pool=pool, isa=isa)
    return ids


def gumbel(key: tuple[int, int], ids: np.ndarray) -> np.ndarray:
    """The noise of token ids ``[n]``: standard Gumbel, float32, a pure function of (key, id).

    The id is mixed with both words of the key by the finalizer of MurmurHash3 (A. Appleby, public
    domain); the 32 bits are a uniform number u in (0, 1), and the noise is -log(-log(1 - u)), the
    form in which a small u, which decides whether an improbable token wins, keeps its precision.
    """
    ids = np.ascontiguousarray(ids, dtype=np.int64)
    noise = np.empty(ids.size, dtype=np.float32)
    _native.gumbel(key=key, ids=ids.ctypes.data, n=ids.size, out=noise.ctypes.data)
    return noise


def score(
    rows: Rows, targets: Sequence[int], num_best: Sequence[int], pool: ThreadPool, isa: str = "auto"
) -> Scores:
    """Log-probabilities (natural logarithm, softmax over the row) and ranks, from 1.

    ``num_best[i]`` is at most the width. A row whose maximum is not finite, or with a NaN, has NaN.
    Raises ValueError for a target that is not an id of the row.
    """
    addresses, width = _addresses(rows)
    wanted, counts = np.array(targets, dtype=np.int64), np.array(num_best, dtype=np.int64)
    if not len(rows) == wanted.size == counts.size:
        raise ValueError("a score needs a target and a number of best tokens for every row")
    if addresses and (wanted.min() < 0 or wanted.max() >= width):
        raise ValueError(f"targets must be ids from 0 to {width - 1}")
    if addresses and (counts.min() < 0 or counts.max() > width):
        raise ValueError(f"num_best must be from 0 to {width}")
    most = int(counts.max(initial=0))
    shape = (len(rows), most + 1)
    scores = Scores(np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape), counts)
    if addresses:
        _native.score(
            rows=addresses,
            width=width,
            targets=wanted.ctypes.data,
            num_best=counts.ctypes.data,
            max_best=most,
            out=(scores.ids.ctypes.data, scores.ranks.ctypes.data, scores.logprobs.ctypes.data),
            pool=pool,
            isa=isa,
        )
    return scores


def _addresses(rows: Rows) -> tuple[list[int], int]:
    width = rows[0].size if len(rows) else 0
    for row in rows:
        if row.dtype != np.float32 or row.shape != (width,) or not row.flags.c_contiguous:
            raise ValueError(
                f"rows must be dense float32 [{width}], got {row.dtype} {list(row.shape)} {row.strides}"
            )
    return [row.ctypes.data for row in rows], width
