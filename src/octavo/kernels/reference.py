"""The readable float32 oracle: one query row at a time, over exactly the keys it sees."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch

from octavo.kernels.api import AttentionMeta, AttentionSpec, CompactKV, KVLayer, Recall, num_compact_blocks
from octavo.kernels.history_layout import GROUP, first_kept, layout, num_summarised, tokens_of
from octavo.kernels.native import ThreadPool


def why_not(spec: AttentionSpec) -> str | None:
    """See ``octavo.kernels.api.Kernel.why_not``: it serves everything."""
    return None


def plan(meta: AttentionMeta, spec: AttentionSpec, pool: ThreadPool) -> AttentionMeta:
    """Nothing is worth computing ahead here."""
    return meta


def attend(
    q: torch.Tensor,
    kv: KVLayer,
    plan: AttentionMeta,
    *,
    mass: torch.Tensor | None = None,
    recall: Recall | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``octavo.kernels.api.Kernel.attend``; always returns the lse."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2])
    starts = plan.cu_seqlens_q.tolist()
    for s, seq_len in enumerate(plan.seq_lens.tolist()):
        history = _Sequence(kv, plan, s, q.shape[1])
        for row in range(starts[s], starts[s + 1]):
            position = seq_len - (starts[s + 1] - row)
            k, v, bias = history.read(position)
            scores = torch.einsum("hd,hnd->hn", q[row].float(), k) * kv.scale + bias
            if recall is not None and (bias > 0).any():
                scores, k, v, bias = history.recall(recall, position, q[row], (scores, k, v, bias))
            lse[row] = torch.logsumexp(scores, dim=-1)
            weights = torch.softmax(scores, dim=-1)
            out[row] = torch.einsum("hn,hnd->hd", weights, v)
            if mass is not None:
                mass[row] += weights[:, bias > 0].sum(-1)
    return out, lse


class _Sequence:
    """One sequence's keys and values in every form, each ``[heads, keys, head_dim]`` float32."""

    def __init__(self, kv: KVLayer, plan: AttentionMeta, s: int, num_heads: int) -> None:
        self.kv, self.plan, self.s = kv, plan, s
        self.group = num_heads // kv.key.shape[1]
        self.block_size = kv.key.shape[2]
        self.seq_len = int(plan.seq_lens[s])
        self.empty = torch.empty(num_heads, 0, kv.key.shape[3])
        blocks = plan.block_table[s, : -(-self.seq_len // self.block_size)].long()
        # [blocks, kv_heads, block_size, d] -> [heads, seq_len, d]
        self.key, self.value = (
            x[blocks]
            .transpose(0, 1)
            .flatten(1, 2)[:, : self.seq_len]
            .float()
            .repeat_interleave(self.group, 0)
            for x in (kv.key, kv.value)
        )
        self.compact_key = self.compact_value = self.empty
        if kv.compact is not None and plan.compact_table is not None and plan.history_window is not None:
            count = num_compact_blocks(self.seq_len - 1, plan.history_window, self.block_size)
            self.compact_key, self.compact_value = self._expand(plan.compact_table[s, :count])

    def read(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the query at ``position`` reads: keys, values, and ``[keys]`` added to their scores."""
        window, plan = self.kv.window, self.plan
        first = 0 if window is None else max(0, position - window + 1)
        key = value = self.empty
        bias = torch.empty(0)
        summarised = self._num_summarised(position)
        if summarised:
            first = first_kept(summarised) * self.block_size
            key, value, bias = self._summaries(summarised)
        stored = 0
        if plan.history_window is not None:
            stored = self.block_size * num_compact_blocks(position, plan.history_window, self.block_size)
        k, v = (
            torch.cat([old, compact[:, first:stored], x[:, max(first, stored) : position + 1]], dim=1)
            for old, compact, x in (
                (key, self.compact_key, self.key),
                (value, self.compact_value, self.value),
            )
        )
        return k, v, torch.cat([bias, torch.zeros(k.shape[1] - len(bias))])

    def recall(
        self, recall: Recall, position: int, q: torch.Tensor, read: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Scores, keys, values and biases of :meth:`read` with what the heads recall.

        ``q`` ``[heads, head_dim]``. A score is -inf where its head does not read the key.
        """
        scores, k, v, bias = read
        shares = torch.softmax(scores, dim=-1)
        replaced = torch.zeros_like(scores, dtype=torch.bool)
        more: dict[int, list[int]] = {}  # block -> heads
        first = self.block_size  # behind block 0
        number = self._num_summarised(position)
        for level, unit in layout(number):
            for entry in range(GROUP):
                each = tokens_of(level) // self.block_size
                start = 1 + (GROUP * unit + entry) * each
                if start > number:
                    break
                heads = torch.nonzero(shares[:, first] > recall.share)[:, 0].tolist()
                there = bool((recall.table[self.s, start : start + each] != 0).all())
                if recall.report is not None:
                    recall.report[self.s, 0 if there else 1] += len(heads)
                if there:
                    replaced[heads, first] = True
                    for block in range(start, start + each):
                        more.setdefault(block, []).extend(heads)
                first += 1
        keys, values, masks = [k], [v], [torch.where(replaced, -math.inf, 0.0)]
        for block, heads in more.items():
            if heads:
                key, value = self._recalled(recall, block)
                keys.append(key)
                values.append(value)
                mask = torch.full((len(scores), self.block_size), -math.inf)
                mask[heads] = 0.0
                masks.append(mask)
        k, v = torch.cat(keys, 1), torch.cat(values, 1)
        bias = torch.cat([bias, torch.zeros(k.shape[1] - len(bias))])
        scores = torch.einsum("hd,hnd->hn", q.float(), k) * self.kv.scale + bias + torch.cat(masks, 1)
        return scores, k, v, bias

    def _recalled(self, recall: Recall, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a block from the addresses of its records."""
        assert self.kv.compact is not None
        records = []
        for which, like in enumerate(self.kv.compact[:2]):
            assert like is not None
            address = int(recall.table[self.s, block, which])
            address += self.kv.layer * int(recall.strides[self.s, block, which])
            data = bytearray(ctypes.string_at(address, like[0].numel()))
            records.append(torch.frombuffer(data, dtype=torch.uint8).view(1, *like.shape[1:]))
        both = expand_compact(CompactKV(*records), torch.zeros(1, dtype=torch.long), self.empty.shape[-1])
        key, value = (x.repeat_interleave(self.group, 0) for x in both)
        return key, value

    def _num_summarised(self, position: int) -> int:
        """How many blocks are read as summaries."""
        budget, window = self.plan.history_budget, self.kv.window
        if budget is None:
            return 0
        summarised = num_summarised(position // self.block_size, budget // self.block_size)
        if not summarised or window is None:
            return summarised
        if window <= budget - GROUP * self.block_size:
            return 0
        if window < self.seq_len:
            raise ValueError(f"a layer's window of {window} tokens hides part of what is read as summaries")
        return summarised

    def _summaries(self, summarised: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.plan.summary_table is not None
        there = {(level, unit): block for level, unit, block in self.plan.summary_table[self.s].tolist()}
        units = layout(summarised)
        key, value = self._expand(torch.tensor([there[pair] for pair in units]))
        bias = torch.tensor([math.log(tokens_of(level)) for level, _ in units]).repeat_interleave(
            self.block_size
        )
        if summarised % GROUP:  # of the last group the first entries alone
            read = slice(0, len(bias) - GROUP + summarised % GROUP)
            key, value, bias = key[:, read], value[:, read], bias[read]
        first = slice(0, self.block_size)  # block 0
        return (
            torch.cat([self.compact_key[:, first], key], dim=1),
            torch.cat([self.compact_value[:, first], value], dim=1),
            torch.cat([torch.zeros(self.block_size), bias]),
        )

    def _expand(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.kv.compact is not None
        key, value = expand_compact(self.kv.compact, blocks.long(), self.empty.shape[-1])
        return key.repeat_interleave(self.group, 0), value.repeat_interleave(self.group, 0)


def expand_compact(
    compact: CompactKV, blocks: torch.Tensor, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[num_kv_heads, keys, head_dim]`` float32 of compact ``blocks`` ``[n]`` int64.

    Every number is one rounding of minimum + scale code, or mean + scale code: products are exact in float32.
    """
    # [blocks, kv_heads, block_size / 16, bytes] -> [kv_heads, records, bytes]
    keys, values = (x[blocks].transpose(0, 1).flatten(1, 2) for x in (compact.key, compact.value))
    d = head_dim
    codes = keys[..., : 16 * d].view(torch.int8).reshape(*keys.shape[:2], d // 2, 16, 2).transpose(2, 3)
    codes = codes.flatten(3)  # [kv_heads, records, 16, d]
    mean, scale = _halves(keys[..., 16 * d : 18 * d]), _halves(keys[..., 18 * d : 18 * d + 32])
    key = mean[..., None, :] + scale[..., None] * codes.float()
    if values.shape[-1] == 16 * d + 32:
        codes = values[..., : 16 * d].view(torch.int8).reshape(*values.shape[:2], 16, d)
        value = _halves(values[..., 16 * d :])[..., None] * codes.float()
    else:
        pairs = values[..., : 8 * d].reshape(*values.shape[:2], 16, d // 2)
        codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(3)
        scale, minimum = _halves(values[..., 8 * d :]).chunk(2, dim=-1)
        value = minimum[..., None] + scale[..., None] * codes.float()
    return key.flatten(1, 2), value.flatten(1, 2)


def _halves(bytes_: torch.Tensor) -> torch.Tensor:
    return bytes_.contiguous().view(torch.float16).float()


def topk_kept(
    scores: torch.Tensor,
    topk: int,
    *,
    causal: bool = False,
    recent: int | None = None,
    key_padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which keys each query keeps: ``[b, h, n, m]`` bool, for ``scores`` of that shape.

    The definition, literally: of a row's visible keys the last ``recent``, and of the others the first
    ``topk - recent`` in a stable sort by falling score. See ``octavo.kernels.topk.topk_attention``.
    """
    batch, _, n, m = scores.shape
    recent = (topk // 2 if causal else 0) if recent is None else recent
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for b in range(batch):
        for i in range(n):
            last = m - n + i if causal else m - 1
            visible = [
                j for j in range(last + 1) if key_padding_mask is None or not bool(key_padding_mask[b, j])
            ]
            cut = max(0, len(visible) - recent)
            others = torch.tensor(visible[:cut], dtype=torch.long)
            for h in range(scores.shape[1]):
                order = torch.sort(scores[b, h, i, others], descending=True, stable=True).indices
                kept[b, h, i, others[order[: topk - recent]]] = True
                kept[b, h, i, visible[cut:]] = True
    return kept


def topk_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    *,
    scale: float | None = None,
    normalize: str | None = None,
) -> torch.Tensor:
    """Dense attention over the keys that ``kept`` [b, h, n, m] marks; 0 for a row that keeps none.

    Shapes and arguments as ``octavo.kernels.topk.topk_attention``; differentiable by autograd.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("bhnd,bhmd->bhnm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    some = kept.any(dim=-1, keepdim=True)
    weights = torch.softmax(torch.where(some, scores.masked_fill(~kept, float("-inf")), 0.0), dim=-1)
    weights = torch.where(some, weights, 0.0)
    if normalize == "l2":
        weights = torch.where(some, weights / weights.norm(dim=-1, keepdim=True).clamp_min(1e-30), 0.0)
    return torch.einsum("bhnm,bhmd->bhnd", weights, v)


class TopkRow(NamedTuple):
    """One query and head of paged top-k attention: kept positions in rising order, output, dropped mass."""

    position: torch.Tensor
    out: torch.Tensor
    dropped: float


def topk_row(scores: torch.Tensor, values: torch.Tensor, first: int, topk: int) -> TopkRow:
    """The definition, literally, for a row that sees the positions ``first`` and on.

    ``scores`` ``[n]`` float32 are its scaled scores, ``values`` ``[n, head_dim]``. Of the visible keys the
    last floor(topk / 2) are kept, and of the others the first in a stable sort by falling score. The
    dropped mass is 1 - (softmax mass of the kept keys / mass of all), in float64.
    """
    n = scores.shape[0]
    others = max(0, n - topk // 2)
    # A sort puts NaN first, where the selection does too; both zeros are equal.
    order = torch.sort(scores[:others], descending=True, stable=True).indices
    kept = torch.cat([order[: topk - topk // 2], torch.arange(others, n)]).sort().values
    weights = torch.softmax(scores.double(), dim=0)
    mass = weights[kept].sum()
    out = (weights[kept] / mass) @ values[kept].double()
    rest = torch.ones(n, dtype=torch.bool)
    rest[kept] = False
    return TopkRow(kept + first, out, float(weights[rest].sum()))


def adaptive_kept(
    scores: torch.Tensor, first: int, recent: int, least: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys an adaptive budget keeps: positions in rising order, and those that rounding may decide
    either way.

    ``scores`` ``[n]`` are those of the positions from ``first`` on. The last ``recent`` stay, and of the
    others those with at least ``least`` millionths of the softmax of all, where 8,192 keys or more are seen;
    of n keys 8192 / n times as many, down to 1,024 keys.
    """
    others = max(0, len(scores) - recent)
    share = least * 1e-6 * 8192 / min(max(len(scores), 1024), 8192)
    above = scores.double() - scores.double().logsumexp(0) - math.log(share)
    above[others:] = math.inf
    return torch.nonzero(above >= 0)[:, 0] + first, torch.nonzero(above.abs() < 1e-5)[:, 0] + first


def fast_spans(q: torch.Tensor, keys: torch.Tensor, first: int, topk: int) -> torch.Tensor:
    """Which positions compete in fast mode: ``[positions]`` bool, for ``q`` at the last of ``keys``
    [positions, d].

    Spans of 16 that are seen whole and lie before the recent keys are ranked, all but the first of them, by
    the sum over the dimensions of the larger of q min and q max; min and max are whole numbers of a step, a
    127th of the span's largest, and the sum goes in 16 lanes. The first ceil(4 topk / 16) in a stable sort
    compete, and so does everything beside the ranked spans.
    """
    position = len(keys) - 1
    others_end = max(first, position + 1 - topk // 2)
    start, end = -(-first // 16) + 1, min(others_end, position) // 16
    competes = torch.ones(len(keys), dtype=torch.bool)
    competes[:first] = False
    if end <= start:
        return competes
    spans = keys[start * 16 : end * 16].float().view(end - start, 16, -1)
    step = spans.abs().amax((1, 2)) / 127
    codes = torch.cat([spans.amin(1), spans.amax(1)], 1).div(step[:, None]).round().nan_to_num(0)
    weight = torch.cat([q.clamp(max=0), q.clamp(min=0)])
    products = (weight * codes).view(end - start, -1, 16)
    lanes = torch.zeros(len(spans), 16)
    for i in range(products.shape[1]):
        lanes = lanes + products[:, i]
    a, b, c, d, e, f, g, h = (lanes[:, :8] + lanes[:, 8:]).unbind(1)
    rank = (((a + e) + (c + g)) + ((b + f) + (d + h))) * step
    order = torch.sort(rank, descending=True, stable=True).indices
    for span in order[-(-4 * topk // 16) :].tolist():
        competes[(start + span) * 16 : (start + span + 1) * 16] = False
    return competes


def mean_of_span(rows: torch.Tensor) -> torch.Tensor:
    """The mean of 16 rows ``[16, d]`` as the planes hold it: summed in order in float32, kept in float16."""
    total = torch.zeros(rows.shape[1])
    for row in rows.float():
        total = total + row
    return (total / 16).half().double()


def tail_row(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    first: int,
    scale: float,
    stored: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The output ``[head_dim]`` of a row that keeps ``kept``, with the tail, in float64.

    ``q`` ``[head_dim]`` stands at the last of ``keys`` and ``values`` ``[positions, head_dim]`` and sees
    those from ``first`` on. The n keys of a span of 16 that were not kept are one term: log n + scale q.(the
    span's mean key), with the span's mean value. A span that the row sees in part, or stands in, enters key
    by key; one whose means are not finite adds nothing. ``stored``: keys and values as they are stored, where
    the row reads some in compact form; means are of these.
    """
    whole_keys, whole_values = (keys, values) if stored is None else stored
    position = len(keys) - 1
    whole, own = -(-first // 16) * 16, position // 16 * 16
    is_kept = torch.zeros(len(keys), dtype=torch.bool)
    is_kept[kept] = True
    scores = scale * (keys.double() @ q.double())
    terms, term_values = [], []
    for p in range(first, position + 1):
        if is_kept[p] or p < whole or p >= own:
            terms.append(scores[p])
            term_values.append(values[p].double())
    for start in range(whole, own, 16):
        span = slice(start, start + 16)
        n = 16 - int(is_kept[span].sum())
        mean_key, mean_value = mean_of_span(whole_keys[span]), mean_of_span(whole_values[span])
        if n == 0 or not mean_key.isfinite().all() or not mean_value.isfinite().all():
            continue
        terms.append(scale * (mean_key @ q.double()) + math.log(n))
        term_values.append(mean_value)
    return torch.softmax(torch.stack(terms), 0) @ torch.stack(term_values)
