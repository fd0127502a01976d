"""The prefix cache through the scheduler, each law on a model that remembers every row."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from fake_model import FakeModel, add, build, make_request, prompt_of, tokens_of

from octavo.engine.scheduler import Scheduler
from octavo.engine.step import SchedulerOutput
from octavo.request import Request, Status


def test_s05_a_prompt_that_is_wholly_cached_computes_its_last_token() -> None:
    model = build(block_size=16)
    prompt = prompt_of(16)
    cold, warm = add(model, prompt), None
    model.run()
    warm = add(model, prompt)
    output = model.step()
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 15)
    assert tokens_of(output, warm) == 1
    assert warm.cache_miss_reason == "the whole prompt is cached; its last token (15) is always computed"


def test_p04_the_next_turn_reuses_prompt_and_reply() -> None:
    model = build(block_size=16)
    turn = add(model, prompt_of(21), max_tokens=9)
    model.run()
    history = turn.token_ids
    following = add(model, [*history, 1, 2, 3])
    model.run()
    # All but the last sampled token, which was never computed.
    assert following.num_cached_tokens == len(history) - 1 == 29


def _python_calls_of_a_turn(length: int, **shape: int) -> int:
    """Calls of Python functions in the scheduler, for a turn after a history of so many cached tokens."""
    scheduler = build(block_size=16, num_blocks=600, budget=9000, max_model_len=9000, **shape).scheduler
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    history = prompt_of(length)
    for question in ([], prompt_of(48)):
        request, calls = make_request(history + question, max_tokens=20), 0
        before = sys.getprofile()
        sys.setprofile(count)
        scheduler.add(request)
        while scheduler.has_unfinished():
            output = scheduler.schedule()
            scheduler.update(output, {request.id: 1})
        sys.setprofile(before)
    assert request.num_cached_tokens == length
    return calls


@pytest.mark.parametrize("shape", [{}, {"num_compact": 600, "window": 512}])
def test_no_python_function_is_called_for_each_block_of_a_history(shape: dict[str, int]) -> None:
    short, long = (_python_calls_of_a_turn(length, **shape) for length in (2048, 8192))
    # A bisection calls a function twice more for a path four times as long.
    assert abs(long - short) <= 40


def test_p03_p09_salts_and_reasons() -> None:
    model = build(block_size=16)
    prompt = prompt_of(40)
    add(model, prompt, cache_salt="a")
    model.run()
    same, other, diverging = (
        add(model, prompt, cache_salt="a"),
        add(model, prompt, cache_salt="b"),
        add(model, [*prompt[:37], 1, 2], cache_salt="a"),
    )
    model.run()
    assert (same.num_cached_tokens, other.num_cached_tokens, diverging.num_cached_tokens) == (39, 0, 37)
    assert other.cache_miss_reason == "no cached block starts with this prefix: token 0 is the first computed"
    assert diverging.cache_miss_reason == "token 37 differs from what is cached"


def test_prompt_logprobs_computes_the_whole_prompt() -> None:
    model = build()
    prompt = prompt_of(12)
    add(model, prompt)
    model.run()
    request = add(model, prompt, prompt_logprobs=0)
    output = model.step()
    assert tokens_of(output, request) == 12
    assert request.num_cached_tokens == 0
    assert request.cache_miss_reason == "prompt_logprobs computes the whole prompt"


def test_p07_a_burst_keeps_the_hot_prompt() -> None:
    model = build(block_size=16, num_blocks=64, seqs=4)
    system = prompt_of(30 * 16)
    for _ in range(2):
        add(model, [*system, *prompt_of(5)], max_tokens=1)
        model.run()
    for _ in range(1000):
        request = make_request(prompt_of(50), max_tokens=1)
        model.scheduler.add(request)
        model.scheduler.update(output := model.scheduler.schedule(), model.forward(output))
    hot = add(model, [*system, *prompt_of(5)], max_tokens=1)
    model.run()
    assert hot.num_cached_tokens == len(system)


def test_caching_off_matches_and_keeps_nothing() -> None:
    model = build(prefix_cache=False)
    prompt = prompt_of(12)
    requests = [add(model, prompt) for _ in range(3)]
    model.run()
    requests.append(add(model, prompt))
    model.run()
    assert [r.num_cached_tokens for r in requests] == [0] * 4
    assert {r.cache_miss_reason for r in requests} == {"prefix caching is off"}
    assert model.scheduler.stats.free_blocks == 64
    assert model.scheduler.stats.prefix_queries == 0


@pytest.mark.parametrize("budget", [10, 32, 256])
def test_a_prefix_in_flight_is_computed_once(budget: int) -> None:
    model = build(block_size=4, num_blocks=300, seqs=16, budget=budget)
    system = prompt_of(64)
    requests = [add(model, [*system, *prompt_of(3)], max_tokens=4) for _ in range(16)]
    put_off = []
    while model.scheduler.has_unfinished():
        model.step(between=lambda: put_off.append(model.scheduler.stats.num_put_off))
    # Where no budget is left beside the prefix, the others are looked at only once it is written.
    assert max(put_off) == {10: 15, 32: 0, 256: 15}[budget]
    assert requests[0].num_cached_tokens == 0
    assert [r.num_cached_tokens for r in requests[1:]] == [64] * 15
    assert sum(model.computed.values()) == 64 + 16 * (3 + 3)


def test_the_choices_of_a_prompt_compute_it_once() -> None:
    model = build(block_size=4, budget=16)
    prompt = prompt_of(41)
    requests = [add(model, prompt, max_tokens=3, seed=i) for i in range(4)]
    model.run()
    assert [r.num_cached_tokens for r in requests] == [0, 40, 40, 40]
    assert sum(model.computed.values()) == 40 + 4 * (1 + 2)


def test_others_pass_a_request_that_was_put_off() -> None:
    model = build(block_size=4, budget=32, num_blocks=200)
    system = prompt_of(100)
    first = add(model, [*system, 1])
    waiting = add(model, [*system, 2])
    other = add(model, prompt_of(5))
    seen = []
    for _ in range(4):
        seen += [share.request for share in model.step().scheduled]
    assert other.status is not Status.WAITING
    assert waiting not in seen[: seen.index(other)]
    assert first in seen
    model.run()
    assert waiting.num_cached_tokens == 100


def test_a_put_off_request_goes_on_when_the_writer_stops() -> None:
    for victim in (0, 1):
        model = build(block_size=4)
        system = prompt_of(40)
        pair = [add(model, [*system, 1]), add(model, [*system, 2])]

        def stop(model: FakeModel = model, request: Request = pair[victim]) -> None:
            assert model.scheduler.stats.num_put_off == 1
            model.scheduler.finish(request, "abort")
            model.scheduler.check_invariants()
            assert model.scheduler.stats.num_put_off == 0

        model.step(between=stop)
        model.run()
        assert pair[victim].finish_reason == "abort"
        assert pair[1 - victim].finish_reason == "length"
        assert pair[1 - victim].num_cached_tokens == 0


def test_a_request_never_waits_for_what_a_worse_priority_computes() -> None:
    model = build(block_size=4, budget=8)
    system = prompt_of(40)
    slow = add(model, [*system, 1], priority=3)
    model.step()
    urgent = add(model, [*system, 2], priority=0)
    output = model.step()
    assert tokens_of(output, urgent) == 8
    assert urgent.num_cached_tokens == 8
    assert tokens_of(output, slow) == 0
    model.run()
    # The slow one, long admitted, computes its own; the two blocks are then kept once.
    assert model.scheduler.stats.used_blocks == 0


def test_a_reset_forgets_what_was_cached_but_not_what_runs() -> None:
    model = build(block_size=4)
    prompt = prompt_of(13)
    running = add(model, prompt, max_tokens=10)
    model.step()
    model.scheduler.reset_prefix_cache()
    model.scheduler.check_invariants()
    again = add(model, prompt)
    model.run()
    assert again.num_cached_tokens == 0
    assert len(running.output_token_ids) == 10
    assert model.scheduler.stats.used_blocks == 0


# ---- copies


def with_tails(num_blocks: int, tails: list[list[int]]) -> FakeModel:
    """A pool of blocks of 4 in which these tails are cached and nothing runs."""
    model = build(block_size=4, num_blocks=num_blocks, seqs=8)
    for tail in tails:
        add(model, tail, max_tokens=0)
        model.run()
    assert model.scheduler.stats.cached_blocks == len(tails)
    return model


@pytest.mark.parametrize("reverse", [False, True])
def test_a_source_that_becomes_a_destination_in_the_same_step_is_read_first(reverse: bool) -> None:
    # Three blocks: two tails, one free. The first request copies tail 1 into the free block; the
    # second one's own block is then tail 1's, into which tail 2 is copied.
    model = with_tails(3, [[1, 2, 3], [5, 6, 7]])
    one = add(model, [1, 2, 3, 20], max_tokens=0)
    two = add(model, [5, 6, 7, 21], max_tokens=0)
    output = model.scheduler.schedule()
    first, second = output.copies
    assert first.src == second.dst
    assert (one.num_cached_tokens, two.num_cached_tokens) == (3, 3)
    if reverse:
        output = SchedulerOutput(output.scheduled, output.copies[::-1])
        with pytest.raises(AssertionError, match="stale or foreign"):
            model.forward(output)
    else:
        model.scheduler.update(output, model.forward(output))
        assert (one.finish_reason, two.finish_reason) == ("length", "length")


def test_a_source_may_be_recycled_as_the_requests_own_block() -> None:
    # One block in all: the tail's block is evicted for the request and its rows are in place.
    model = with_tails(1, [[1, 2, 3]])
    request = add(model, [1, 2, 3, 20], max_tokens=0)
    output = model.step()
    assert output.copies == ()
    assert request.num_cached_tokens == 3
    # Two blocks: the copy goes to the free one, then the source is written over, after the copy.
    model = with_tails(2, [[1, 2, 3]])
    request = add(model, [1, 2, 3, *prompt_of(5)], max_tokens=0)
    output = model.step()
    assert len(output.copies) == 1
    assert request.num_cached_tokens == 3
    assert request.finished


def test_copied_rows_are_not_believed_before_the_step_is_over() -> None:
    # The source is recycled, and the step never runs: nobody may find its tokens any more.
    model = with_tails(2, [[1, 2, 3]])
    request = add(model, [1, 2, 3, *prompt_of(5)], max_tokens=0)
    output = model.scheduler.schedule()
    assert len(output.copies) == 1
    model.scheduler.finish(request, "error")
    model.scheduler.update(output, {})
    again = add(model, [1, 2, 3, 4], max_tokens=0)
    model.step()
    assert again.num_cached_tokens == 0


def test_a_stop_between_schedule_and_update_frees_the_blocks_at_once() -> None:
    model = build(block_size=4, num_blocks=4)
    stopped, other = add(model, prompt_of(5)), add(model, prompt_of(5), max_tokens=2)
    model.step()

    def stop() -> None:
        model.scheduler.finish(stopped, "stop", "END")
        assert not stopped.block_table
        assert model.scheduler.stats.used_blocks == 2

    model.step(between=stop)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "END")
    assert len(stopped.output_token_ids) == 1
    assert len(other.output_token_ids) == 2


def test_10_000_waiting_requests_are_not_looked_at_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(seqs=2, num_blocks=1000)
    looked_at = 0
    original = Scheduler._match

    def counting(self: Scheduler, entry: object) -> object:
        nonlocal looked_at
        looked_at += 1
        return original(self, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "_match", counting)
    scheduler = model.scheduler
    for n in range(10_000):
        scheduler.add(make_request([n, 1, 2], max_tokens=50))
    scheduler.update(output := scheduler.schedule(), model.forward(output))
    assert looked_at == 2
    scheduler.update(output := scheduler.schedule(), model.forward(output))
    assert looked_at == 2
    assert scheduler.stats.num_waiting == 9_998
