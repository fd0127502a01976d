"""What a step's tensors say of compact and summarised history: the runner's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch

from octavo.batch import ForwardBatch, HistoryMean
from octavo.cache.kv_cache import KVCache
from octavo.config import CacheConfig, ModelConfig
from octavo.engine.step import ScheduledRequest
from octavo.kernels.api import num_compact_blocks
from octavo.kernels.history_layout import GROUP
from octavo.request import HistoryReport

#: In a row of the table of summaries that names none.
NO_SUMMARY = (-1, 0, 0)


class RecallTensors(TypedDict, total=False):
    """Fields of ``ForwardBatch``."""

    recall_share: float | None
    recall_table: torch.Tensor
    recall_strides: torch.Tensor
    recall_report: torch.Tensor


class HistoryTensors(TypedDict, total=False):
    """Fields of ``ForwardBatch``."""

    compact_table: torch.Tensor
    history_window: int
    compactions: torch.Tensor | None
    history_budget: int | None
    history_mean: HistoryMean
    summary_table: torch.Tensor | None
    summaries: torch.Tensor | None
    summary_mass: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class History:
    """``window`` tokens are read as stored, and no more than ``budget`` in blocks."""

    block_size: int
    window: int
    budget: int | None = None
    mean: HistoryMean = "centre"
    num_heads: int = 0
    num_layers: int = 0  # that see so far
    recall: float | None = None

    @classmethod
    def of(cls, cache: CacheConfig, model: ModelConfig) -> History | None:
        """Of a resolved configuration, None where all history is read as stored."""
        if cache.compact_window is None:
            return None
        budget = cache.history_budget
        assert budget is None or isinstance(budget, int)
        layers = sum(model.window(layer) is None for layer in range(model.num_layers))
        mean: HistoryMean = "plain" if cache.history_mean == "plain" else "centre"
        return cls(
            cache.block_size,
            cache.compact_window,
            budget,
            mean,
            model.num_heads,
            layers,
            cache.history_recall,
        )

    def of_step(self, scheduled: Sequence[ScheduledRequest], device: str) -> HistoryTensors:
        last = [share.start + share.num_tokens - 1 for share in scheduled]
        counts = [num_compact_blocks(position, self.window, self.block_size) for position in last]
        table = np.zeros((len(scheduled), max(1, *counts)), dtype=np.int32)
        for row, share, count in zip(table, scheduled, counts, strict=True):
            if count:
                row[:count] = np.frombuffer(share.request.compact_table, dtype=np.int32, count=count)
        pairs = [pair for share in scheduled for pair in share.compactions]
        made: HistoryTensors = {
            "compact_table": torch.from_numpy(np.maximum(table, 0)).to(device),
            "history_window": self.window,
            "compactions": torch.tensor(pairs, dtype=torch.int32, device=device) if pairs else None,
        }
        if self.budget is not None:
            made |= self._summaries(scheduled, device)
        return made

    def _summaries(self, scheduled: Sequence[ScheduledRequest], device: str) -> HistoryTensors:
        held = [share.request.summaries for share in scheduled]
        longest = max(map(len, held))
        rows = [
            [(*pair, block) for pair, block in of_one.items()] + [NO_SUMMARY] * (longest - len(of_one))
            for of_one in held
        ]
        operations = [
            (made.dst, made.level, *made.sources, *[-1] * (GROUP - len(made.sources)))
            for share in scheduled
            for made in share.summaries
        ]
        num_tokens = sum(share.num_tokens for share in scheduled)
        reads_any = any(self._reads_summaries(share) for share in scheduled)
        return {
            "history_budget": self.budget,
            "history_mean": self.mean,
            "summary_table": torch.tensor(rows, dtype=torch.int32, device=device).view(len(rows), longest, 3),
            "summaries": torch.tensor(operations, dtype=torch.int32, device=device) if operations else None,
            "summary_mass": torch.zeros(num_tokens, self.num_heads) if reads_any else None,
        }

    def recalled(self, scheduled: Sequence[ScheduledRequest], kv_cache: KVCache) -> RecallTensors:
        """Where the compact forms of summarised blocks are; nothing where a step reads no summaries."""
        longest = max(len(share.recallable) for share in scheduled)
        if longest == 0:
            return {}
        table, strides = (np.zeros((len(scheduled), longest + 1, 2), dtype=np.int64) for _ in range(2))
        in_memory, on_disk = kv_cache.compact_places(), kv_cache.compact_row_places()
        for s, share in enumerate(scheduled):
            for index, there in enumerate(share.recallable, start=1):
                if there is None:
                    continue
                if isinstance(there, int):
                    table[s, index] = [place.start + there * place.block for place in in_memory]
                    strides[s, index] = [place.layer for place in in_memory]
                else:
                    start = np.frombuffer(there, dtype=np.uint8).ctypes.data
                    table[s, index] = [start + place.start for place in on_disk]
                    strides[s, index] = [place.layer for place in on_disk]
        return {
            "recall_share": self.recall,
            "recall_table": torch.from_numpy(table),
            "recall_strides": torch.from_numpy(strides),
            "recall_report": torch.zeros(len(scheduled), 2, dtype=torch.float64),
        }

    def _reads_summaries(self, share: ScheduledRequest) -> bool:
        """Whether the share's last token does."""
        return self._first_summarised(share) < share.num_tokens

    def _first_summarised(self, share: ScheduledRequest) -> int:
        """The share's first token that reads summaries, or how many it has."""
        assert self.budget is not None
        budget_blocks = self.budget // self.block_size
        # Block budget_blocks + 1 is the first whose queries do.
        first = (budget_blocks + 1) * self.block_size - share.start
        return min(max(0, first), share.num_tokens)

    def reports(self, scheduled: Sequence[ScheduledRequest], batch: ForwardBatch) -> dict[int, HistoryReport]:
        """What a step's layers found, by ``Request.id``, of those that read summaries."""
        if batch.summary_mass is None:
            return {}
        mass = batch.summary_mass.numpy(force=True).mean(axis=1) / self.num_layers
        reports = {}
        recalled = np.zeros((len(scheduled), 2), dtype=np.int64)
        if batch.recall_report is not None:
            recalled = batch.recall_report.numpy().astype(np.int64)
        rows = batch.cu_seqlens_q.tolist()[:-1]
        for share, row, counts in zip(scheduled, rows, recalled.tolist(), strict=True):
            own = mass[row + self._first_summarised(share) : row + share.num_tokens]
            if len(own):
                reports[share.request.id] = HistoryReport(
                    rows=len(own),
                    mean_mass=float(own.mean()),
                    worst_mass=float(own.max()),
                    recalled=counts[0],
                    not_there=counts[1],
                )
        return reports
