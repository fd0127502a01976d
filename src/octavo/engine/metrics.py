"""What the engine has done so far: counters and times, plain data."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from octavo.request import AttnTopkReport, HistoryReport

#: Upper bounds of the buckets, in seconds; one more bucket holds what is above the last.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Histogram:
    """Observations of a time in seconds, counted in fixed buckets: its size never grows."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds
        self.count += 1

    @property
    def mean(self) -> float:
        """Seconds; 0 before the first observation."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class EngineMetrics:
    """Counters only rise.

    Attributes:
        prompt_tokens: tokens of admitted prompts (one prompt counts once, whatever its n).
        generation_tokens: sampled tokens.
        computed_tokens: tokens that went through the model, recomputed ones included.
        prefix_queries: prompt tokens that were looked up in the prefix cache at an admission.
        prefix_hits: those of them that were found. A resume after a preemption counts in neither.
        disk_hits: those of the hits that came from disk.
        num_preemptions: preemptions of requests.
        num_evictions: cached blocks that were given up.
        num_steps: engine steps that computed something.
        finished: finish_reason -> number of choices.
        time_to_first_token, inter_token, end_to_end: seconds, per choice.
        step_time: seconds per step.
        attn_topk: what top-k attention read and left out, over all requests that were not dense.
        attn_topk_dropped_mass: its dropped mass summed over rows; unlike a mean times a number it only rises.
        history: the rows that read summaries of old history, and how much of their mass fell on these.
        history_mass: that mass summed over rows; it only rises.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    disk_hits: int = 0
    num_preemptions: int = 0
    num_evictions: int = 0
    num_steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    end_to_end: Histogram = field(default_factory=Histogram)
    step_time: Histogram = field(default_factory=Histogram)
    attn_topk: AttnTopkReport = field(default_factory=lambda: AttnTopkReport(attn_topk=0))
    attn_topk_dropped_mass: float = 0.0
    history: HistoryReport = field(default_factory=HistoryReport)
    history_mass: float = 0.0
