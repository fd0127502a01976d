"""Top-k attention in torch, on any device and in any precision, a tile of queries and keys at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from octavo.kernels.topk_spec import Kept, TopkSpec, empty_heads

#: Keys whose scores exist at once, for a tile of queries.
KEY_TILE = 1024
#: Numbers in the largest temporary tensor of a tile of queries, unless one query alone needs more: on the
#: CPU what caches hold, elsewhere what keeps a wide device busy.
TILE_NUMBERS_CPU = 1 << 20
TILE_NUMBERS = 1 << 25
#: Below the order of every score, and above every position.
NO_KEY = torch.iinfo(torch.int64).min
UNUSED = torch.iinfo(torch.int64).max


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    spec: TopkSpec,
    *,
    save: bool,
) -> tuple[torch.Tensor, Kept]:
    """The output, shaped and typed as ``q``, and what its backward pass needs. The arguments are checked."""
    out = empty_heads(q)
    kept = Kept.empty(q, spec.topk, save=save)
    visible = _VisibleKeys(k.shape[0], k.shape[2], key_padding_mask, k.device)
    q_all, k, v = _folded(q, k), _compute(k), _compute(v)
    for tile in _query_tiles(q, k, spec):
        queries = _compute(q_all[:, :, :, tile])
        position = _select(queries, k, visible, visible.count(q.shape[2], spec.causal)[:, tile], spec)
        scores = torch.einsum("bkgnd,bkgnjd->bkgnj", queries, _gather(k, position)) * spec.scale
        weight, lse = _softmax(scores, position >= 0)
        used = weight / _norm(weight) if spec.l2 else weight
        result = torch.einsum("bkgnj,bkgnjd->bkgnd", used, _masked(_gather(v, position), position))
        out[:, :, tile] = result.flatten(1, 2).to(q.dtype)
        kept.lse[:, :, tile] = lse.flatten(1, 2)
        if save:
            kept.position[:, :, tile] = position.flatten(1, 2)
            kept.weight[:, :, tile] = weight.flatten(1, 2)
    return out, kept


def backward(
    out_grad: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kept: Kept,
    spec: TopkSpec,
    grad_threshold: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v from that of the output. ``spec.recent`` and ``.causal`` do not matter.

    With softmax weights p the gradient of score j is p_j (g_j - sum_i p_i g_i), where g is the gradient of
    the weights; under l2, w = p / |p|, the gradient of p is (g_j - w_j sum_i w_i g_i) / |p|.
    """
    q, k, v = qkv
    q_grad = empty_heads(q)
    q_all, grad_all, position_all, weight_all = (
        _folded(x, k) for x in (q, out_grad, kept.position, kept.weight)
    )
    k_all, v_all = _compute(k), _compute(v)
    k_grad, v_grad = torch.zeros_like(k_all).flatten(0, 2), torch.zeros_like(v_all).flatten(0, 2)
    for tile in _query_tiles(q, k_all, spec):
        queries, grad = _compute(q_all[:, :, :, tile]), _compute(grad_all[:, :, :, tile])
        position, weight = position_all[:, :, :, tile].long(), weight_all[:, :, :, tile]
        g = torch.einsum("bkgnd,bkgnjd->bkgnj", grad, _masked(_gather(v_all, position), position))
        used = weight
        if spec.l2:
            norm = _norm(weight)
            used = weight / norm
            g = (g - used * (used * g).sum(-1, keepdim=True)) / norm
        g = weight * (g - (weight * g).sum(-1, keepdim=True))
        g = torch.where(g.abs() < grad_threshold, 0.0, g) * spec.scale
        keys = _masked(_gather(k_all, position), position)
        q_grad[:, :, tile] = torch.einsum("bkgnj,bkgnjd->bkgnd", g, keys).flatten(1, 2).to(q.dtype)
        del keys
        rows = _flat(position, k.shape[2]).flatten()
        _scatter(k_grad, rows, position, g, queries)
        _scatter(v_grad, rows, position, used, grad)
    return q_grad, k_grad.view(k.shape).to(k.dtype), v_grad.view(v.shape).to(v.dtype)


class _VisibleKeys:
    """The keys that are not padding: how many there are up to each position, and the position of each."""

    def __init__(self, batch: int, num_keys: int, mask: torch.Tensor | None, device: torch.device) -> None:
        seen = torch.ones(1, num_keys, dtype=torch.bool, device=device) if mask is None else ~mask
        self.seen = seen.expand(batch, -1)
        self.upto = self.seen.cumsum(-1)
        # Stable: False sorts first, so padding goes behind.
        self.position = torch.sort((~self.seen).to(torch.uint8), dim=-1, stable=True).indices

    def count(self, num_queries: int, causal: bool) -> torch.Tensor:
        """Visible keys of each query: ``[b, n]``."""
        if not causal:
            return self.seen.sum(-1, keepdim=True).expand(-1, num_queries)
        return self.upto[:, self.upto.shape[1] - num_queries :]


def _select(
    queries: torch.Tensor, k: torch.Tensor, visible: _VisibleKeys, count: torch.Tensor, spec: TopkSpec
) -> torch.Tensor:
    """Positions of the kept keys in rising order, then -1: ``[b, h_kv, g, n, topk]`` int64."""
    b, h_kv, g, n, _ = queries.shape
    others = count - spec.recent
    best_order = torch.empty(b, h_kv, g, n, 0, dtype=torch.int64, device=k.device)
    best_position = best_order
    rows = queries.reshape(b, h_kv, g * n, -1)
    last = int(others.max()) if others.numel() else 0
    end = int(visible.position[:, :last].max()) + 1 if last > 0 and spec.topk > spec.recent else 0
    for first in range(0, end, KEY_TILE):
        stop = min(end, first + KEY_TILE)
        scores = (rows @ k[:, :, first:stop].mT * spec.scale).view(b, h_kv, g, n, stop - first)
        competes = visible.upto[:, None, first:stop] <= others[:, :, None]
        competes = (competes & visible.seen[:, None, first:stop])[:, None, None]
        order = torch.where(competes, _order(scores), NO_KEY)
        position = torch.arange(first, stop, device=k.device).expand(order.shape)
        order = torch.cat([best_order, order], dim=-1)
        # Stable, and what came before lies in front: of equal scores the lowest position wins.
        order, rank = torch.sort(order, dim=-1, descending=True, stable=True)
        rank = rank[..., : spec.topk - spec.recent]
        best_order = order[..., : spec.topk - spec.recent]
        best_position = torch.cat([best_position, position], dim=-1).gather(-1, rank)
    chosen = best_position.masked_fill(best_order == NO_KEY, UNUSED)
    chosen = torch.cat([chosen, _recent(visible, count, spec, chosen)], dim=-1)
    chosen = chosen.sort(dim=-1).values[..., : spec.topk]
    chosen = chosen.masked_fill(chosen == UNUSED, -1)
    return torch.nn.functional.pad(chosen, (0, spec.topk - chosen.shape[-1]), value=-1)


def _recent(visible: _VisibleKeys, count: torch.Tensor, spec: TopkSpec, like: torch.Tensor) -> torch.Tensor:
    """Positions of the last visible keys, ``UNUSED`` where there are fewer: ``[b, h_kv, g, n, recent]``."""
    rank = count[:, :, None] - 1 - torch.arange(spec.recent, device=count.device)
    position = visible.position[:, None].expand(-1, count.shape[1], -1).gather(-1, rank.clamp_min(0))
    position = position.masked_fill(rank < 0, UNUSED)
    return position[:, None, None].expand(*like.shape[:-1], spec.recent)


def _order(scores: torch.Tensor) -> torch.Tensor:
    """int64 in the order of the scores: both zeros equal, NaN above infinity, all above the least int64."""
    scores = scores + 0.0
    if scores.dtype == torch.float64:
        bits = scores.view(torch.int64)
        order = bits ^ ((bits >> 63) & torch.iinfo(torch.int64).max)
    else:
        narrow = scores.view(torch.int32)
        order = (narrow ^ ((narrow >> 31) & torch.iinfo(torch.int32).max)).long()
    return order.masked_fill(scores.isnan(), torch.iinfo(torch.int64).max)


def _softmax(scores: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and log-sum-exp over the valid places; 0 and -inf where a row has none."""
    scores = scores.masked_fill(~valid, float("-inf"))
    some = valid.any(dim=-1, keepdim=True)
    weight = torch.softmax(torch.where(some, scores, 0.0), dim=-1)
    return torch.where(valid, weight, 0.0), torch.logsumexp(scores, dim=-1)


def _norm(weight: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of each row; 1 for a row that keeps nothing."""
    norm = weight.norm(dim=-1, keepdim=True)
    return torch.where(norm == 0.0, 1.0, norm)


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous() if x.dtype == torch.float64 else x.float().contiguous()


def _folded(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``[b, h, n, ...]`` -> ``[b, h_kv, h / h_kv, n, ...]``, a view."""
    split = (x.shape[0], k.shape[1], x.shape[1] // k.shape[1], *x.shape[2:])
    return x.view(split)


def _flat(position: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Rows of ``k.flatten(0, 2)`` for positions ``[b, h_kv, ...]``; an unused place: the first key."""
    b, h_kv = position.shape[:2]
    start = torch.arange(b * h_kv, device=position.device).view(b, h_kv, 1, 1, 1) * num_keys
    return position.clamp_min(0) + start


def _gather(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """``[b, h_kv, g, n, j, d]``, the rows of ``x`` ``[b, h_kv, m, d]`` at ``position``."""
    flat = x.flatten(0, 2)
    rows = _flat(position, x.shape[2])
    return flat[rows.flatten()].view(*position.shape, x.shape[3])


def _masked(rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """0 in unused places: what lies there may be infinite, and 0 * inf is NaN."""
    return rows.masked_fill((position < 0)[..., None], 0.0)


def _scatter(
    total: torch.Tensor, rows: torch.Tensor, position: torch.Tensor, factor: torch.Tensor, x: torch.Tensor
) -> None:
    """total[rows] += factor * x for every used place; ``x`` is ``[b, h_kv, g, n, d]``."""
    update = _masked(factor[..., None] * x[..., None, :], position)
    total.index_add_(0, rows, update.flatten(0, -2))


def _query_tiles(q: torch.Tensor, k: torch.Tensor, spec: TopkSpec) -> Iterator[slice]:
    per_query = (
        q.shape[0] * q.shape[1] * max(spec.topk * q.shape[3], min(k.shape[2], KEY_TILE) + spec.topk, 1)
    )
    step = max(1, (TILE_NUMBERS_CPU if q.device.type == "cpu" else TILE_NUMBERS) // per_query)
    for first in range(0, q.shape[2], step):
        yield slice(first, min(q.shape[2], first + step))
