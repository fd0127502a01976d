"""All heads at once in three operators: baddbmm (scale and mask folded in), softmax, bmm."""

from __future__ import annotations

import torch

from octavo.kernels import gather
from octavo.kernels.api import AttentionMeta, AttentionSpec, KVLayer
from octavo.kernels.native import ThreadPool


def why_not(spec: AttentionSpec) -> str | None:
    """See ``octavo.kernels.api.Kernel.why_not``."""
    return gather.why_not(spec)


def plan(meta: AttentionMeta, spec: AttentionSpec, pool: ThreadPool) -> gather.GatherPlan:
    """Gather indices and masks. torch's own setting decides the threads, not ``pool``."""
    return gather.plan(meta, spec)


def attend(q: torch.Tensor, kv: KVLayer, plan: gather.GatherPlan) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``octavo.kernels.api.Kernel.attend``."""
    num_kv_heads = kv.key.shape[1]
    repeat = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2]) if plan.spec.need_lse else None
    for group in plan.groups:
        folded = gather.fold(q, group, num_kv_heads)
        key, value = gather.keys_values(kv, group)
        mask = group.mask(kv.window, repeat, num_kv_heads).flatten(0, 1)
        scores = torch.baddbmm(mask, folded.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=kv.scale)
        result = torch.bmm(torch.softmax(scores, dim=-1), value.flatten(0, 1))
        out[group.rows] = gather.unfold(result.view(folded.shape), group)
        if lse is not None:
            sums = torch.logsumexp(scores, dim=-1)
            lse[group.rows] = gather.unfold(sums.view(*folded.shape[:3], 1), group).squeeze(-1)
    return out, lse
