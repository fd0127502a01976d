"""A state machine over pool, prefix cache and scheduler, with a model that remembers every row."""

from __future__ import annotations

from typing import Any

import pytest
from fake_model import FakeModel, make_request, next_token
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.cache.block_pool import BlockPool
from octavo.cache.chain import Node, sha256
from octavo.cache.prefix_cache import PrefixCache
from octavo.config import SchedulerConfig
from octavo.engine.blocks import PoolShape
from octavo.engine.scheduler import Scheduler
from octavo.engine.waiting import Entry
from octavo.request import Request

VOCAB = 3
EOS = 2
#: Prompts begin with one of these, so that prefixes are often shared, in part or whole.
STEMS = [[], [0] * 9, [0, 1] * 6, [0, 1] * 3 + [2, 0, 2, 1, 1, 0]]


class SchedulerMachine(RuleBasedStateMachine):
    copies_first = True

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(1, 14),
        budget=st.sampled_from([1, 3, 7, 64]),
        max_num_seqs=st.integers(1, 5),
        max_model_len=st.sampled_from([12, 40]),
        kind=st.sampled_from(["sha256", "sha256", "sha256", "constant", "two values", "off"]),
        window_blocks=st.sampled_from([None, None, 1, 2, 4]),
        num_compact=st.integers(1, 12),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        max_model_len: int,
        kind: str,
        window_blocks: int | None,
        num_compact: int,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len
        )
        shape = PoolShape(block_size, num_blocks)
        if window_blocks is not None:
            shape = PoolShape(block_size, num_blocks, num_compact, window_blocks * block_size)
        self.start_with(shape, config, kind)

    def start_with(self, shape: PoolShape, config: SchedulerConfig, kind: str) -> None:
        hashes = {"constant": lambda data: b"x", "two values": lambda data: sha256(data)[:1] < b"\x80"}
        shape = shape._replace(step_tokens=config.max_num_batched_tokens)
        self.shape = shape
        self.scheduler = Scheduler(
            config,
            shape,
            prefix_cache=kind != "off",
            hash_function=lambda data: bytes(hashes.get(kind, sha256)(data)),
        )
        self.caching = kind != "off"
        self.config, self.capacity = config, shape.capacity
        self.model = FakeModel(
            self.scheduler,
            shape,
            next_token=lambda request: next_token(request, VOCAB),
            copies_first=self.copies_first,
        )
        self.requests: list[Request] = []
        self.counters: tuple[int, ...] = ()

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(0, 12),
        rest=st.lists(st.integers(0, VOCAB - 1), max_size=5),
        max_tokens=st.integers(0, 12),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        apart=st.sampled_from([("", ""), ("", ""), ("", "k"), ("a", "")]),
        copies=st.sampled_from([1, 1, 3]),
        extra=st.sampled_from([{}, {}, {}, {"prompt_logprobs": 0}, {"ignore_eos": True}, {"min_tokens": 1}]),
    )
    def add(self, stem, cut, rest, max_tokens, priority, apart, copies, extra) -> None:
        self.add_prompt(stem[:cut] + rest, max_tokens, priority, apart, copies, extra)

    def add_prompt(self, prompt, max_tokens, priority, apart, copies, extra) -> None:
        extra = {k: v for k, v in extra.items() if k != "min_tokens" or max_tokens}
        for seed in range(copies):
            request = make_request(
                prompt,
                max_tokens=max_tokens,
                priority=priority,
                cache_salt=apart[0],
                attn_policy=apart[1],
                eos=(EOS,),
                seed=seed,
                **extra,
            )
            limit = min(self.config.max_model_len, self.capacity)
            if 1 <= len(prompt) <= limit:
                self.scheduler.add(request)
                self.requests.append(request)
            else:
                with pytest.raises(ValueError):
                    self.scheduler.add(request)

    @rule(prefill_limit=st.sampled_from([None, 1, 3, 20]))
    def step(self, prefill_limit: int | None) -> None:
        self.model.step(prefill_limit=prefill_limit)

    @rule(count=st.integers(2, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        reason = request.finish_reason
        self.scheduler.finish(request, "abort")
        assert request.finish_reason == (reason or "abort")
        assert not request.block_table

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), before=st.booleans())
    def abort_within_a_step(self, data: st.DataObject, before: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if not before:
            self.model.step(between=lambda: self.scheduler.finish(request, "abort"))
            return
        # The step is never computed for this request: its rows, copied ones too, stay unwritten.
        output = self.scheduler.schedule()
        self.scheduler.finish(request, "abort")
        self.scheduler.check_invariants()
        self.scheduler.update(output, self.model.forward(output))

    @rule()
    def step_fails(self) -> None:
        """The forward pass raises before it copied or wrote anything: its requests end."""
        output = self.scheduler.schedule()
        for share in output.scheduled:
            self.scheduler.finish(share.request, "error")
        assert self.scheduler.update(output, {}) == []

    @rule(computed=st.booleans())
    def cut_short(self, computed: bool) -> None:
        """An interrupt: whatever was decided, all is computed again from the tokens that were taken."""
        output = self.scheduler.schedule()
        if computed:
            self.model.forward(output)
        self.scheduler.start_over([(r, len(r.output_token_ids)) for r in self.requests if not r.finished])
        self.model.forget_the_last_step()

    @rule()
    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_invariants()
        stats = self.scheduler.stats
        total = stats.free_blocks + stats.cached_blocks + stats.used_blocks
        assert total == self.shape.num_blocks
        compact = stats.free_compact_blocks, stats.cached_compact_blocks, stats.used_compact_blocks
        assert sum(compact) == self.shape.num_compact
        counters = (
            stats.prefix_queries,
            stats.prefix_hits,
            stats.preemptions,
            stats.evictions,
            stats.scheduled_tokens,
            stats.finished,
        )
        assert all(new >= old for new, old in zip(counters, self.counters, strict=False)), "a counter fell"
        self.counters = counters
        assert stats.prefix_hits <= stats.prefix_queries
        if not self.caching:
            assert stats.cached_blocks == 0
            assert stats.prefix_hits == 0

    def expected(self, request: Request) -> tuple[list[int], str]:
        """What the request must end with, whatever else ran."""
        out: list[int] = []
        limit = min(self.config.max_model_len, self.capacity + 1)
        if request.max_tokens == 0:
            return out, "length"
        while True:
            probe = make_request(request.prompt_token_ids, seed=request.seed)
            probe.output_token_ids = out
            out = [*out, next_token(probe, VOCAB)]
            if out[-1] == EOS and not request.params.ignore_eos and len(out) > request.params.min_tokens:
                return out, "stop"
            if len(out) >= request.max_tokens or len(request.prompt_token_ids) + len(out) >= limit:
                return out, "length"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        bound = sum(r.num_tokens + r.max_tokens for r in self.requests) * (len(self.requests) + 2) + 10
        self.model.run(max_steps=bound)
        stats = self.scheduler.stats
        assert stats.used_blocks == stats.num_running == stats.num_waiting == 0
        assert stats.finished == len(self.requests)
        for request in self.requests:
            tokens, reason = self.expected(request)
            if request.finish_reason in ("abort", "error"):
                assert request.output_token_ids == tokens[: len(request.output_token_ids)]
            else:
                assert (request.output_token_ids, request.finish_reason) == (tokens, reason)
        self.scheduler.reset_prefix_cache()
        self.scheduler.check_invariants()
        assert self.scheduler.stats.free_blocks == self.shape.num_blocks
        assert self.scheduler.stats.free_compact_blocks == self.shape.num_compact


class SummaryMachine(SchedulerMachine):
    """With a budget: blocks of one or two tokens, so that short sequences have levels of summaries."""

    @initialize(
        block_size=st.sampled_from([1, 1, 2]),
        num_blocks=st.integers(5, 40),
        budget=st.sampled_from([1, 5, 40]),
        max_num_seqs=st.integers(1, 4),
        kind=st.sampled_from(["sha256", "sha256", "sha256", "two values", "off"]),
        window_blocks=st.integers(1, 3),
        more_blocks=st.integers(16, 20),
        num_compact=st.integers(20, 120),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        kind: str,
        window_blocks: int,
        more_blocks: int,
        num_compact: int,
    ) -> None:
        history = (window_blocks * block_size, (window_blocks + more_blocks) * block_size)
        shape = PoolShape(block_size, num_blocks, num_compact, *history)
        self.start_with(shape, SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=250
        ), kind)  # fmt: skip

    @rule(
        stem=st.sampled_from([0, 1, 2]),
        length=st.integers(1, 120),
        rest=st.lists(st.integers(0, VOCAB - 1), max_size=5),
        max_tokens=st.integers(0, 100),
        priority=st.sampled_from([0, 0, 0, -1]),
    )
    def add_long(self, stem, length, rest, max_tokens, priority) -> None:
        prompt = [i * i * (stem + 1) // 7 % 3 for i in range(length)] + rest
        options = (max_tokens, priority, ("", ""), 1, {"ignore_eos": True})
        self.add_prompt(prompt, *options)

    @precondition(lambda self: any(r.finished for r in self.requests))
    @rule(data=st.data(), back=st.sampled_from([0, 0, 1, 10, 40]), max_tokens=st.integers(0, 60))
    def go_on(self, data: st.DataObject, back: int, max_tokens: int) -> None:
        """The next turn of a dialogue, or another one after an earlier turn."""
        before = data.draw(st.sampled_from([r for r in self.requests if r.finished])).token_ids
        prompt = [*before[: max(1, len(before) - back)], 1]
        self.add_prompt(prompt, max_tokens, 0, ("", ""), 1, {"ignore_eos": True})

    @rule(count=st.integers(10, 40))
    def many_steps(self, count: int) -> None:
        for _ in range(count):
            self.model.step()


SETTINGS = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)


def test_the_books_agree_and_every_request_reads_its_own_history() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)


def test_the_books_agree_with_summaries() -> None:
    run_state_machine_as_test(SummaryMachine, settings=settings(SETTINGS, max_examples=10))


# ---- mutants: each is a fault that the machine must find


def _forget_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "share", lambda self, *blocks: None)


def _free_a_cached_block(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, *blocks, keep: original(self, *blocks, keep=False))


def _match_before_written(monkeypatch: pytest.MonkeyPatch) -> None:
    # Registers a share's blocks when it is scheduled, one step before they are written.
    original = Scheduler._schedule_share

    def early(self: Scheduler, entry: Entry, step: object) -> None:
        original(self, entry, step)  # type: ignore[arg-type]  # patched in as a method
        share = step.scheduled.get(entry.request.id)  # type: ignore[attr-defined]  # patched in as a method
        if share is not None:
            entry.num_written = share.start + share.num_tokens
            entry.request.num_computed_tokens = entry.num_written
            self._register(entry)

    monkeypatch.setattr(Scheduler, "_schedule_share", early)


def _copy_after_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerMachine, "copies_first", False)


def _trust_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_is", staticmethod(lambda node, parent, tokens: True))


def _ignore_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.chain
    monkeypatch.setattr(
        PrefixCache, "chain", lambda self, tokens, salt, policy: original(self, tokens, "", policy)
    )


def _ignore_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.chain
    monkeypatch.setattr(PrefixCache, "chain", lambda self, tokens, salt, policy: original(self, tokens, salt))


def _evict_a_used_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def enqueue(self: PrefixCache, node: Node) -> None:
        self._leaves.remove(node)
        self._leaves.add(node)

    monkeypatch.setattr(PrefixCache, "_enqueue", enqueue)


def _preempt_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler._preempt
    monkeypatch.setattr(
        Scheduler, "_preempt", lambda self, entry, step: original(self, self._running[0], step)
    )


#: A mutant and a short history in which the machine finds it, whatever hypothesis draws elsewhere.
HISTORIES = [
    (_forget_a_reference, {"num_blocks": 2}, [{"rest": [0], "copies": 3}]),
    (_free_a_cached_block, {"num_blocks": 1}, [{"rest": [0]}]),
    (
        _match_before_written,
        {"num_blocks": 3, "budget": 3, "max_num_seqs": 2},
        [{"rest": [0, 0], "copies": 3}],
    ),
    (
        _copy_after_write,
        {"block_size": 2, "num_blocks": 3},
        [{"rest": [0, 0, 1]}, {"rest": [0, 0, 1]}, {"rest": [0, 1, 1]}],
    ),
    (
        _trust_the_digest,
        {"block_size": 2, "num_blocks": 3, "kind": "constant"},
        [{"stem": STEMS[1], "cut": 5}],
    ),
    (_ignore_the_salt, {"num_blocks": 2}, [{"rest": [0]}, {"rest": [0, 0], "apart": ("a", "")}]),
    (_ignore_the_policy, {"num_blocks": 2}, [{"rest": [0]}, {"rest": [0, 0], "apart": ("", "k")}]),
    (_evict_a_used_block, {"num_blocks": 1}, [{"rest": [0], "copies": 3}]),
    (
        _preempt_the_oldest,
        {"num_blocks": 4, "budget": 3, "max_num_seqs": 2},
        [{"rest": [0], "copies": 3, "max_tokens": 4, "extra": {"ignore_eos": True}}],
    ),
]


def _replay(start: dict[str, Any], adds: list[dict[str, Any]]) -> None:
    machine = SchedulerMachine()
    given = {"block_size": 1, "budget": 1, "max_num_seqs": 1, "max_model_len": 12, "kind": "sha256"}
    machine.start(**given | {"window_blocks": None, "num_compact": 1} | start)
    for add in adds:
        plain = {
            "stem": [],
            "cut": 0,
            "rest": [],
            "max_tokens": 0,
            "priority": 0,
            "apart": ("", ""),
            "copies": 1,
        }
        machine.add(**plain | {"extra": {}} | add)
        machine.books_agree()
    for _ in range(20):
        machine.step(None)
        machine.books_agree()
    machine.teardown()


@pytest.mark.parametrize(("break_it", "start", "adds"), HISTORIES)
def test_the_machine_finds_a_fault(break_it, start, adds, monkeypatch: pytest.MonkeyPatch) -> None:
    _replay(start, adds)
    break_it(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError)):
        _replay(start, adds)
