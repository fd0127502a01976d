"""What the scheduler says about a step, as plain data. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.request import Request


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first ``num_rows`` positions of block ``src`` into block ``dst``, in every layer."""

    src: int
    dst: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class SummaryMade:
    """Compact block ``dst`` becomes a summary of ``level``, of 16 compact blocks or of 4 summaries below
    it."""

    dst: int
    level: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Fill block ``dst``, compact or not, with ``rows``, which an earlier process left on disk."""

    dst: int
    rows: memoryview
    compact: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: tokens ``start .. start + num_tokens - 1`` of it are computed.

    ``compactions`` are pairs of a block as stored and a compact block, which each layer fills with its
    compact form after its K and V are written and before it attends; then it makes the ``summaries``, in
    order.
    """

    request: Request
    start: int
    num_tokens: int
    compactions: tuple[tuple[int, int], ...] = ()
    summaries: tuple[SummaryMade, ...] = ()
    #: Of each block that its last token reads in a summary, where its compact form is: a compact block, rows
    #: on disk, or None. Empty where nothing is recalled.
    recallable: tuple[int | memoryview | None, ...] = ()

    @property
    def samples(self) -> bool:
        """True when this share ends at the request's last token, so that a token is sampled.

        Never for a request whose max_tokens is 0: it only wants its prompt computed. To be read
        before :meth:`Scheduler.update`, which appends the token.
        """
        return self.request.max_tokens > 0 and self.start + self.num_tokens == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step computes. ``copies`` run first, in this order, before anything is written.

    A source may be the destination of a later copy or load, or a block that the step writes: the order
    makes that safe, so they must not be merged or reordered.
    """

    scheduled: tuple[ScheduledRequest, ...]
    copies: tuple[BlockCopy | BlockLoad, ...] = ()
    preempted: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Where the scheduler stands. Numbers of blocks and requests are gauges; the rest only rises.

    ``num_waiting`` includes ``num_put_off`` (waiting for a prefix in flight). ``cached_blocks`` are
    in no block table but can be matched or evicted. ``prefix_queries`` and ``prefix_hits`` are
    prompt tokens, counted once a request at its first admission; ``disk_hits`` are those hits that came
    from disk.
    """

    num_running: int
    num_waiting: int
    num_put_off: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    prefix_queries: int
    prefix_hits: int
    disk_hits: int
    preemptions: int
    evictions: int
    scheduled_tokens: int
    finished: int
    free_compact_blocks: int = 0
    cached_compact_blocks: int = 0
    used_compact_blocks: int = 0


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """A running request and its block table."""

    label: str
    salt: str
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class CacheView:
    """The pool as it is, for people to look at; ``refs``, ``cached`` and ``parents`` have an item a block.

    ``refs`` counts the block tables that hold it, ``cached`` says whether the prefix cache can match it,
    ``parents`` is the cached block before it in its tree, or -1.
    """

    block_size: int
    refs: list[int]
    cached: list[bool]
    parents: list[int]
    owners: list[BlockOwner]

    @classmethod
    def of(
        cls, block_size: int, refs: Sequence[int], parents: Mapping[int, int], running: Sequence[Request]
    ) -> CacheView:
        """``parents`` has the cached blocks only; ``running`` are the requests that hold blocks."""
        blocks = range(len(refs))
        return cls(
            block_size=block_size,
            refs=list(refs),
            cached=[block in parents for block in blocks],
            parents=[parents.get(block, -1) for block in blocks],
            owners=[BlockOwner(r.label, r.cache_salt, [b for b in r.block_table if b >= 0]) for r in running],
        )


@dataclass(slots=True)
class StepDraft:
    """A step in the making."""

    budget: int
    scheduled: dict[int, ScheduledRequest] = field(default_factory=dict)
    copies: list[BlockCopy | BlockLoad] = field(default_factory=list)
    loads: bool = False
    preempted: dict[int, Request] = field(default_factory=dict)
