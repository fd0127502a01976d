"""An interrupt may come at any line of the engine: no block is lost, no request, and no answer changes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tiny_engine import always, greedy, prompt

from octavo.engine.engine import INTERRUPTED
from octavo.llm import LLM
from octavo.request import SamplingParams

OURS = ("/octavo/engine/", "/octavo/cache/", "/octavo/tokenizer/")
SHARED = prompt(18, seed=9)
LETTER = ord("x") - ord("!")
#: Prefixes that are shared, preemption, several choices, stops, scored prompts.
JOBS = [
    ([*SHARED, 40, 41], greedy(9)),
    ([*SHARED, 50], SamplingParams(n=2, seed=3, temperature=1.5, max_tokens=7, ignore_eos=True)),
    (prompt(13, seed=4), greedy(6, prompt_logprobs=1, logprobs=1)),
    (prompt(5, seed=5), always(LETTER, stop=["xxx"], max_tokens=12)),
    (prompt(7, seed=6), greedy(0)),
]


class Bomb:
    """Raises KeyboardInterrupt at the line of our engine whose turn it is; counts lines otherwise."""

    def __init__(self, fuses: Iterator[int]) -> None:
        self.fuses = fuses
        self.left = next(fuses)
        self.lines = 0

    def __call__(self, frame, event, arg):
        if not any(part in frame.f_code.co_filename for part in OURS):
            return None
        if event == "line":
            self.lines += 1
            self.left -= 1
            if self.left == 0:
                self.left = next(self.fuses)
                raise KeyboardInterrupt
        return self


@contextmanager
def traced(bomb: Bomb) -> Iterator[Bomb]:
    before = sys.gettrace()
    sys.settrace(bomb)
    try:
        yield bomb
    finally:
        sys.settrace(before)


def run(t, bomb: Bomb) -> tuple[dict, int]:
    """All jobs to their ends, going on after every interrupt; the last outputs, and the interrupts."""
    ids = [t.add(*job) for job in JOBS]
    last, interrupts = {}, 0
    for _ in range(500):
        if not t.engine.has_unfinished():
            return {place: last[entry] for place, entry in enumerate(ids)}, interrupts
        outputs = []
        try:
            with traced(bomb):
                outputs = t.engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        for output in outputs:
            last[int(output.request_id)] = output
    raise AssertionError("no end in sight")


def never() -> Iterator[int]:
    return iter([10**9])


def small(tiny):
    """Too few blocks for all, so that some are preempted; warm, so that some are cached."""
    t = tiny(num_blocks=16, budget=24)
    t.run((SHARED, greedy(1)))
    return t


@pytest.mark.parametrize(
    "again", [None, pytest.param(7, marks=pytest.mark.slow), pytest.param(61, marks=pytest.mark.slow)]
)
def test_an_interrupt_at_any_line_costs_no_block_no_request_and_no_token(tiny, again):
    """``again``: so many lines after the first there is a second one, which may cut the recovery short."""
    run(small(tiny), Bomb(never()))  # what is done once in a process is not counted
    counter = Bomb(never())
    expected, _ = run(small(tiny), counter)
    assert all(output.error is None for output in expected.values())
    failed = 0
    for fuse in range(
        1 if again is None else 5, counter.lines, counter.lines // (36 if again is None else 16)
    ):
        rest = [10**9] if again is None else [again, 10**9]
        t = small(tiny)
        outputs, interrupts = run(t, Bomb(itertools.chain([fuse], rest)))
        assert interrupts >= 1
        errors = [output for output in outputs.values() if output.error is not None]
        assert all(output.error == INTERRUPTED for output in errors)
        assert len(errors) <= interrupts
        failed += len(errors)
        for place, output in outputs.items():
            if output.error is None:
                assert output.outputs == expected[place].outputs, (fuse, place)
                assert output.prompt_logprobs == expected[place].prompt_logprobs, (fuse, place)
        stats = t.engine.scheduler_stats
        assert (stats.used_blocks, stats.free_blocks + stats.cached_blocks) == (0, 16)
        t.scheduler.check_invariants()
        assert not t.engine._owner
    assert failed < 20  # only those whose text was just being extended


def test_the_counters_do_not_fall(tiny):
    t = small(tiny)
    before = t.engine.scheduler_stats
    run(t, Bomb(iter([700, 10**9])))
    after = t.engine.scheduler_stats
    for name in ("prefix_queries", "prefix_hits", "preemptions", "evictions", "scheduled_tokens", "finished"):
        assert getattr(after, name) >= getattr(before, name), name


@pytest.mark.parametrize("fuse", range(3, 60, 8))
def test_a_call_that_is_interrupted_leaves_the_others_alone(tiny, fuse):
    """``add_request``, ``abort`` and ``reset_prefix_cache``, cut short and never repeated."""
    params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True)
    (expected,) = tiny().run((prompt(9), greedy(8)))
    t = tiny()
    kept, other = t.add(prompt(9), greedy(8)), t.add(prompt(30, seed=2), params)
    t.engine.step()
    for call in (
        lambda: t.add(prompt(11), params),
        lambda: t.engine.abort(other),
        t.engine.reset_prefix_cache,
    ):
        try:
            with traced(Bomb(iter([fuse, 10**9]))):
                call()
        except KeyboardInterrupt:
            pass
    last = t.drain()
    assert last[kept].outputs == expected.outputs
    assert t.engine.scheduler_stats.used_blocks == 0
    assert not t.engine._owner


def test_a_refusal_keeps_what_is_cached(tiny):
    t = tiny(num_blocks=8)
    t.run((prompt(9), greedy(1)))
    with pytest.raises(ValueError):
        t.add(prompt(40), greedy(1))
    (output,) = t.run((prompt(9), greedy(1)))
    assert output.num_cached_tokens == 8


def test_an_interrupted_generate_ends_and_a_stream_beside_it_goes_on(tiny, monkeypatch):
    t = tiny(num_blocks=128)
    llm = LLM.from_engine(t.engine)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (expected,) = llm.generate("hello", params, use_tqdm=False)
    stream = llm.stream("hello", params)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(t.model, "logits", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a longer prompt", "another"], params, use_tqdm=False)
    *_, last = stream
    assert last.outputs == expected.outputs
    assert not llm.engine.has_unfinished()
    assert llm.engine.scheduler_stats.used_blocks == 0
