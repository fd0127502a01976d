"""Top-k attention with dropout, in torch: the keys are chosen already, a tile of queries at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from octavo.kernels.topk_spec import TopkSpec

#: Scores that exist at once, unless one query alone has more.
TILE_SCORES = 1 << 24


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    spec: TopkSpec,
    dropout_p: float,
) -> torch.Tensor:
    """Attention of ``q`` ``[b, h, n, d]`` to the keys at ``position`` ``[b, h, n, topk]`` (-1 = unused).

    ``k`` and ``v`` are ``[b, h_kv, m, d]``. Several tiles are checkpointed each, so that no more than one
    tile of scores exists in the backward pass either.
    """
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    b, h, n, _ = q.shape
    rows = max(1, TILE_SCORES // max(1, b * h * k.shape[2]))
    if n <= rows:
        return _tile(q, k, v, position, spec, dropout_p)
    tiles = zip(torch.split(q, rows, dim=2), torch.split(position, rows, dim=2), strict=True)
    outs = [checkpoint(_tile, x, k, v, at, spec, dropout_p, use_reentrant=False) for x, at in tiles]
    return torch.cat(outs, dim=2)


def _tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    spec: TopkSpec,
    dropout_p: float,
) -> torch.Tensor:
    with torch.autocast(q.device.type, enabled=False):
        kind = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = (q.to(kind) @ k.to(kind).mT) * spec.scale
        # One column more, which takes what is unused.
        m = k.shape[2]
        kept = torch.zeros(*scores.shape[:3], m + 1, dtype=torch.bool, device=q.device)
        at = position.long()
        kept = kept.scatter_(3, torch.where(at < 0, m, at), True)[..., :m]
        # Not -inf: a row without a key would have NaN for its gradient; its weights are made 0 below.
        weights = torch.softmax(scores.masked_fill(~kept, torch.finfo(kind).min), dim=-1) * kept
        if spec.l2:
            weights = F.normalize(weights, dim=-1)
        return (F.dropout(weights, dropout_p) @ v.to(kind)).to(q.dtype)
