"""With a budget the oldest history is read as summaries, and a request still gets, to the bit, what it gets
cold and alone; and what it takes of the pool and of work stays bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoint import write_tiny_model

from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine import resources
from octavo.engine.build import LoadedModel, assemble, build_engine
from octavo.engine.engine import Engine
from octavo.engine.resources import pool_shape
from octavo.kernels.history_layout import GROUP, first_kept, layout, num_summarised
from octavo.request import RequestOutput

from .test_compact_history import loaded, params, prompt, run

__all__ = ["loaded"]

SIZE, WINDOW, BUDGET = 16, 48, 304

CONFIG = EngineConfig(
    model="tiny",
    num_threads=1,
    cache=CacheConfig(
        block_size=SIZE,
        num_blocks=300,
        num_compact_blocks=500,
        history="compact",
        history_window=WINDOW,
        history_budget=BUDGET,
    ),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=4000),
)


def engine_of(loaded: LoadedModel, *, step_tokens: int = 256, **cache: Any) -> Engine:
    scheduler = replace(CONFIG.scheduler, max_num_batched_tokens=step_tokens)
    return assemble(replace(CONFIG, cache=replace(CONFIG.cache, **cache), scheduler=scheduler), loaded)


def cold(loaded: LoadedModel, tokens: list[int], count: int, **options: Any) -> RequestOutput:
    """Alone, with nothing cached, the whole prompt in one step."""
    engine = engine_of(loaded, step_tokens=4000, enable_prefix_caching=False, **options)
    (output,) = run(engine, (tokens, count))
    return output


STEM = prompt(1400, 0)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 1400), st.integers(1, 60), st.integers(1, 30), st.integers(0, 20)),
        min_size=2,
        max_size=4,
    ),
    step_tokens=st.sampled_from([64, 300]),
    num_blocks=st.sampled_from([30, 80]),
    num_compact=st.sampled_from([80, 160]),
    values=st.sampled_from(["int8", "int4"]),
)
def test_a_request_in_any_company_gets_what_it_gets_alone(
    loaded, jobs, step_tokens, num_blocks, num_compact, values
) -> None:
    options = {"history_values": values}
    engine = engine_of(
        loaded, step_tokens=step_tokens, num_blocks=num_blocks, num_compact_blocks=num_compact, **options
    )
    asked: dict[str, tuple[list[int], int]] = {}
    last: dict[str, RequestOutput] = {}
    for step in range(3000):
        for number, (shared, own, count, arrives) in enumerate(jobs):
            if arrives == step:
                tokens = [*STEM[:shared], *prompt(own, number)]
                asked[str(engine.add_request(tokens, params(count)))] = tokens, count
        last |= {output.request_id: output for output in engine.step()}
        engine._scheduler.check_invariants()
        if step > 20 and not engine.has_unfinished():
            break
    assert len(last) == len(jobs)
    for request_id, (tokens, count) in asked.items():
        expected = cold(loaded, tokens, count, **options)
        assert last[request_id].outputs == expected.outputs
        reads = num_summarised((len(tokens) + count - 2) // SIZE, BUDGET // SIZE) > 0
        assert (expected.history is not None) == reads


@pytest.mark.parametrize(
    "depths",
    [
        pytest.param(
            (1, 100, 303, 320, 321, 500, 576, 577, 700, 832, 833, 900, 1000, 1088, 1101, 1107), id="some"
        ),
        pytest.param(range(1, 1108), id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("others", [0, 60, pytest.param(12, marks=pytest.mark.slow)])
def test_a_fork_at_every_depth_equals_cold_after_freeing_and_after_eviction(loaded, others, depths) -> None:
    hits = {}
    talk = prompt(1100, 1)
    for depth in depths:
        engine = engine_of(loaded, num_blocks=60, num_compact_blocks=120)
        (output,) = run(engine, (talk, 8))
        tokens = [*talk, *output.outputs[0].token_ids]
        run(engine, *((prompt(40, 10 + n), 2) for n in range(others)))
        fork = [*tokens[:depth], 7]
        (forked,) = run(engine, (fork, 5))
        assert forked.outputs == cold(loaded, fork, 5).outputs
        assert forked.num_summarised_tokens <= forked.num_compact_tokens <= forked.num_cached_tokens
        hits[depth] = forked
    if others == 60:
        assert hits[1107].num_cached_tokens == 0, "nothing was evicted"
    else:
        assert hits[1107].num_cached_tokens >= 1100, "the end of a turn keeps what its next query reads"
        assert hits[1107].num_summarised_tokens == num_summarised(1107 // SIZE, BUDGET // SIZE) * SIZE
        assert len({hit.num_cached_tokens for hit in hits.values()}) > 3


@pytest.fixture
def warm(loaded, tmp_path: Path):
    """An engine over a folder, as after a restart: the one before it is closed."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        for engine in engines:
            engine.close()
        engines.append(engine_of(loaded, cache_dir=str(tmp_path / "disk"), cache_disk="64MiB", **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_the_next_turn_is_read_from_disk_with_its_summaries_and_answers_as_cold(loaded, warm) -> None:
    talks = [prompt(length, 3) for length in (200, 400, 700, 1500)]
    answers = run(warm(), *((talk, 21) for talk in talks))
    turns = [
        [*talk, *answer.outputs[0].token_ids, *prompt(9, 4)]
        for talk, answer in zip(talks, answers, strict=True)
    ]
    after = warm()
    outputs = run(after, *((turn, 12) for turn in turns))
    for talk, turn, output in zip(talks, turns, outputs, strict=True):
        assert output.outputs == cold(loaded, turn, 12).outputs
        sealed = (len(talk) + 20) // SIZE  # the last token sampled is never computed
        assert output.num_disk_tokens == output.num_cached_tokens == sealed * SIZE
        assert output.num_summarised_tokens == num_summarised(sealed, BUDGET // SIZE) * SIZE
    assert after.disk_stats is not None
    assert after.disk_stats.damaged == 0


@pytest.mark.parametrize(
    "depths",
    [
        pytest.param((10, 320, 321, 400, 577, 640, 833, 1000, 1009), id="some"),
        pytest.param(range(10, 1010), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_fork_at_every_depth_after_a_restart_equals_cold(loaded, warm, depths) -> None:
    talk = prompt(1000, 5)
    (answer,) = run(warm(), (talk, 10))
    tokens = [*talk, *answer.outputs[0].token_ids]
    hits = []
    for depth in depths:
        fork = [*tokens[:depth], 9]
        (forked,) = run(warm(), (fork, 4))
        assert forked.outputs == cold(loaded, fork, 4).outputs
        hits.append(forked.num_disk_tokens)
    assert hits[0] == 0
    assert hits[-1] >= 992


def test_a_prefix_in_memory_goes_on_with_summaries_from_disk(loaded, warm) -> None:
    system = prompt(320, 6)
    talks = [[*system, *prompt(length, 7)] for length in (500, 700)]
    answers = run(warm(), *((talk, 10) for talk in talks))
    engine = warm()
    for talk, answer in zip(talks, answers, strict=True):  # one after the other: the second finds the first's
        turn = [*talk, *answer.outputs[0].token_ids, 3]
        (output,) = run(engine, (turn, 6))
        assert output.outputs == cold(loaded, turn, 6).outputs
        assert output.num_cached_tokens >= len(talk) // SIZE * SIZE


def test_what_a_conversation_holds_and_what_is_made_of_it_stay_bounded(loaded) -> None:
    engine = engine_of(loaded, step_tokens=64)
    shape = pool_shape(engine.config.cache)._replace(step_tokens=64)
    made: list[int] = []
    original = engine._scheduler._blocks.summaries_made

    def count(entry, end):
        found = original(entry, end)
        made.extend(each.level for each in found)
        return found

    engine._scheduler._blocks.summaries_made = count  # type: ignore[method-assign]  # counts, and goes on
    tokens = prompt(3000, 8)
    engine.add_request(tokens, params(900))
    most = 0
    while engine.has_unfinished():
        engine.step()
        most = max(most, engine.scheduler_stats.used_compact_blocks)
        computed = engine.metrics.computed_tokens
        assert len(made) <= computed / (GROUP * SIZE) * 4 / 3 + 1, "not O(1) a token"
    summarised = num_summarised(3898 // SIZE, BUDGET // SIZE)
    assert most <= shape.compact_needed(3900) < shape.compact_blocks(3900)
    assert made.count(0) == -(-summarised // GROUP)
    assert len(layout(summarised)) <= 4 * (max(made) + 1) + 1
    assert max(made) >= 1
    # What a conversation four times as long would need beyond this is a level.
    assert shape.compact_needed(4 * 3900) - shape.compact_needed(3900) <= 6
    assert first_kept(summarised) * SIZE >= 3898 - BUDGET - SIZE


def test_the_report_tells_how_much_mass_fell_on_summaries(loaded) -> None:
    (short,) = run(engine_of(loaded), (prompt(300, 9), 4))
    assert short.history is None
    (output,) = run(engine_of(loaded, step_tokens=100), (prompt(900, 9), 11))
    assert output.history is not None
    assert output.history.rows == 900 + 10 - (BUDGET + SIZE), "each token from the first that outgrew it"
    assert 0 < output.history.mean_mass < output.history.worst_mass < 1
    whole = cold(loaded, prompt(900, 9), 11).history
    assert whole is not None
    assert whole.rows == output.history.rows
    assert whole.mean_mass == pytest.approx(output.history.mean_mass, abs=1e-5)


def test_what_is_recalled_is_the_same_cold_in_chunks_cached_and_from_disk(loaded, warm) -> None:
    options = {"history_recall": 0.002}
    talk = prompt(1200, 11)

    def alone(tokens: list[int], count: int) -> RequestOutput:
        (output,) = run(engine_of(loaded, step_tokens=4000, **options), (tokens, count))
        assert output.history is not None
        assert output.history.recalled > 0
        assert output.history.not_there == 0
        return output

    whole = alone(talk, 12)
    assert whole.outputs != cold(loaded, talk, 12).outputs, "nothing was recalled"
    (chunked,) = run(warm(step_tokens=64, **options), (talk, 12))
    assert chunked.outputs == whole.outputs
    turn = [*talk, *whole.outputs[0].token_ids, *prompt(9, 12)]
    expected = alone(turn, 8)
    restarted = warm(**options)
    (from_disk,) = run(restarted, (turn, 8))
    (from_memory,) = run(restarted, (turn, 8))
    assert from_disk.num_disk_tokens > 1100
    assert from_memory.num_cached_tokens > 1100
    for output in (from_disk, from_memory):
        assert output.outputs == expected.outputs
        assert output.history is not None
        assert output.history.recalled > 0
        assert output.history.not_there == 0


def test_what_is_recalled_and_is_nowhere_is_counted(loaded) -> None:
    """Without a prefix cache the blocks behind a summary are gone once the step is over."""
    engine = engine_of(loaded, step_tokens=64, enable_prefix_caching=False, history_recall=0.002)
    (output,) = run(engine, (prompt(1200, 11), 12))
    assert output.history is not None
    assert output.history.not_there > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"history_budget": "many"}, 'a size is a number of bytes or text such as "2GiB"'),
        ({"history_budget": 303}, "at least 304 tokens with a history_window of 48, got 303"),
        ({"history_budget": "40kB"}, r"at least 304 tokens .* got '40kB', which holds \d+"),
        ({"history_budget": 2.5}, "history_budget must be tokens or a size"),
        ({"history_budget": 4000, "history": "exact"}, 'history_budget needs history="compact"'),
        (
            {"history_budget": 4096, "block_size": 32, "history_window": 64},
            "needs a block_size of 16, got 32",
        ),
        ({"history_recall": 1.5}, "history_recall must be a share between 0 and 1, got 1.5"),
        ({"history_recall": 0.1, "history_budget": None}, "history_recall needs history_budget"),
        ({"history_mean": "middle"}, "history_mean must be one of centre, plain"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(tmp_path: Path, options, sentence: str) -> None:
    write_tiny_model(tmp_path / "model", num_layers=2)
    config = replace(CONFIG, model=str(tmp_path / "model"), cache=replace(CONFIG.cache, **options))
    with pytest.raises(ValueError, match=sentence):
        build_engine(config)


@pytest.mark.parametrize("size", ["300kB", "1MiB", "5MB"])
@pytest.mark.parametrize("tokens", [500, 4000, 100_000])
def test_a_budget_in_bytes_is_kept_to(loaded, size: str, tokens: int) -> None:
    config = replace(CONFIG, cache=replace(CONFIG.cache, history_budget=size, num_blocks=None))
    taken = resources.sequence_bytes(config, loaded.config, tokens)
    assert taken <= resources.parse_size(size)


def test_a_sliding_window_that_would_see_summaries_is_refused_at_the_start(loaded) -> None:
    model = replace(loaded.config, sliding_window=100, sliding_layers=(1,))
    config = replace(CONFIG, cache=replace(CONFIG.cache, history_budget=320))
    with pytest.raises(
        ValueError, match="sliding window of 100 tokens needs a history_budget of at least 356"
    ):
        resources.resolve(config, model, 1 << 30)
    resources.resolve(replace(config, cache=replace(config.cache, history_budget=368)), model, 1 << 30)
    # One that sees all of every sequence hides nothing.
    resources.resolve(config, replace(model, sliding_window=4000), 1 << 30)


def test_few_keys_and_a_budget_do_not_go_together(tmp_path: Path) -> None:
    config = replace(CONFIG, model=str(tmp_path), attn_topk=64)
    with pytest.raises(ValueError, match="history_budget goes with dense attention"):
        build_engine(config)
