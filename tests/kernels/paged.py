"""Random paged caches. Blocks lie in shuffled places and every unused slot holds NaN.

With a ``history_window`` so do those that are only read in compact form; with a ``history_budget`` compact
blocks that are only read as summaries, and summaries that are not read any more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from octavo.kernels import api, compact, reference, topk_paged
from octavo.kernels.history_layout import FAN, GROUP, first_kept, layout, num_summarised
from octavo.kernels.native import ThreadPool


@dataclass(frozen=True)
class Case:
    """One step: ``seqs`` is (queries, keys including them) of each sequence.

    ``tokens`` holds each sequence's q, k, v ``[keys, heads, head_dim]`` from position 0 on, so the same
    sequences can be paged, cut and batched in other ways.
    """

    seqs: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    kv_dtype: torch.dtype = torch.float32
    window: int | None = None
    need_lse: bool = False
    seed: int = 0
    history_window: int | None = None
    value_bits: int = 8
    history_budget: int | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def spec(self) -> api.AttentionSpec:
        return api.AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            kv_dtype=self.kv_dtype,
            device="cpu",
            need_lse=self.need_lse,
            value_bits=None if self.history_window is None else self.value_bits,
        )

    def compact_blocks(self, position: int) -> int:
        """That a query at this position reads."""
        if self.history_window is None:
            return 0
        return api.num_compact_blocks(position, self.history_window, self.block_size)

    def summarised(self, position: int) -> int:
        """Blocks that a query at this position reads as summaries."""
        if self.history_budget is None:
            return 0
        return num_summarised(position // self.block_size, self.history_budget // self.block_size)

    def tokens(self, s: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed * 1000 + s)
        n = self.seqs[s][1]
        q = torch.randn(n, self.num_heads, self.head_dim, generator=g)
        k = torch.randn(n, self.num_kv_heads, self.head_dim, generator=g)
        v = torch.randn(n, self.num_kv_heads, self.head_dim, generator=g)
        return q, k.to(self.kv_dtype), v.to(self.kv_dtype)

    def with_(self, **changes: object) -> Case:
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Paged:
    """A case's tensors as a backend gets them."""

    case: Case
    q: torch.Tensor
    kv: api.KVLayer
    meta: api.AttentionMeta


def build(case: Case, placement: int = 0, pad: float = float("nan")) -> Paged:
    """Page ``case``. ``placement`` seeds where blocks lie; ``pad`` fills every slot that is not used."""
    stored = build_stored(case, placement, pad)
    return stored if case.history_window is None else with_history(stored, placement, pad)


def build_stored(case: Case, placement: int = 0, pad: float = float("nan")) -> Paged:
    """As :func:`build`, with everything read as stored."""
    bs = case.block_size
    counts = [-(-n // bs) for _, n in case.seqs]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(placement)).tolist()
    shape = (num_blocks, case.num_kv_heads, bs, case.head_dim)
    key, value = (torch.full(shape, pad, dtype=case.kv_dtype) for _ in range(2))
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    rows = []
    for s, (q_len, n) in enumerate(case.seqs):
        q, k, v = case.tokens(s)
        rows.append(q[n - q_len :])
        for b in range(counts[s]):
            block = order.pop()
            table[s, b] = block
            part = slice(b * bs, min(n, (b + 1) * bs))
            key[block, :, : part.stop - part.start] = k[part].transpose(0, 1)
            value[block, :, : part.stop - part.start] = v[part].transpose(0, 1)
    starts = torch.tensor([0] + [q_len for q_len, _ in case.seqs]).cumsum(0).int()
    seq_lens = torch.tensor([n for _, n in case.seqs], dtype=torch.int32)
    kv = api.KVLayer(key, value, case.scale, case.window)
    return Paged(case, torch.cat(rows), kv, api.AttentionMeta(table, seq_lens, starts))


def with_history(paged: Paged, placement: int = 0, pad: float = float("nan")) -> Paged:
    """The same step with its compact blocks made, and the blocks that nobody reads as stored gone."""
    case, kv, table = paged.case, paged.kv, paged.meta.block_table.clone()
    counts = [case.compact_blocks(n - 1) for _, n in case.seqs]
    num_compact = 2 * sum(counts) + 2
    order = torch.randperm(num_compact, generator=torch.Generator().manual_seed(placement + 1)).tolist()
    empty = empty_compact(case, num_compact, planes=kv.planes is not None)
    if kv.planes is not None and kv.planes.mean_value is None:
        empty = empty._replace(mean_value=None)
    kv = kv._replace(compact=empty)
    compact_table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    pairs = []
    for s, count in enumerate(counts):
        for b in range(count):
            compact_table[s, b] = order.pop()
            pairs.append((int(table[s, b]), int(compact_table[s, b])))
    compact.seal(kv, torch.tensor(pairs, dtype=torch.int32).view(-1, 2), pool(1))
    for s, (q_len, n) in enumerate(case.seqs):
        for b in range(case.compact_blocks(n - q_len)):
            for gone in (kv.key, kv.value):
                gone[table[s, b]] = pad
            for plane in kv.planes or ():
                if plane is not None:
                    plane[table[s, b]] = 255 if plane.dtype == torch.uint8 else float("nan")
            table[s, b] = 0
    meta = paged.meta._replace(
        block_table=table, compact_table=compact_table, history_window=case.history_window
    )
    if case.history_budget is not None:
        meta = with_summaries(case, kv, meta, order)
    return Paged(case, paged.q, kv, meta)


def with_summaries(
    case: Case, kv: api.KVLayer, meta: api.AttentionMeta, free: list[int], turns: torch.Tensor | None = None
) -> api.AttentionMeta:
    """Make the summaries that the step reads in ``free`` compact blocks, and spoil what it does not read."""
    assert kv.compact is not None
    assert meta.compact_table is not None
    table = meta.compact_table.clone()
    tables, unread = [], []
    for s, (q_len, n) in enumerate(case.seqs):
        first, last = (case.summarised(p) if q_len else 0 for p in (n - q_len, n - 1))
        made: dict[tuple[int, int], int] = {}
        operations = []
        for number in range(1, last + 1):
            for level, unit in layout(number):
                if (level, unit) in made:
                    continue
                start = 1 + GROUP * unit
                sources = (
                    [made[level - 1, FAN * unit + i] for i in range(FAN)] + [-1] * (GROUP - FAN)
                    if level
                    else table[s, start : start + GROUP].tolist()
                )
                made[level, unit] = free.pop()
                operations.append([made[level, unit], level, *sources])
        if operations:
            compact.summarise(kv, torch.tensor(operations, dtype=torch.int32), turns, pool(1))
        read = {unit for number in range(max(1, first), last + 1) for unit in layout(number)}
        tables.append([(*unit, made[unit]) for unit in sorted(read)])
        gone = table[s, 1 : max(1, first_kept(first))]
        unread += [block for unit, block in made.items() if unit not in read] + gone.tolist()
        gone.zero_()
    for record in kv.compact[:2]:
        record[unread] = 255
    rows = max(1, *map(len, tables)) + 1
    padded = [each + [(-1, -1, -1)] * (rows - len(each)) for each in tables]
    return meta._replace(
        compact_table=table,
        summary_table=torch.tensor(padded, dtype=torch.int32).view(len(padded), rows, 3),
        history_budget=case.history_budget,
    )


def empty_compact(case: Case, num_compact: int, *, planes: bool = False) -> api.CompactKV:
    """Compact blocks of a layer that hold NaN; ``planes``: with means and bounds."""
    spans = (num_compact, case.num_kv_heads, case.block_size // compact.RECORD_KEYS)
    sizes = (
        compact.key_record_bytes(case.head_dim),
        compact.value_record_bytes(case.head_dim, case.value_bits),
    )
    records = (torch.full((*spans, size), 255, dtype=torch.uint8) for size in sizes)
    if not planes:
        return api.CompactKV(*records)
    means = torch.full((*spans, case.head_dim), float("nan"), dtype=torch.float16)
    bounds = torch.full((*spans, topk_paged.bounds_bytes(case.head_dim)), 255, dtype=torch.uint8)
    return api.CompactKV(*records, means, bounds)


@functools.cache
def pool(num_threads: int) -> ThreadPool:
    """One for all tests: starting threads takes longer than most of them."""
    return ThreadPool(num_threads)


def run(name: str, paged: Paged, num_threads: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
    kernel = api.get(name)
    spec = paged.case.spec
    assert kernel.why_not(spec) is None
    return kernel.attend(paged.q, paged.kv, kernel.plan(paged.meta, spec, pool(num_threads)))


def oracle(paged: Paged) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.attend(paged.q, paged.kv, reference.plan(paged.meta, paged.case.spec, pool(1)))


def exact(paged: Paged) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse in float64, straight from the definition, without any paging."""
    case = paged.case
    outs, sums = [], []
    for s, (q_len, n) in enumerate(case.seqs):
        q, k, v = (x.double() for x in case.tokens(s))
        group = case.num_heads // case.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q[n - q_len :], k.repeat_interleave(group, 1)) * case.scale
        behind = torch.arange(n - q_len, n)[:, None] - torch.arange(n)
        seen = (behind >= 0) & (behind < (case.window or n))
        scores = scores.masked_fill(~seen, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v.repeat_interleave(group, 1)))
        sums.append(torch.logsumexp(scores, -1).transpose(0, 1))
    return torch.cat(outs), torch.cat(sums)
