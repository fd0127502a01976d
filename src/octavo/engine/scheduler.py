"""Decides what each step computes. Holds ints only; free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.request import Request


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first ``num_rows`` positions of block ``src`` into block ``dst``, in every layer."""

    src: int
    dst: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: tokens ``start .. start + num_tokens - 1`` of it are computed."""

    request: Request
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """True when this share ends at the request's last token, so that a token is sampled."""
        return self.start + self.num_tokens == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step computes. ``copies`` run first, in this order, before anything is written."""

    scheduled: tuple[ScheduledRequest, ...]
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[Request, ...] = ()
    #: Requests that ended while scheduling (they can never be served); with a finish_reason.
    ended: tuple[Request, ...] = field(default=())
