"""What ``Scheduler`` and its prefix cache cost the host a step, with much waiting and much cached."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from octavo.config import SchedulerConfig
from octavo.engine.blocks import PoolShape
from octavo.engine.scheduler import Scheduler
from octavo.engine.step import SchedulerOutput
from octavo.request import Request, SamplingParams

BLOCK_SIZE = 16
RUNNING = 64
PROMPT = 64
#: Answers are 32 to 96 tokens, so about one of the 64 running requests ends in a step.
SHORTEST, LONGEST = 32, 96
#: Blocks of each request that fills the cache.
BLOCKS_EACH = 100
VOCAB = 49_152


@dataclass(frozen=True, slots=True)
class Case:
    """``full``: the pool has no spare blocks, so each new one is taken from the cache."""

    name: str
    waiting: int
    cached_blocks: int
    full: bool = False


FULL = (
    Case("10 waiting, empty cache", 10, 0),
    Case("10,000 waiting, 100,000 cached blocks", 10_000, 100_000),
    Case("the same, pool full: each block evicts one", 10_000, 100_000, full=True),
)
QUICK = (Case("2 waiting, empty cache", 2, 0), Case("20 waiting, 200 cached blocks", 20, 200, full=True))


class Load:
    """A scheduler under synthetic requests with random prompts; nothing is computed."""

    def __init__(self, case: Case, steps: int) -> None:
        self.case = case
        each = -(-(PROMPT + LONGEST + 1) // BLOCK_SIZE)
        # Of what ends, the blocks stay cached: without spare ones for them, they would evict.
        spare = 2 * RUNNING * each + (0 if case.full else 2 * steps * each)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=RUNNING, max_model_len=BLOCKS_EACH * BLOCK_SIZE + 1),
            PoolShape(BLOCK_SIZE, case.cached_blocks + spare),
            fingerprint="synthetic",
        )
        self._random = random.Random(0)
        self._ids = count()

    def add(self, prompt: int, max_tokens: int) -> None:
        number = next(self._ids)
        self.scheduler.add(
            Request(
                id=number,
                label=str(number),
                prompt_token_ids=self._random.choices(range(VOCAB), k=prompt),
                params=SamplingParams(max_tokens=max_tokens),
                max_tokens=max_tokens,
                arrival=number,
            )
        )

    def add_usual(self) -> None:
        self.add(PROMPT, self._random.randint(SHORTEST, LONGEST))

    def step(self) -> tuple[float, int]:
        """Seconds of ``schedule`` and ``update`` together, and how many requests ended."""
        start = time.perf_counter()
        output = self.scheduler.schedule()
        scheduled = time.perf_counter()
        sampled = self._sample(output)
        middle = time.perf_counter()
        done = self.scheduler.update(output, sampled)
        return time.perf_counter() - middle + scheduled - start, len(done)

    def _sample(self, output: SchedulerOutput) -> dict[int, int]:
        return {s.request.id: self._random.randrange(VOCAB) for s in output.scheduled if s.samples}

    def prepare(self) -> None:
        """Fill the cache, then the places, then the queue, and let the answers get out of step."""
        for _ in range(self.case.cached_blocks // BLOCKS_EACH):
            self.add(BLOCKS_EACH * BLOCK_SIZE, 1)
        while self.scheduler.has_unfinished():
            self.step()
        if self.case.full:
            self._fill_pool()
        for _ in range(RUNNING + self.case.waiting):
            self.add_usual()
        for _ in range(LONGEST + RUNNING * PROMPT // 512):
            self.step_and_refill()

    def _fill_pool(self) -> None:
        while free := self.scheduler.stats.free_blocks:
            self.add(min(free, BLOCKS_EACH) * BLOCK_SIZE, 1)
            while self.scheduler.has_unfinished():
                self.step()

    def step_and_refill(self) -> float:
        seconds, done = self.step()
        for _ in range(done):
            self.add_usual()
        return seconds


def measure_case(case: Case, steps: int) -> dict[str, Any]:
    """Median, p99 and longest milliseconds of a step, with Python's garbage collection as it is."""
    load = Load(case, steps)
    load.prepare()
    before = load.scheduler.stats
    gc.collect()
    seconds = sorted(load.step_and_refill() for _ in range(steps))
    after = load.scheduler.stats
    return {
        **asdict(case),
        "steps": steps,
        "running": after.num_running,
        "waiting_after": after.num_waiting,
        "cached_blocks_before": before.cached_blocks,
        "cached_blocks_after": after.cached_blocks,
        "evictions": after.evictions - before.evictions,
        "finished": after.finished - before.finished,
        "median_ms": statistics.median(seconds) * 1e3,
        "p99_ms": percentile(seconds, 99) * 1e3,
        "max_ms": seconds[-1] * 1e3,
    }


def percentile(ordered: list[float], percent: int) -> float:
    """The least of the sorted values that ``percent`` in a hundred of them do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def measure_scheduling(*, quick: bool, report: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for case in QUICK if quick else FULL:
        report(f"scheduling: {case.name}")
        rows.append(measure_case(case, 50 if quick else 1000))
    return rows
