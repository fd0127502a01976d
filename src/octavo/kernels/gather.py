"""What the torch backends share: a step's sequences in padded groups, and K and V gathered for each.

Sequences with the same number of queries form one group, so all decodes of a batch are one group
and a prefill chunk is another; keys are padded to the longest of the group and masked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from octavo.kernels.api import AttentionMeta, AttentionSpec, KVLayer


@dataclass(slots=True)
class Group:
    """Sequences with ``q_len`` queries each; B of them, keys padded to L positions.

    ``rows`` is a slice where the group's rows lie side by side in ``q`` (then nothing is copied),
    else an index. ``key_rows`` [B * num_kv_heads * L] indexes the cache viewed as rows of head_dim:
    a position past a sequence's end points at its last key, so an unused slot is never read.
    """

    q_len: int
    seq_lens: torch.Tensor
    rows: slice | torch.Tensor
    key_rows: torch.Tensor
    max_len: int
    masks: dict[tuple[int | None, int, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeat: int, heads: int = 1) -> torch.Tensor:
        """0 where a query sees a key, -inf elsewhere: ``[B, heads, repeat * q_len, L]``, once a step.

        ``heads`` stays 1 where B is 1: it then broadcasts without taking memory.
        """
        heads = heads if self.seq_lens.shape[0] > 1 else 1
        if (window, repeat, heads) not in self.masks:
            device = self.seq_lens.device
            position = self.seq_lens[:, None] - self.q_len + torch.arange(self.q_len, device=device)
            behind = position[:, :, None] - torch.arange(self.max_len, device=device)
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            mask = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))
            self.masks[window, repeat, heads] = mask[:, None].repeat(1, heads, repeat, 1)
        return self.masks[window, repeat, heads]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    groups: tuple[Group, ...]
    spec: AttentionSpec


def why_not(spec: AttentionSpec) -> str | None:
    """One sentence why no torch backend serves ``spec``, or None."""
    if spec.value_bits is not None:
        return "only fused and reference attention read compact history"
    return None


def plan(meta: AttentionMeta, spec: AttentionSpec) -> GatherPlan:
    """Group the step's sequences and work out which cache rows each group reads."""
    if meta.history_window is not None:
        raise ValueError("only fused and reference attention read compact history")
    starts, device = meta.cu_seqlens_q.tolist(), meta.seq_lens.device
    by_q_len: dict[int, list[int]] = {}
    for s in range(len(starts) - 1):
        by_q_len.setdefault(starts[s + 1] - starts[s], []).append(s)
    by_q_len.pop(0, None)
    groups = []
    for q_len, members in by_q_len.items():
        ids = torch.tensor(members, device=device)
        seq_lens = meta.seq_lens[ids].long()
        max_len = int(seq_lens.max())
        position = torch.minimum(torch.arange(max_len, device=device), seq_lens[:, None] - 1)
        block = torch.gather(meta.block_table[ids].long(), 1, position // spec.block_size)
        head = torch.arange(spec.num_kv_heads, device=device)[:, None]
        key_rows = (block[:, None] * spec.num_kv_heads + head) * spec.block_size + (
            position % spec.block_size
        )[:, None]
        first = starts[members[0]]
        rows: slice | torch.Tensor = slice(first, first + q_len * len(members))
        if members != list(range(members[0], members[0] + len(members))):
            begins = torch.tensor([starts[s] for s in members], device=device)
            rows = (begins[:, None] + torch.arange(q_len, device=device)).flatten()
        groups.append(Group(q_len, seq_lens, rows, key_rows.flatten(), max_len))
    return GatherPlan(tuple(groups), spec)


def keys_values(kv: KVLayer, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """The group's K and V, each ``[B, num_kv_heads, L, head_dim]`` float32."""
    num_kv_heads, head_dim = kv.key.shape[1], kv.key.shape[3]
    shape = (-1, num_kv_heads, group.max_len, head_dim)
    key, value = (
        x.view(-1, head_dim).index_select(0, group.key_rows).float().view(shape) for x in (kv.key, kv.value)
    )
    return key, value


def fold(q: torch.Tensor, group: Group, num_kv_heads: int) -> torch.Tensor:
    """The group's queries ``[B, num_kv_heads, heads per kv head * q_len, head_dim]``.

    All query heads of a KV head become rows against the same K, so K and V are never repeated. A
    view of ``q`` whenever there is one query a sequence, or one query head a KV head; otherwise one
    copy of the queries.
    """
    num_heads, head_dim = q.shape[1:]
    per_kv = num_heads // num_kv_heads
    x = q[group.rows].view(-1, group.q_len, num_kv_heads, per_kv, head_dim)
    return x.permute(0, 2, 3, 1, 4).reshape(-1, num_kv_heads, per_kv * group.q_len, head_dim)


def unfold(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Back from ``fold``'s layout, last dimension ``n``: ``[B * q_len, num_heads, n]``."""
    batch, num_kv_heads, folded, n = x.shape
    per_kv = folded // group.q_len
    x = x.view(batch, num_kv_heads, per_kv, group.q_len, n).permute(0, 3, 1, 2, 4)
    return x.reshape(batch * group.q_len, num_kv_heads * per_kv, n)
