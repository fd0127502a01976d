"""The starting point: one head after the other. Three operators a head, then ``cat``."""

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
    num_heads, head_dim = q.shape[1:]
    repeat = num_heads // kv.key.shape[1]
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2]) if plan.spec.need_lse else None
    for group in plan.groups:
        queries = q[group.rows].view(-1, group.q_len, num_heads, head_dim)
        key, value = gather.keys_values(kv, group)
        mask = group.mask(kv.window, 1)[:, 0]
        heads, sums = [], []
        for h in range(num_heads):
            scores = torch.matmul(queries[:, :, h], key[:, h // repeat].transpose(1, 2)) * kv.scale + mask
            heads.append(torch.matmul(torch.softmax(scores, dim=-1), value[:, h // repeat]))
            if lse is not None:
                sums.append(torch.logsumexp(scores, dim=-1))
        out[group.rows] = torch.cat(heads, dim=-1).view(-1, num_heads, head_dim)
        if lse is not None:
            lse[group.rows] = torch.stack(sums, dim=-1).view(-1, num_heads)
    return out, lse
