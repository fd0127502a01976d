"""A model that computes nothing but remembers, row by row, what was written where.

The K and V of a token depend on the token and all before it (and must not be shared across salts),
so a row is represented by a number made from exactly these. Every step asserts that each request
reads its own history, which catches stale blocks, wrong copies and blocks matched too early.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

from octavo.config import SchedulerConfig
from octavo.engine.blocks import PoolShape
from octavo.engine.scheduler import Scheduler
from octavo.engine.step import ScheduledRequest, SchedulerOutput
from octavo.kernels.history_layout import FAN, GROUP, first_kept, layout
from octavo.request import Request, SamplingParams


def digest(*values: object) -> int:
    """A number that stands for the values."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big")


def next_token(request: Request, vocab: int) -> int:
    """The model's choice: a function of the tokens alone, however they were scheduled."""
    return digest(request.seed, request.token_ids) % vocab


class FakeModel:
    """Drives a scheduler and checks it. ``next_token`` maps a request to the token it samples."""

    def __init__(
        self,
        scheduler: Scheduler,
        shape: PoolShape,
        *,
        next_token: Callable[[Request], int] = lambda request: next_token(request, 3),
        copies_first: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.shape, self.block_size = shape, shape.block_size
        self.rows: list[list[int | None]] = [[None] * shape.block_size for _ in range(shape.num_blocks)]
        #: The rows that compact blocks were made of.
        self.compact: list[list[Any]] = [[None] * shape.block_size for _ in range(shape.num_compact)]
        self.summaries: dict[int, list[int]] = {}  # request id -> levels of those that were made, in order
        self.compactions: dict[int, list[int]] = {}  # request id -> numbers of blocks, in order
        self.next_token = next_token
        self.copies_first = copies_first
        self.num_steps = 0
        self.computed: dict[int, int] = {}  # request id -> tokens computed, again after preemption too
        self._history: dict[int, list[int]] = {}
        self._just_sampled: set[int] = set()

    def history(self, request: Request, end: int) -> list[int]:
        """The rows that tokens 0 .. end-1 of a request must have."""
        rows = self._history.setdefault(request.id, [])
        for token in request.token_ids[len(rows) : end]:
            rows.append(digest(rows[-1] if rows else (request.cache_salt, request.attn_policy), token))
        return rows[:end]

    def read(self, request: Request, position: int, end: int) -> list[int | None]:
        """Rows 0 .. end-1 as a query at ``position`` reads them."""
        size, window, first = self.block_size, self.shape.window, 0
        if window is not None:
            first = max(0, position - window) // size  # blocks that lie wholly before position - window
            assert first == sum((block + 1) * size <= position - window for block in range(position))
        seen: list[int | None] = []
        summarised = self.shape.summarised(position)
        for block in range(-(-end // size)):
            if 1 <= block < first_kept(summarised):
                if block == 1:
                    seen += self._summarised(request, summarised)
                continue
            as_stored = block >= first
            table = request.block_table if as_stored else request.compact_table
            assert table[block] >= 0, "read after it was given up"
            seen += (self.rows if as_stored else self.compact)[table[block]]
        return seen[:end]

    def _summarised(self, request: Request, summarised: int) -> list[int | None]:
        """The rows that the summaries of so many blocks stand for."""
        rows: list[int | None] = []
        for level, unit in layout(summarised):
            entries = self.compact[request.summaries[level, unit]]
            assert len(entries) == GROUP
            assert all(isinstance(entry, tuple) for entry in entries), "no summary"
            assert {len(entry) for entry in entries} == {self.block_size * FAN**level}
            rows += itertools.chain.from_iterable(entries)
        # Of the last group only a part may be summarised, and its other blocks are read.
        del rows[summarised * self.block_size :]
        return rows

    def forward(self, output: SchedulerOutput) -> dict[int, int]:
        """Copy, write, then check what each request reads; returns the sampled tokens."""
        if self.copies_first:
            self._copy(output)
        for share in output.scheduled:
            if not share.request.finished:
                self._check_what_was_there(share)
        for share in output.scheduled:
            if not share.request.finished:
                end = share.start + share.num_tokens
                history = self.history(share.request, end)
                for p in range(share.start, end):
                    block = share.request.block_table[p // self.block_size]
                    self.rows[block][p % self.block_size] = history[p]
                self.computed[share.request.id] = self.computed.get(share.request.id, 0) + share.num_tokens
        if not self.copies_first:
            self._copy(output)
        for share in output.scheduled:
            if not share.request.finished:
                self._compact(share)
        sampled = {}
        for share in output.scheduled:
            if not share.request.finished:
                end = share.start + share.num_tokens
                for position in {share.start, (share.start + end) // 2, end - 1}:
                    got = self.read(share.request, position, position + 1)
                    assert got == self.history(share.request, position + 1), "overwritten"
                if share.samples:
                    sampled[share.request.id] = self.next_token(share.request)
        self._just_sampled = set(sampled)
        return sampled

    def _check_what_was_there(self, share: ScheduledRequest) -> None:
        """Rows from before the step that it reads, or makes compact blocks of, through either table."""
        request, size = share.request, self.block_size
        history = self.history(request, share.start)
        made = {stored for stored, _ in share.compactions}
        for block in range(-(-share.start // size)):
            there = history[block * size : (block + 1) * size]
            if request.block_table[block] >= 0:
                assert self.rows[request.block_table[block]][: len(there)] == there, "stale or foreign rows"
            elif request.compact_table[block] >= 0:
                assert request.block_table[block] not in made
                assert self.compact[request.compact_table[block]] == there, "stale or foreign compact rows"

    def _compact(self, share: ScheduledRequest) -> None:
        tables = list(zip(share.request.block_table, share.request.compact_table, strict=False))
        done = self.compactions.setdefault(share.request.id, [])
        for pair in share.compactions:
            self.compact[pair[1]] = list(self.rows[pair[0]])
            done.append(tables.index(pair))
        for made in share.summaries:
            self.summaries.setdefault(share.request.id, []).append(made.level)
            sources = [self.compact[source] for source in made.sources]
            if made.level == 0:
                self.compact[made.dst] = [tuple(source) for source in sources]
            else:
                every = [entry for source in sources for entry in source]
                joined = [every[i : i + FAN] for i in range(0, len(every), FAN)]
                self.compact[made.dst] = [tuple(itertools.chain(*entries)) for entries in joined]

    def _copy(self, output: SchedulerOutput) -> None:
        for copy in output.copies:
            self.rows[copy.dst][: copy.num_rows] = self.rows[copy.src][: copy.num_rows]

    def step(
        self, between: Callable[[], None] = lambda: None, prefill_limit: int | None = None
    ) -> SchedulerOutput:
        """One engine step; ``between`` runs after the forward pass and before update()."""
        unfinished = self.scheduler.has_unfinished()
        before = self.scheduler.stats
        output = self.scheduler.schedule(prefill_limit)
        self.scheduler.check_invariants()
        if prefill_limit is not None and not output.preempted:
            decodes = [s for s in output.scheduled if s.request.id in self._just_sampled]
            chunks = [s.num_tokens for s in output.scheduled if s.start + 1 < s.request.num_tokens]
            assert not decodes or sum(chunks) <= prefill_limit
        assert bool(output.scheduled) == unfinished, "a step without progress"
        assert len({share.request.id for share in output.scheduled}) == len(output.scheduled)
        assert all(share.num_tokens > 0 for share in output.scheduled)
        after, shares = self.scheduler.stats, output.scheduled
        assert after.scheduled_tokens - before.scheduled_tokens == sum(s.num_tokens for s in shares)
        assert after.preemptions - before.preemptions == len(output.preempted)
        assert not {share.request for share in shares} & set(output.preempted), "preempted and scheduled"
        sampled = self.forward(output)
        between()
        self.scheduler.update(output, sampled)
        self.scheduler.check_invariants()
        self.num_steps += 1
        return output

    def forget_the_last_step(self) -> None:
        """After the scheduler started over nothing is an answer that goes on."""
        self._just_sampled = set()

    def run(self, max_steps: int = 10_000) -> list[SchedulerOutput]:
        """Steps until nothing is left to do."""
        outputs = []
        while self.scheduler.has_unfinished():
            assert len(outputs) < max_steps, "no end in sight"
            outputs.append(self.step())
        return outputs


_ids = iter(range(1 << 60))


def make_request(
    prompt: list[int],
    *,
    max_tokens: int = 4,
    priority: int = 0,
    cache_salt: str = "",
    attn_policy: str = "",
    eos: tuple[int, ...] = (),
    seed: int = 0,
    **params: object,
) -> Request:
    """A request with a fresh id, arriving after all made before."""
    number = next(_ids)
    return Request(
        id=number,
        label="label",
        arrival=number,
        prompt_token_ids=list(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        eos_token_ids=eos,
        priority=priority,
        cache_salt=cache_salt,
        attn_policy=attn_policy,
        seed=seed,
    )


def build(
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    num_compact: int = 0,
    window: int | None = None,
    history_budget: int | None = None,
    seqs: int = 8,
    budget: int = 256,
    max_model_len: int = 1000,
    **kwargs: object,
) -> FakeModel:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=max_model_len)
    shape = PoolShape(block_size, num_blocks, num_compact, window, history_budget)
    scheduler = Scheduler(config, shape, **kwargs)  # type: ignore[arg-type]  # options as they come
    # By default each request goes on with its own tokens, never an end token.
    return FakeModel(
        scheduler,
        shape,
        next_token=lambda r: 1000 * r.id + 500 + len(r.output_token_ids),
    )


def add(model: FakeModel, prompt: list[int], **kwargs: object) -> Request:
    request = make_request(prompt, **kwargs)  # type: ignore[arg-type]
    model.scheduler.add(request)
    return request


_distinct = itertools.count(10)


def prompt_of(length: int) -> list[int]:
    """A prompt that shares nothing with any other."""
    start = 10_000 * next(_distinct)
    return list(range(start, start + length))


def tokens_of(output: SchedulerOutput, request: Request) -> int:
    return sum(share.num_tokens for share in output.scheduled if share.request is request)
