"""From logits to token ids and log-probabilities.

A row is a function of its own logits and parameters alone; whatever else is in the batch changes
nothing. The order of operations: logit_bias, penalties, the min_tokens mask, the guide's mask, and
then either the best token (greedy rows never see a temperature) or temperature, top_k, top_p, min_p
and a draw.

The draw is the Gumbel-max trick: the token with the largest ``logit / temperature + noise``, where
the noise of a token is a hash of (seed, choice, output position, token id). It needs no state that
a preemption would have to save, no order among equal tokens, and a logit that moves by a rounding
error changes the token with a probability of that size only.
Tokens as probable as the last one that top_k or top_p keeps are kept too: nothing depends on an order
of ties. The choice over a batch is native (``octavo.kernels.sample``); what moves logits, which few
requests ask for, is numpy's, on a copy of the row.
Source: E. J. Gumbel, 1954; C. J. Maddison et al., "A* Sampling", 2014, section 2.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels import sample as kernel
from octavo.kernels.native import ThreadPool
from octavo.request import Guide, Logprob, SamplingParams

#: Reported in place of -inf, which JSON cannot carry.
LOGPROB_FLOOR = -9999.0

NOT_FINITE = "the model's logits for this request are not finite"
IMPOSSIBLE_GRAMMAR = "the grammar cannot be followed"
NOTHING_LEFT = "logit_bias, min_tokens and the grammar together forbid every token of the vocabulary"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What the choice of one row's token depends on, beside its logits.

    ``end_token_ids`` are forbidden until ``params.min_tokens`` tokens have been put out.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    end_token_ids: Sequence[int] = ()
    seed: int = 0
    choice: int = 0


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One entry per row. Where ``errors`` has a sentence, the token is -1 and there are no logprobs."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]
    errors: list[str | None]


class GuideError(ValueError):
    """A guide that failed; costs its own request only."""


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], vocab_size: int, pool: ThreadPool
) -> SampledTokens:
    """Choose one token per row.

    ``logits`` is [n, width] float32, one row per entry of ``rows``, and is left as it was; ids from
    ``vocab_size`` on (a head that was padded wider than the tokenizer) are never chosen. Rows whose
    logits hold a NaN or an infinity where the best should be get an error, not a token.
    """
    table = _table(logits, vocab_size)
    values, ids = kernel.best(table, pool)
    tokens: list[int] = ids.tolist()
    errors: list[str | None] = [None if ok else NOT_FINITE for ok in np.isfinite(values).tolist()]
    usable = [i for i, error in enumerate(errors) if error is None]
    moved: dict[int, np.ndarray] = {}
    for i in usable:
        if not _is_plain(rows[i]):
            try:
                moved[i] = _moved(table[i], rows[i])
            except GuideError as failure:
                errors[i] = str(failure)
    if moved:
        values, ids = kernel.best(list(moved.values()), pool)
        for i, value, token in zip(moved, values.tolist(), ids.tolist(), strict=True):
            tokens[i] = token
            if not math.isfinite(value):
                errors[i] = NOTHING_LEFT if value == -math.inf else NOT_FINITE

    drawn = [i for i in usable if errors[i] is None and not rows[i].params.greedy]
    if drawn:
        ids = kernel.draw(
            [moved.get(i, table[i]) for i in drawn], [_draw(rows[i], table.shape[1]) for i in drawn], pool
        )
        for i, token in zip(drawn, ids.tolist(), strict=True):
            tokens[i] = token
    for i, error in enumerate(errors):
        if error is not None:
            tokens[i] = -1

    logprobs: list[dict[int, Logprob] | None] = [None] * len(rows)
    asked = [i for i in usable if errors[i] is None and rows[i].params.logprobs is not None]
    if asked:
        found = _score(
            [table[i] for i in asked],
            [tokens[i] for i in asked],
            [rows[i].params.logprobs or 0 for i in asked],
            pool,
        )
        for i, entry in zip(asked, found, strict=True):
            logprobs[i] = entry
    return SampledTokens(tokens, logprobs, errors)


def score(
    logits: torch.Tensor,
    targets: Sequence[int],
    num_best: Sequence[int],
    vocab_size: int,
    pool: ThreadPool,
) -> list[dict[int, Logprob]]:
    """Log-probabilities of the model itself, before temperature, penalties and bias.

    For row i of ``logits`` [n, width]: the ``num_best[i]`` best tokens, best first (equal ones by
    id), and then ``targets[i]`` if it is not among them. The softmax is over the ids below
    ``vocab_size``. Values are finite: ``LOGPROB_FLOOR`` stands for anything below it.

    Raises ValueError for a row with a NaN or a maximum that is not finite.
    """
    return _score(_table(logits, vocab_size), targets, num_best, pool)


def _table(logits: torch.Tensor, vocab_size: int) -> np.ndarray:
    """[n, vocab_size] on the CPU; the logits' own memory where they are there. numpy starts no threads."""
    table: np.ndarray = logits.numpy(force=True)[:, :vocab_size]
    return table


def _score(
    rows: kernel.Rows, targets: Sequence[int], num_best: Sequence[int], pool: ThreadPool
) -> list[dict[int, Logprob]]:
    capped = [min(count, row.size) for count, row in zip(num_best, rows, strict=True)]
    scores = kernel.score(rows, targets, capped, pool)
    found = []
    for i, count in enumerate(capped):
        end = count + 1
        entries = zip(
            scores.ids[i, :end].tolist(),
            scores.logprobs[i, :end].tolist(),
            scores.ranks[i, :end].tolist(),
            strict=True,
        )
        entry = {token: Logprob(logprob=max(x, LOGPROB_FLOOR), rank=rank) for token, x, rank in entries}
        if any(math.isnan(e.logprob) for e in entry.values()):
            raise ValueError(NOT_FINITE)
        found.append(entry)
    return found


def _is_plain(row: SamplingRow) -> bool:
    """True when nothing moves the row's logits before the best one is taken."""
    p = row.params
    return not (
        p.guide is not None
        or p.logit_bias
        or p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
        or len(row.output_token_ids) < p.min_tokens
    )


def _moved(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """A copy of ``logits`` [vocab] after logit_bias, the penalties and the min_tokens mask."""
    x = logits.copy()
    for token_id, bias in (row.params.logit_bias or {}).items():
        x[token_id] += bias
    _penalize(x, row)
    if len(row.output_token_ids) < row.params.min_tokens:
        x[list(row.end_token_ids)] = -np.inf
    if row.params.guide is not None:
        x[~_allowed(row.params.guide, row, x.size)] = -np.inf
    return x


def _allowed(guide: Guide, row: SamplingRow, size: int) -> np.ndarray:
    """[size] bool. A guide that knows fewer tokens forbids the rest."""
    try:
        bits = guide.allowed(row.choice, row.output_token_ids)
    except ValueError as error:
        raise GuideError(f"{IMPOSSIBLE_GRAMMAR}: {error}") from error
    except Exception as error:
        raise GuideError(f"the grammar failed: {type(error).__name__}: {error}") from error
    mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little", count=size)
    return mask.astype(bool)


def _penalize(x: np.ndarray, row: SamplingRow) -> None:
    """Repetition as in Keskar et al., "CTRL", 2019, section 4.1; the other two as OpenAI documents them."""
    p = row.params
    if p.repetition_penalty != 1.0:
        seen = np.fromiter((*row.prompt_token_ids, *row.output_token_ids), dtype=np.int64)
        values = x[seen]
        x[seen] = np.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and row.output_token_ids:
        ids, counts = np.unique(np.asarray(row.output_token_ids, dtype=np.int64), return_counts=True)
        x[ids] -= (p.presence_penalty + p.frequency_penalty * counts).astype(np.float32)


def _draw(row: SamplingRow, width: int) -> kernel.Draw:
    p = row.params
    return kernel.Draw(
        temperature=p.temperature,
        top_k=min(p.top_k, width),  # beyond it there is nothing to leave out, whatever number was given
        top_p=p.top_p,
        min_p=p.min_p,
        key=noise_key(row.seed, row.choice, len(row.output_token_ids)),
    )


def noise_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Two 32-bit words from (seed, choice, output position)."""
    digest = hashlib.sha256(struct.pack("<qqq", seed, choice, position)).digest()
    return struct.unpack_from("<II", digest)
