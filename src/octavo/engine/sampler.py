"""From logits to token ids and log-probabilities.

A row is a function of its own logits and parameters alone; whatever else is in the batch changes
nothing. The order of operations: logit_bias, penalties, the min_tokens mask, the guide's mask, and
then either the best token (greedy rows never see a temperature) or temperature, top_k, top_p, min_p
and a draw.

The draw is the Gumbel-max trick: the token with the largest ``logit / temperature + noise``, where
the noise of a token is a hash of (seed, choice, output position, token id). It needs no state that
a preemption would have to save, no order among equal tokens, and a logit that moves by a rounding
error changes the token with a probability of that size only.
Source: E. J. Gumbel, 1954; C. J. Maddison et al., "A* Sampling", 2014, section 2.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.request import Guide, Logprob, SamplingParams

#: Reported in place of -inf, which JSON cannot carry.
LOGPROB_FLOOR = -9999.0

NOT_FINITE = "the model's logits for this request are not finite"
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


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], vocab_size: int) -> SampledTokens:
    """Choose one token per row.

    ``logits`` is [n, width] float32, one row per entry of ``rows``, and is left as it was; ids from
    ``vocab_size`` on (a head that was padded wider than the tokenizer) are never chosen. Rows whose
    logits hold a NaN or an infinity where the best should be get an error, not a token.
    """
    logits = logits[:, :vocab_size]
    best, best_ids = logits.max(dim=-1)
    usable = torch.isfinite(best).tolist()
    tokens = best_ids.tolist()
    errors: list[str | None] = [None if ok else NOT_FINITE for ok in usable]
    for i, row in enumerate(rows):
        if errors[i] is None and not (row.params.greedy and _is_plain(row)):
            try:
                tokens[i] = _choose(logits[i].numpy(force=True).copy(), row)
            except GuideError as error:
                errors[i] = str(error)
        if tokens[i] < 0:
            errors[i] = NOTHING_LEFT
        if errors[i] is not None:
            tokens[i] = -1

    logprobs: list[dict[int, Logprob] | None] = [None] * len(rows)
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and errors[i] is None]
    if asked:
        found = score(
            logits[asked],
            [tokens[i] for i in asked],
            [rows[i].params.logprobs or 0 for i in asked],
            vocab_size,
        )
        for i, entry in zip(asked, found, strict=True):
            logprobs[i] = entry
    return SampledTokens(tokens, logprobs, errors)


def score(
    logits: torch.Tensor, targets: Sequence[int], num_best: Sequence[int], vocab_size: int
) -> list[dict[int, Logprob]]:
    """Log-probabilities of the model itself, before temperature, penalties and bias.

    For row i of ``logits`` [n, width]: the ``num_best[i]`` best tokens, best first (equal ones by
    id), and then ``targets[i]`` if it is not among them. The softmax is over the ids below
    ``vocab_size``. Values are finite: ``LOGPROB_FLOOR`` stands for anything below it.
    """
    table = torch.log_softmax(logits[:, :vocab_size].float(), dim=-1).numpy(force=True)
    return [_report(*row) for row in zip(table, targets, num_best, strict=True)]


def _report(logprobs: np.ndarray, target: int, num_best: int) -> dict[int, Logprob]:
    num_best = min(num_best, logprobs.size)
    ids: list[int] = []
    if num_best:
        threshold = np.partition(logprobs, -num_best)[-num_best]
        candidates = np.flatnonzero(logprobs >= threshold)
        ids = candidates[np.argsort(-logprobs[candidates], kind="stable")][:num_best].tolist()
    if target not in ids:
        ids.append(target)
    return {
        i: Logprob(
            logprob=max(float(logprobs[i]), LOGPROB_FLOOR),
            rank=1 + int(np.count_nonzero(logprobs > logprobs[i])),
        )
        for i in ids
    }


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


def _choose(x: np.ndarray, row: SamplingRow) -> int:
    """The token of one row; ``x`` [vocab] float32 is overwritten. -1 when every token is forbidden."""
    p = row.params
    if p.logit_bias:
        for token_id, bias in p.logit_bias.items():
            x[token_id] += bias
    _penalize(x, row)
    if len(row.output_token_ids) < p.min_tokens:
        x[list(row.end_token_ids)] = -np.inf
    if p.guide is not None:
        x[~_allowed(p.guide, row, x.size)] = -np.inf
    top = x.max()
    if top == -np.inf:
        return -1
    if p.greedy:
        return int(x.argmax())

    x -= top
    x /= np.float32(p.temperature)
    ids = _keep(x, p)
    key = noise_key(row.seed, row.choice, len(row.output_token_ids))
    return int(ids[np.argmax(x[ids] + gumbel(key, ids))])


def _allowed(guide: Guide, row: SamplingRow, size: int) -> np.ndarray:
    """[size] bool. A guide that knows fewer tokens forbids the rest."""
    try:
        bits = guide.allowed(row.choice, row.output_token_ids)
    except Exception as error:
        raise GuideError(f"the grammar failed: {error}") from error
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


def _keep(x: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Ids that top_k, top_p and min_p leave, rising. ``x`` has its maximum at 0.

    Tokens as probable as the last one that is kept are kept too: nothing depends on an order of ties.
    """
    ids = np.flatnonzero(x > -np.inf)
    if 0 < p.top_k < ids.size:
        values = x[ids]
        ids = ids[values >= np.partition(values, -p.top_k)[-p.top_k]]
    if p.top_p < 1.0:
        weights = np.exp(x[ids])
        total = weights.sum(dtype=np.float64)
        # All tokens below this weigh less than 1 - top_p together, so none of them is kept: not sorted.
        falling = np.sort(weights[weights >= (1.0 - p.top_p) * total / weights.size])[::-1]
        last = int(np.searchsorted(np.cumsum(falling, dtype=np.float64), p.top_p * total))
        ids = ids[weights >= falling[min(last, falling.size - 1)]]
    if p.min_p > 0.0:
        ids = ids[np.exp(x[ids]) >= np.float32(p.min_p)]
    return ids


def noise_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Two 32-bit words from (seed, choice, output position)."""
    digest = hashlib.sha256(struct.pack("<qqq", seed, choice, position)).digest()
    return struct.unpack_from("<II", digest)


def gumbel(key: tuple[int, int], ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise, float32, one value per token id; a pure function of (key, id).

    The id is mixed with both words of the key by the finalizer of MurmurHash3 (A. Appleby, public
    domain); the 32 bits are a uniform number u in (0, 1), and the noise is -log(-log(1 - u)), the
    form in which a small u, which decides whether an improbable token wins, keeps its precision.
    """
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
    noise: np.ndarray = -np.log(-np.log1p(-u))
    return noise
