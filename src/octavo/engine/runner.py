"""From what the scheduler decided to tokens: the only hop from Python ints to tensors and back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from octavo.attention.backend import AttentionBackend
from octavo.batch import AttnReads, ForwardBatch
from octavo.cache.kv_cache import KVCache
from octavo.engine import sampler
from octavo.engine.history import History
from octavo.engine.reads import SpanCounts
from octavo.engine.step import BlockCopy, BlockLoad, ScheduledRequest
from octavo.kernels.topk_paged import Report
from octavo.request import AttnTopkReport, HistoryReport, Logprob, Request

log = logging.getLogger("octavo")

#: Prompt positions whose logits exist at the same time while a prompt is scored.
SCORE_ROWS = 64


class Model(Protocol):
    """What the runner needs of a decoder."""

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """Writes this step's K and V; returns the last hidden state, [num_tokens, hidden_size]."""
        ...

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows [m] int64 of [num_tokens, hidden_size] -> [m, head width] float32."""
        ...


@dataclass(slots=True)
class StepResult:
    """What one step gave, by ``Request.id``.

    ``prompt_logprobs`` maps a position of the prompt to the log-probabilities of the token there.
    A request with an entry in ``errors`` (one sentence) has nothing else.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, dict[int, Logprob]] = field(default_factory=dict)
    prompt_logprobs: dict[int, dict[int, dict[int, Logprob]]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    #: Of requests whose attention is not dense.
    attn_reports: dict[int, AttnTopkReport] = field(default_factory=dict)
    #: Of those that also ask: (query head, key) pairs read and seen in each layer and span of positions.
    attn_reads: dict[int, SpanCounts] = field(default_factory=dict)
    #: Of requests that read summaries.
    history_reports: dict[int, HistoryReport] = field(default_factory=dict)

    def add(self, other: StepResult) -> None:
        self.tokens |= other.tokens
        self.logprobs |= other.logprobs
        self.prompt_logprobs |= other.prompt_logprobs
        self.errors |= other.errors
        self.attn_reports |= other.attn_reports
        self.attn_reads |= other.attn_reads
        self.history_reports |= other.history_reports


class Runner:
    """Runs a step on the model. Holds no request state: a step can be run again."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        attention: AttentionBackend,
        *,
        vocab_size: int,
        device: str = "cpu",
        history: History | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.attention = attention
        self.vocab_size = vocab_size
        self.device = device
        self.history = history

    def copy_blocks(self, copies: Iterable[BlockCopy | BlockLoad]) -> None:
        """Run the step's copies and loads, in order; once, before :meth:`run`."""
        for copy in copies:
            if isinstance(copy, BlockLoad):
                write = self.kv_cache.write_compact if copy.compact else self.kv_cache.write_block
                write(copy.dst, copy.rows)
            else:
                self.kv_cache.copy_rows(copy.src, copy.dst, copy.num_rows)

    def read_block(self, block: int, *, compact: bool = False) -> memoryview:
        """A copy of all that a block holds, a compact one if ``compact``."""
        return self.kv_cache.read_compact(block) if compact else self.kv_cache.read_block(block)

    def run(self, scheduled: Sequence[ScheduledRequest]) -> StepResult:
        """Compute every share of the step and sample where a share ends at the last token.

        When anything raises, the shares are computed again one by one, and only those that raise
        again get an error. Their K and V are written a second time to the same slots, with the same
        values, so nothing has to be undone.
        """
        try:
            return self._compute(scheduled)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must only cost the request that causes it
            name = type(error).__name__
            log.warning("a step of %d requests failed (%s: %s): each runs alone", len(scheduled), name, error)
            result = StepResult()
            for share in scheduled:
                result.add(self._compute_alone(share))
            return result

    def _compute_alone(self, share: ScheduledRequest) -> StepResult:
        try:
            return self._compute([share])
        except Exception as error:  # noqa: BLE001 - becomes this request's error
            reason = f"the model failed on this request: {type(error).__name__}: {error}"
            return StepResult(errors={share.request.id: reason})

    @torch.inference_mode()
    def _compute(self, scheduled: Sequence[ScheduledRequest]) -> StepResult:
        result = StepResult()
        sampling = [s for s in scheduled if s.samples]
        batch = build(scheduled, self.kv_cache.block_size, self.device, self.history)
        if self.history is not None and self.history.recall is not None:
            batch = replace(batch, **self.history.recalled(scheduled, self.kv_cache))
        hidden = self.model.forward(batch, self.kv_cache, self.attention)
        _find_non_finite(hidden, scheduled, result)
        if batch.attn_report is not None:
            for share, row in zip(scheduled, batch.attn_report.tolist(), strict=True):
                if share.request.attn_topk:
                    result.attn_reports[share.request.id] = _report(share.request.attn_topk, Report(*row))
        if batch.attn_reads is not None:
            for i, share in enumerate(s for s in scheduled if _explains(s)):
                result.attn_reads[share.request.id] = SpanCounts.of_row(batch.attn_reads, i)
        if self.history is not None:
            result.history_reports = self.history.reports(scheduled, batch)
        first_row = 0
        for share in scheduled:
            if share.request.params.prompt_logprobs is not None and share.request.id not in result.errors:
                self._score_prompt(hidden, first_row, share, result)
            first_row += share.num_tokens
        if sampling:
            logits = self.model.logits(hidden, batch.logits_rows)
            self._sample(logits, [s.request for s in sampling], result)
        return result

    def _score_prompt(
        self, hidden: torch.Tensor, first_row: int, share: ScheduledRequest, result: StepResult
    ) -> None:
        """Row ``first_row + i`` of ``hidden`` stands at ``share.start + i`` and scores the token after it."""
        prompt = share.request.prompt_token_ids
        end = min(share.num_tokens, len(prompt) - 1 - share.start)
        entries: dict[int, dict[int, Logprob]] = {}
        for begin in range(0, end, SCORE_ROWS):
            rows = range(begin, min(begin + SCORE_ROWS, end))
            targets = [prompt[share.start + i + 1] for i in rows]
            num_best = [share.request.params.prompt_logprobs or 0] * len(rows)
            taken = torch.arange(first_row + rows.start, first_row + rows.stop, device=hidden.device)
            logits = self.model.logits(hidden, taken)
            scored = sampler.score(logits, targets, num_best, self.vocab_size, self.attention.pool)
            for i, entry in zip(rows, scored, strict=True):
                entries[share.start + i + 1] = entry
        result.prompt_logprobs[share.request.id] = entries

    def _sample(self, logits: torch.Tensor, requests: Sequence[Request], result: StepResult) -> None:
        rows = [_sampling_row(r) for r in requests]
        sampled = sampler.sample(logits, rows, self.vocab_size, self.attention.pool)
        for i, request in enumerate(requests):
            if request.id in result.errors:
                continue
            error, logprobs = sampled.errors[i], sampled.logprobs[i]
            if error is not None:
                result.errors[request.id] = error
                continue
            result.tokens[request.id] = sampled.token_ids[i]
            if logprobs is not None:
                result.logprobs[request.id] = logprobs


def build(
    scheduled: Sequence[ScheduledRequest],
    block_size: int,
    device: str = "cpu",
    history: History | None = None,
) -> ForwardBatch:
    """The tensors of one step (see :class:`ForwardBatch` for shapes and an example).

    ``logits_rows`` are the rows to sample from; rows of scored prompts are not among them, since
    their logits are computed slice by slice.
    """
    # Plain ints: a step of one stream would spend more on numpy's calls than on all of its numbers.
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends, cu_seqlens, last_rows = [], [0], []
    for share in scheduled:
        table, new = share.request.block_table, range(share.start, share.start + share.num_tokens)
        tokens += _tokens(share)
        positions += new
        slots += [table[position // block_size] * block_size + position % block_size for position in new]
        ends.append(new.stop)
        cu_seqlens.append(len(tokens))
        if share.samples:
            last_rows.append(len(tokens) - 1)

    num_blocks = [-(-end // block_size) for end in ends]
    block_table = np.zeros((len(scheduled), max(num_blocks)), dtype=np.int32)
    for row, share, count in zip(block_table, scheduled, num_blocks, strict=True):
        row[:count] = np.frombuffer(share.request.block_table, dtype=np.int32, count=count)
    if history is not None:
        np.maximum(block_table, 0, out=block_table)  # what is read in compact form alone has no other block

    rules = [s.request.attn_rule for s in scheduled]
    has_topk = any(rule.topk for rule in rules)
    rows_read = [_rows_read(share) for share in scheduled]
    # Layers with a budget of keys also take note of the keys that a step adds, and need all of its rows.
    all_read = has_topk or sum(rows_read) == len(tokens)

    def tensor(values: Sequence[int] | np.ndarray, dtype: type = np.int32) -> torch.Tensor:
        made = torch.from_numpy(np.asarray(values, dtype=dtype))
        return made if device == "cpu" else made.to(device)

    return ForwardBatch(
        token_ids=tensor(tokens, np.int64),
        positions=tensor(positions, np.int64),
        slot_mapping=tensor(slots, np.int64),
        block_table=tensor(block_table),
        seq_lens=tensor(ends),
        cu_seqlens_q=tensor(cu_seqlens),
        logits_rows=tensor(last_rows, np.int64),
        attn_topk=torch.tensor(rules, dtype=torch.int32) if has_topk else None,
        attn_report=torch.zeros(len(rules), len(Report._fields), dtype=torch.float64) if has_topk else None,
        attn_reads=_reads(scheduled, cu_seqlens),
        rows_read=None if all_read else torch.tensor(rows_read, dtype=torch.int32),
        **({} if history is None else history.of_step(scheduled, device)),
    )


def _explains(share: ScheduledRequest) -> bool:
    """Whether the reads of the share's last token are counted: of the first choice only."""
    request = share.request
    asks = request.params.attn_explain and request.attn_topk > 0 and request.choice == 0
    return asks and share.samples


def _reads(scheduled: Sequence[ScheduledRequest], cu_seqlens: Sequence[int]) -> AttnReads | None:
    watched = [i for i, share in enumerate(scheduled) if _explains(share)]
    if not watched:
        return None
    rows = torch.tensor([cu_seqlens[i + 1] - 1 for i in watched])
    return AttnReads(rows, [scheduled[i].start + scheduled[i].num_tokens for i in watched])


def _report(attn_topk: int, found: Report) -> AttnTopkReport:
    return AttnTopkReport(
        attn_topk=attn_topk,
        rows=int(found.rows),
        visible_keys=int(found.visible),
        kept_keys=int(found.kept),
        mean_dropped_mass=found.dropped_sum / found.rows if found.rows else 0.0,
        worst_dropped_mass=found.dropped_max,
        bytes_read=int(found.bytes),
        dense_bytes=int(found.dense_bytes),
    )


def _rows_read(share: ScheduledRequest) -> int:
    scores = share.request.params.prompt_logprobs is not None
    return share.num_tokens if scores else int(share.samples)


def _tokens(share: ScheduledRequest) -> list[int]:
    request, end = share.request, share.start + share.num_tokens
    prompt_len = len(request.prompt_token_ids)
    of_prompt = request.prompt_token_ids[share.start : end] if share.start < prompt_len else []
    if end <= prompt_len:
        return of_prompt
    return of_prompt + request.output_token_ids[max(share.start - prompt_len, 0) : end - prompt_len]


def _sampling_row(request: Request) -> sampler.SamplingRow:
    return sampler.SamplingRow(
        params=request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        end_token_ids=(*request.eos_token_ids, *(request.params.stop_token_ids or ())),
        seed=request.seed,
        choice=request.choice,
    )


def _find_non_finite(hidden: torch.Tensor, scheduled: Sequence[ScheduledRequest], result: StepResult) -> None:
    """A NaN in a prompt's hidden states means NaN in its K and V: it must not reach the prefix cache."""
    finite = np.isfinite(
        hidden.numpy(force=True)
    )  # numpy starts no threads, which would wait on the pool's cores
    if finite.all():
        return
    finite = finite.all(axis=-1)
    first = 0
    for share in scheduled:
        if not finite[first : first + share.num_tokens].all():
            result.errors[share.request.id] = sampler.NOT_FINITE
        first += share.num_tokens
