"""The chosen attention kernel: planned once a step, run once a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.attention import reads
from octavo.batch import AttnReads, ForwardBatch
from octavo.cache.kv_cache import KVCache
from octavo.kernels import api, compact, fused, topk_paged
from octavo.kernels.native import ThreadPool


@dataclass(slots=True)
class TopkStep:
    """A step in which some sequences have a budget: theirs, and the rest, if any, by the dense kernel.

    ``whole`` is the plan of layers that are dense for everybody, made when one is met.
    """

    meta: api.AttentionMeta
    topk: topk_paged.Plan
    rest: fused.Plan | None
    report: torch.Tensor | None
    reads: AttnReads | None = None
    whole: fused.Plan | None = None


@dataclass(slots=True)
class Step:
    """What a step's layers share: the plan of its attention, and the blocks and summaries that it makes.

    ``mass_rows`` are those of ``mass`` that the plan's rows stand for; None: all.
    """

    attention: Any
    compactions: torch.Tensor | None
    summaries: torch.Tensor | None
    mass: torch.Tensor | None
    recall: api.Recall | None
    mass_rows: torch.Tensor | None = None


class AttentionBackend:
    """One attention kernel, chosen by name; refuses at construction what it cannot serve.

    ``topk``: sequences may have a budget of keys, which needs "fused".
    """

    def __init__(self, name: str, spec: api.AttentionSpec, pool: ThreadPool, *, topk: bool = False) -> None:
        self.name = name
        self.spec = spec
        self.pool = pool
        self.topk = topk
        self._kernel = api.get(name)
        reason = self._kernel.why_not(spec)
        if reason is not None:
            raise ValueError(f"attention={name!r} cannot serve this model: {reason}")
        if topk and name != "fused":
            raise ValueError(f'attn_topk and topk_planes need attention="fused", got {name!r}')
        reason = topk_paged.why_not(spec) if topk else None
        if reason is not None:
            raise ValueError(reason)
        self._write_kv = getattr(self._kernel, "write_kv", None)

    def plan(self, batch: ForwardBatch) -> Step:
        """What this step's layers share. Call once a step."""
        return self._plan(batch, batch.cu_seqlens_q)

    def plan_read(self, batch: ForwardBatch) -> Step:
        """As :meth:`plan`, for a layer that attends with the ``rows_read`` alone."""
        assert batch.rows_read is not None
        ends = np.cumsum(batch.rows_read.numpy(force=True), dtype=np.int32)
        cu_seqlens_q = torch.from_numpy(np.concatenate([np.zeros(1, np.int32), ends]))
        step = self._plan(batch, cu_seqlens_q.to(batch.cu_seqlens_q.device))
        if step.mass is not None:
            step.mass_rows = torch.from_numpy(batch.read_rows())
        return step

    def _plan(self, batch: ForwardBatch, cu_seqlens_q: torch.Tensor) -> Step:
        if batch.history_window is not None and self.spec.value_bits is None:
            raise ValueError(
                "the batch has a history_window, but the backend was made without compact history"
            )
        attention = self._attention(batch, cu_seqlens_q)
        return Step(attention, batch.compactions, batch.summaries, batch.summary_mass, _recall(batch))

    def _attention(self, batch: ForwardBatch, cu_seqlens_q: torch.Tensor) -> Any:
        meta = api.AttentionMeta(
            batch.block_table,
            batch.seq_lens,
            cu_seqlens_q,
            batch.compact_table,
            batch.history_window,
            batch.summary_table,
            batch.history_budget,
        )
        if batch.attn_topk is None:
            return self._kernel.plan(meta, self.spec, self.pool)
        if not self.topk:
            raise ValueError(
                "the batch has sequences with a budget of keys, but the backend was made without topk"
            )
        topk = topk_paged.plan(meta, batch.attn_topk, self.spec, self.pool)
        left_out = topk_paged.dense_now(meta, batch.attn_topk)
        some = not bool(left_out.all())
        rest = fused.plan(meta, self.spec, self.pool, left_out=left_out) if some else None
        return TopkStep(meta, topk, rest, batch.attn_report, batch.attn_reads)

    def write(
        self, kv_cache: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store this step's K and V, as ``KVCache.write`` does, by the kernel if it has a writer."""
        if self._write_kv is None:
            kv_cache.write(layer, k, v, slot_mapping)
        else:
            self._write_kv(*kv_cache.layer(layer), k, v, slot_mapping)

    def compact(
        self, layer: api.KVLayer, compactions: torch.Tensor | None, summaries: torch.Tensor | None
    ) -> None:
        """Make a step's compact blocks and then its summaries in one layer, whose K and V are written."""
        if compactions is not None:
            compact.seal(layer, compactions, self.pool)
        if summaries is not None:
            compact.summarise(layer, summaries, layer.turns, self.pool)

    def one_pass(self, step: Step) -> fused.Plan | None:
        """The native plan of a step whose layers may run in one native pass: dense for everybody, with
        nothing to make compact or summarise between two layers, and nothing to note of summaries. None for
        any other."""
        between = (step.compactions, step.summaries, step.mass, step.recall)
        is_plain = isinstance(step.attention, fused.Plan) and all(part is None for part in between)
        return step.attention if is_plain else None

    def run(self, q: torch.Tensor, layer: api.KVLayer, step: Step) -> torch.Tensor:
        """Attention of one layer, after the step's compactions and summaries there.

        ``q`` and the result are ``[num_tokens, num_heads, head_dim]``.
        """
        self.compact(layer, step.compactions, step.summaries)
        if step.mass is None and step.recall is None:
            return self._attend(q, layer, step.attention, {})
        if step.mass is None or step.mass_rows is None:
            return self._attend(q, layer, step.attention, {"mass": step.mass, "recall": step.recall})
        mass = torch.zeros(q.shape[:2])
        out = self._attend(q, layer, step.attention, {"mass": mass, "recall": step.recall})
        step.mass.index_add_(0, step.mass_rows, mass)
        return out

    def _attend(
        self, q: torch.Tensor, layer: api.KVLayer, plan: Any, summaries: dict[str, Any]
    ) -> torch.Tensor:
        """``summaries`` are arguments of kernels that read them, and of no others."""
        if not isinstance(plan, TopkStep):
            return self._kernel.attend(q, layer, plan, **summaries)[0]
        if layer.planes is None:
            if plan.whole is None:
                plan.whole = fused.plan(plan.meta, self.spec, self.pool)
            if plan.reads is not None:
                reads.note(plan.reads, q.shape[1], layer.window, None)
            return fused.attend(q, layer, plan.whole, **summaries)[0]
        out = torch.empty(q.shape)
        if plan.rest is not None:
            fused.attend(q, layer, plan.rest, out, **summaries)
        watched = plan.reads is not None
        details = topk_paged.attend(q, layer, plan.topk, out, plan.report, details=watched)
        if plan.reads is not None and details is not None:
            reads.note(plan.reads, q.shape[1], layer.window, details.position)
        return out


def _recall(batch: ForwardBatch) -> api.Recall | None:
    if batch.recall_share is None:
        return None
    if batch.history_budget is None or batch.recall_table is None or batch.recall_strides is None:
        raise ValueError("a recall_share needs a history_budget, a recall_table and recall_strides")
    return api.Recall(batch.recall_share, batch.recall_table, batch.recall_strides, batch.recall_report)
