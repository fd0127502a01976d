"""Scheduling laws, each on a model that remembers every row (see fake_model)."""

from __future__ import annotations

import pytest
from fake_model import add, build, make_request, prompt_of, tokens_of

from octavo.config import SchedulerConfig
from octavo.engine.blocks import PoolShape
from octavo.engine.resources import fit_max_model_len
from octavo.engine.scheduler import MAX_PASSED, Scheduler
from octavo.request import Request, Status

# ---- admission


def test_s02_a_prompt_longer_than_max_model_len_is_refused_with_both_numbers() -> None:
    model = build(max_model_len=20)
    with pytest.raises(ValueError, match=r"has 21 tokens, more than max_model_len 20"):
        add(model, prompt_of(21))
    assert not model.scheduler.has_unfinished()
    fine = add(model, prompt_of(19))
    model.run()
    assert fine.finish_reason == "length"
    assert fine.num_tokens == 20


def test_s03_a_prompt_that_the_whole_pool_cannot_hold_is_refused() -> None:
    model = build(num_blocks=8, block_size=4)
    with pytest.raises(
        ValueError, match=r"40 tokens, more than the whole KV pool holds: 32 \(8 blocks of 4\)"
    ):
        add(model, prompt_of(40))
    add(model, prompt_of(32))
    model.run()


def test_an_empty_prompt_and_a_used_id_are_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match="prompt is empty"):
        add(model, [])
    with pytest.raises(ValueError, match="whole numbers"):
        add(model, [1, -1])
    request = add(model, [1, 2])
    with pytest.raises(ValueError, match="in use"):
        model.scheduler.add(request)
    model.run()
    with pytest.raises(ValueError, match="in use"):
        model.scheduler.add(request)
    with pytest.raises(ValueError, match="never added"):
        model.scheduler.finish(make_request([1]), "abort")


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_below_one_are_refused(field: str) -> None:
    values = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        Scheduler(SchedulerConfig(**values), PoolShape(4, 4))
    with pytest.raises(ValueError, match="max_model_len must be resolved"):
        Scheduler(SchedulerConfig(), PoolShape(4, 4))


def test_s04_a_request_that_outgrows_the_pool_ends_and_the_engine_lives_on() -> None:
    model = build(num_blocks=2, block_size=4)
    request = add(model, prompt_of(7), max_tokens=10)
    model.run()
    # Tokens 0..7 fill the pool; the one sampled after them needs no block.
    assert (request.finish_reason, len(request.output_token_ids)) == ("length", 2)
    after = add(model, prompt_of(3), max_tokens=2)
    model.run()
    assert len(after.output_token_ids) == 2


def test_s14_max_model_len_is_fitted_to_the_pool() -> None:
    assert fit_max_model_len(None, 2048, 4096) == (2048, None)
    assert fit_max_model_len(100, 2048, 4096) == (100, None)
    for requested in (None, 2048):
        fitted, line = fit_max_model_len(requested, 2048, 1024)
        assert fitted == 1024
        assert line == "max_model_len lowered from 2048 to 1024: the KV pool holds no more"
    with pytest.raises(ValueError, match=r"model's 2048, got 4096"):
        fit_max_model_len(4096, 2048, 10_000)
    with pytest.raises(ValueError, match="holds 1 tokens"):
        fit_max_model_len(None, 2048, 1)


def test_s13_a_label_may_be_used_twice_and_again_after_an_abort() -> None:
    model = build()
    one, two = add(model, prompt_of(5)), add(model, prompt_of(6))
    assert one.label == two.label
    assert one.id != two.id
    model.step()
    model.scheduler.finish(one, "abort")
    three = add(model, prompt_of(7))
    model.run()
    assert (one.finish_reason, two.finish_reason, three.finish_reason) == ("abort", "length", "length")


# ---- how a request ends


def test_max_tokens_zero_computes_the_prompt_and_samples_nothing() -> None:
    model = build(budget=4)
    request = add(model, prompt_of(10), max_tokens=0)
    outputs = model.run()
    assert len(outputs) == 3
    assert not any(share.samples for output in outputs for share in output.scheduled)
    assert (request.finish_reason, request.output_token_ids, request.num_computed_tokens) == (
        "length",
        [],
        10,
    )


def test_end_tokens_stop_ids_and_their_limits() -> None:
    cases = [
        ({"eos": (7, 0)}, 0, ["stop", None, 1]),
        ({"eos": (7, 0)}, 7, ["stop", None, 1]),
        ({"stop_token_ids": [9]}, 9, ["stop", 9, 1]),
        ({"eos": (9,), "ignore_eos": True}, 9, ["length", None, 4]),
        ({"eos": (9,), "ignore_eos": True, "stop_token_ids": [9]}, 9, ["stop", 9, 1]),
        ({"eos": (9,), "min_tokens": 2}, 9, ["stop", None, 3]),
        ({"stop_token_ids": [9], "min_tokens": 2}, 9, ["stop", 9, 3]),
        ({}, 9, ["length", None, 4]),
    ]
    for kwargs, token, expected in cases:
        model = build()
        model.next_token = lambda request, token=token: token
        request = add(model, prompt_of(5), max_tokens=4, **kwargs)
        model.run()
        assert [request.finish_reason, request.stop_reason, len(request.output_token_ids)] == expected, kwargs


def test_update_returns_what_it_finished_and_wants_each_output_once() -> None:
    model = build()
    request = add(model, prompt_of(5), max_tokens=1)
    output = model.scheduler.schedule()
    with pytest.raises(RuntimeError, match="twice"):
        model.scheduler.schedule()
    assert model.scheduler.update(output, model.forward(output)) == [request]
    with pytest.raises(RuntimeError, match="once"):
        model.scheduler.update(output, {})
    empty = model.scheduler.schedule()
    assert empty.scheduled == ()
    assert model.scheduler.update(empty, {}) == []


# ---- a step


def test_s10_a_long_prompt_never_stalls_a_running_request() -> None:
    model = build(num_blocks=2000, budget=64, max_model_len=8000)
    a = add(model, prompt_of(5), max_tokens=200)
    model.step()
    b = add(model, prompt_of(4000), max_tokens=1)
    while not b.finished:
        output = model.step()
        assert tokens_of(output, a) == 1, "a token every step"
        assert sum(share.num_tokens for share in output.scheduled) <= 64
    assert model.num_steps == 1 + -(-4000 // 63)


@pytest.mark.parametrize("budget", [1, 7, 16, 64, 1000])
def test_the_budget_and_max_num_seqs_hold_and_all_end(budget: int) -> None:
    model = build(budget=budget, seqs=3, num_blocks=200)
    requests = [add(model, prompt_of(n), max_tokens=5) for n in (1, 3, 4, 5, 40, 17, 2)]
    for output in model.run():
        assert sum(share.num_tokens for share in output.scheduled) <= budget
        assert len(output.scheduled) <= 3
    assert all(len(request.output_token_ids) == 5 for request in requests)
    assert model.scheduler.stats.scheduled_tokens == sum(r.num_tokens - 1 for r in requests)


def test_decodes_come_first_then_chunks_by_priority() -> None:
    model = build(budget=8)
    long = add(model, prompt_of(40), priority=1)

    def shares() -> list[tuple[Request, int]]:
        return [(share.request, share.num_tokens) for share in model.step().scheduled]

    assert shares() == [(long, 8)]
    short = add(model, prompt_of(3), priority=0)
    assert shares() == [(short, 3), (long, 5)]
    later = add(model, prompt_of(30), priority=1)
    assert shares() == [(short, 1), (long, 7)]
    middle = add(model, prompt_of(10), priority=0)
    assert shares() == [(short, 1), (middle, 7)]
    assert shares() == [(short, 1), (middle, 3), (long, 4)]
    assert later.status is Status.WAITING
    model.run()


# ---- blocks run out


def test_s07_two_requests_that_outgrow_the_pool_together_both_finish() -> None:
    model = build(num_blocks=10, block_size=4)
    a = add(model, prompt_of(6), max_tokens=24)
    b = add(model, prompt_of(6), max_tokens=24)
    while model.scheduler.has_unfinished():
        oldest = a if not a.finished else b
        output = model.step()
        assert tokens_of(output, oldest) >= 1, "the oldest always makes progress"
    assert len(a.output_token_ids) == len(b.output_token_ids) == 24
    assert a.num_preemptions == 0
    assert b.num_preemptions == 1
    # What was computed again is at most what the second had when it was preempted.
    assert model.scheduler.stats.scheduled_tokens <= 2 * 29 + 20


@pytest.mark.parametrize(("num_blocks", "length"), [(9, 4), (11, 12)])
def test_admission_leaves_room_for_the_growth_of_what_runs(num_blocks: int, length: int) -> None:
    # The long one fills 8 blocks and goes on into one more; a short one would fit into the rest now.
    model = build(num_blocks=num_blocks, block_size=4)
    long = add(model, prompt_of(32), max_tokens=4)
    short = add(model, prompt_of(length), max_tokens=1)
    while not long.finished:
        output = model.step()
        assert tokens_of(output, short) == 0
    model.run()
    assert model.scheduler.stats.preemptions == 0
    assert short.finish_reason == "length"


def test_many_growing_requests_preempt_a_bounded_number_of_times() -> None:
    model = build(num_blocks=20, block_size=2, seqs=16, budget=64)
    requests = [add(model, prompt_of(4), max_tokens=16) for _ in range(16)]
    model.run()
    needed = sum(r.num_tokens - 1 for r in requests)
    stats = model.scheduler.stats
    assert all(len(r.output_token_ids) == 16 for r in requests)
    assert 0 < stats.preemptions <= 3 * len(requests)
    assert stats.scheduled_tokens <= 2.5 * needed, (stats, needed)


def test_s08_counters_only_rise_and_a_resume_is_no_hit() -> None:
    model = build(num_blocks=10, block_size=4)
    a = add(model, prompt_of(6), max_tokens=24)
    b = add(model, prompt_of(6), max_tokens=24)
    before = model.scheduler.stats
    while model.scheduler.has_unfinished():
        model.step()
        after = model.scheduler.stats
        for name in ("prefix_queries", "prefix_hits", "preemptions", "evictions", "scheduled_tokens"):
            assert getattr(after, name) >= getattr(before, name)
        before = after
    assert before.preemptions == b.num_preemptions == 1
    assert (before.prefix_queries, before.prefix_hits) == (12, 0)
    assert a.num_cached_tokens == b.num_cached_tokens == 0, "fixed at the first admission"


@pytest.mark.parametrize("caching", [True, False])
def test_s09_a_preempted_request_gives_the_same_tokens(caching: bool) -> None:
    def serve(num_blocks: int) -> tuple[list[list[int]], int]:
        model = build(num_blocks=num_blocks, block_size=4, prefix_cache=caching)
        model.next_token = lambda r: (sum(r.token_ids) * 31 + len(r.output_token_ids)) % 97
        requests = [
            add(model, list(range(i, i + 6)), max_tokens=24, min_tokens=20, eos=(3,)) for i in (0, 50)
        ]
        model.run()
        return [r.output_token_ids for r in requests], model.scheduler.stats.preemptions

    small, preemptions = serve(10)
    large, none = serve(100)
    assert small == large
    assert preemptions > 0
    assert none == 0


def test_s11_small_requests_pass_a_large_one_a_bounded_number_of_times() -> None:
    model = build(num_blocks=20, block_size=4, seqs=8)
    add(model, prompt_of(40), max_tokens=30)
    model.step()
    large = add(model, prompt_of(60), max_tokens=1)
    small = [add(model, prompt_of(3), max_tokens=2) for _ in range(60)]
    started: list[Request] = []
    while large.status is Status.WAITING:
        for share in model.step().scheduled:
            if share.request not in started:
                started.append(share.request)
    passed = [r for r in started if r in small and started.index(r) < started.index(large)]
    assert 0 < len(passed) <= MAX_PASSED
    model.run()
    assert all(r.finish_reason == "length" for r in small)


def test_a_better_priority_goes_first_and_takes_blocks_only_when_it_lacks_them() -> None:
    model = build(num_blocks=8, block_size=4, seqs=4)
    low = add(model, prompt_of(20), priority=5, max_tokens=8)
    model.step()
    roomy = add(model, prompt_of(4), priority=0, max_tokens=2)
    model.step()
    assert low.num_preemptions == 0
    urgent = add(model, prompt_of(16), priority=0, max_tokens=2)
    output = model.step()
    assert output.preempted == (low,)
    assert tokens_of(output, urgent) == 16
    assert tokens_of(output, low) == 0
    model.run()
    assert low.num_preemptions == 1
    assert [r.finish_reason for r in (low, roomy, urgent)] == ["length"] * 3


def test_what_is_preempted_does_not_come_back_in_the_same_step() -> None:
    model = build(num_blocks=11, block_size=4)
    model.next_token = lambda r: 500 + len(r.output_token_ids)
    prompt = prompt_of(4)
    oldest = add(model, prompt, max_tokens=20)
    for _ in range(4):
        model.step()
    growing, large = add(model, prompt_of(4), max_tokens=20), add(model, prompt_of(15), max_tokens=20)
    twin = add(model, prompt, max_tokens=20)  # says what the oldest says, so it shares all its full blocks
    for _ in range(5):
        model.step()
    assert twin.block_table == oldest.block_table[:2]
    # The growing one lacks a block. The twin has none of its own to give, so the large one goes
    # too; that leaves room for the twin, which comes back in the next step.
    output = model.step()
    assert output.preempted == (twin, large)
    assert [share.request for share in output.scheduled] == [oldest, growing]
    output = model.step()
    assert twin in [share.request for share in output.scheduled]
    model.run()


def test_a_better_priority_does_not_preempt_for_a_place() -> None:
    model = build(seqs=1)
    low = add(model, prompt_of(8), priority=1, max_tokens=5)
    model.step()
    later, urgent = add(model, prompt_of(8), priority=1), add(model, prompt_of(8), priority=0)
    while not low.finished:
        model.step()
    assert low.num_preemptions == 0
    model.step()
    assert urgent.status is Status.RUNNING
    assert later.status is Status.WAITING


@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "finished"])
def test_s12_abort_in_any_state(state: str) -> None:
    model = build(num_blocks=10, block_size=4, seqs=2)
    a, b = (add(model, prompt_of(6), max_tokens=24) for _ in range(2))
    c = add(model, prompt_of(2))
    model.step()
    if state == "preempted":
        while b.status is not Status.PREEMPTED:
            model.step()
    elif state == "finished":
        model.run()
    victim = {"waiting": c, "running": a, "finished": a}.get(state, b)
    reason = victim.finish_reason
    model.scheduler.finish(victim, "abort")
    model.scheduler.check_invariants()
    assert victim.finish_reason == (reason or "abort")
    assert not victim.block_table
    model.run()
    stats = model.scheduler.stats
    assert stats.used_blocks == stats.num_put_off == 0
    assert stats.free_blocks + stats.cached_blocks == 10
    assert stats.finished == 3


def test_s06_recycled_blocks_are_forgotten_and_the_count_returns_to_its_baseline() -> None:
    model = build(num_blocks=3, block_size=4)
    prompt = prompt_of(8)
    add(model, prompt, max_tokens=1)
    model.run()
    assert model.scheduler.stats.cached_blocks == 2
    other = add(model, prompt_of(11), max_tokens=1)
    model.run()
    assert other.num_cached_tokens == 0
    again = add(model, prompt, max_tokens=1)
    model.run()
    assert again.num_cached_tokens == 0, "its blocks were given to another"
    stats = model.scheduler.stats
    assert stats.free_blocks + stats.cached_blocks == 3
    model.scheduler.reset_prefix_cache()
    assert model.scheduler.stats.free_blocks == 3


def test_s16_nothing_is_left_after_many_requests() -> None:
    model = build(num_blocks=40, block_size=4, seqs=8)
    for n in range(600):
        request = add(model, [n % 7, n % 5, *range(n, n + n % 9)], max_tokens=1 + n % 4)
        if n % 10 == 0:
            model.scheduler.finish(request, "abort")
        if n % 3 == 0:
            model.scheduler.update(output := model.scheduler.schedule(), model.forward(output))
    model.run()
    scheduler = model.scheduler
    stats = scheduler.stats
    assert stats.finished == 600
    assert stats.free_blocks + stats.cached_blocks == 40
    assert not scheduler._entries
    assert not scheduler._running
    assert not scheduler._waiting._entries
    assert not scheduler._waiting._claims
    assert not scheduler._waiting._put_off
    assert len(scheduler._blocks.cache) == stats.cached_blocks
    assert len(scheduler._blocks.cache.forest.roots) <= 1


# ---- the limit for prompts beside answers


def test_prompts_get_no_more_than_the_limit_beside_answers_and_all_without() -> None:
    model = build(budget=64, num_blocks=128)
    running = add(model, prompt_of(4), max_tokens=30)
    model.step(prefill_limit=5)
    late = add(model, prompt_of(40), max_tokens=2)
    for done in range(0, 40, 5):
        output = model.step(prefill_limit=5)
        assert late.num_computed_tokens == done + 5
        assert tokens_of(output, running) == 1
        assert tokens_of(output, late) == 5
    model.scheduler.finish(running, "abort")
    model.run()
    alone = add(model, prompt_of(60), max_tokens=2)
    assert tokens_of(model.step(prefill_limit=5), alone) == 60


def test_a_limit_changes_no_answer() -> None:
    answers = []
    for limit in (None, 1, 7):
        model = build(budget=32, num_blocks=128, block_size=4)
        model.next_token = lambda request: sum(request.token_ids) % 1000
        requests = [add(model, [i, 2, 3] * (5 * i + 1), max_tokens=12) for i in range(6)]
        while model.scheduler.has_unfinished():
            model.step(prefill_limit=limit)
        answers.append([request.output_token_ids for request in requests])
    assert answers[0] == answers[1] == answers[2]
