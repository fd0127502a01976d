"""With compact history a request gets, to the bit, what it gets cold and alone: whatever was cached, in
which form, in what company, in which chunks, after preemption, eviction and a restart."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoint import write_tiny_model

from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine.build import LoadedModel, assemble, load
from octavo.engine.engine import Engine
from octavo.request import RequestOutput, SamplingParams
from octavo.weights.load import open_checkpoint

SIZE, WINDOW = 16, 48


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("compact") / "model"
    write_tiny_model(folder, num_layers=2)
    return load(open_checkpoint(folder), EngineConfig(model=str(folder), num_threads=1))


CONFIG = EngineConfig(
    model="tiny",
    num_threads=1,
    cache=CacheConfig(
        block_size=SIZE,
        num_blocks=200,
        num_compact_blocks=400,
        history="compact",
        history_window=WINDOW,
    ),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=4000),
)


def engine_of(
    loaded: LoadedModel, *, budget: int = 64, attn: dict[str, Any] | None = None, **cache
) -> Engine:
    config = replace(
        CONFIG,
        cache=replace(CONFIG.cache, **cache),
        scheduler=replace(CONFIG.scheduler, max_num_batched_tokens=budget),
        **(attn or {}),
    )
    return assemble(config, loaded)


def params(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, **more)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(33, 255) for _ in range(length)]


def run(engine: Engine, *jobs: tuple[list[int], int]) -> list[RequestOutput]:
    ids = [engine.add_request(tokens, params(count)) for tokens, count in jobs]
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        last |= {output.request_id: output for output in engine.step()}
        engine._scheduler.check_invariants()
    assert not any(output.error for output in last.values())
    return [last[str(i)] for i in ids]


def cold(loaded: LoadedModel, tokens: list[int], count: int, **options) -> RequestOutput:
    """Alone, with nothing cached, the whole prompt in one step."""
    engine = engine_of(loaded, budget=4000, enable_prefix_caching=False, **options)
    (output,) = run(engine, (tokens, count))
    return output


STEM = prompt(150, 0)
JOBS = st.lists(
    st.tuples(st.integers(0, 150), st.integers(1, 40), st.integers(1, 40), st.integers(0, 20)),
    min_size=2,
    max_size=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=JOBS,
    budget=st.sampled_from([5, 16, 64, 400]),
    num_blocks=st.sampled_from([8, 14, 40]),
    num_compact=st.sampled_from([16, 60]),
    values=st.sampled_from(["int8", "int4"]),
)
def test_a_request_in_any_company_gets_what_it_gets_alone(
    loaded, jobs, budget, num_blocks, num_compact, values
) -> None:
    engine = engine_of(
        loaded,
        budget=budget,
        num_blocks=num_blocks,
        num_compact_blocks=num_compact,
        history_values=values,
    )
    asked = {}
    last: dict[str, RequestOutput] = {}
    for step in range(2000):
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
        assert last[request_id].outputs == cold(loaded, tokens, count, history_values=values).outputs


@pytest.mark.parametrize(
    "depths",
    [
        pytest.param((*range(1, 230, 13), 16, 64, 65, 112, 160, 227), id="some"),
        pytest.param(range(1, 228), id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("others", [0, 12, 40])
def test_a_fork_at_every_depth_equals_cold_after_freeing_and_after_eviction(loaded, others, depths) -> None:
    hits = set()
    talk = prompt(220, 1)
    for depth in depths:
        engine = engine_of(loaded, num_blocks=30)
        (output,) = run(engine, (talk, 8))
        tokens = [*talk, *output.outputs[0].token_ids]
        run(engine, *((prompt(20, 10 + n), 2) for n in range(others)))
        fork = [*tokens[:depth], 7]
        (forked,) = run(engine, (fork, 5))
        assert forked.outputs == cold(loaded, fork, 5).outputs
        assert forked.num_compact_tokens <= max(0, forked.num_cached_tokens - WINDOW)
        hits.add(forked.num_cached_tokens)
    if others == 40:
        assert max(hits) == 0, "nothing was evicted"
    else:
        assert max(hits) >= 220, "the end of a turn keeps its window until it goes itself"
        assert len(hits) > 3


@pytest.fixture
def warm(loaded, tmp_path: Path):
    """An engine over a folder, as after a restart: the one before it is closed."""
    engines: list[Engine] = []

    def make(**options) -> Engine:
        for engine in engines:
            engine.close()
        engines.append(engine_of(loaded, cache_dir=str(tmp_path / "disk"), cache_disk="64MiB", **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_the_next_turn_of_every_conversation_is_read_from_disk_and_answers_as_cold(loaded, warm) -> None:
    lengths = (30, 47, 90, 200, 333)
    talks = [prompt(length, 3) for length in lengths]
    answers = run(warm(), *((talk, 21) for talk in talks))
    turns = [
        [*talk, *answer.outputs[0].token_ids, *prompt(9, 4)]
        for talk, answer in zip(talks, answers, strict=True)
    ]
    after = warm()
    outputs = run(after, *((turn, 12) for turn in turns))
    for length, turn, output in zip(lengths, turns, outputs, strict=True):
        assert output.outputs == cold(loaded, turn, 12).outputs
        sealed = (length + 20) // SIZE * SIZE  # the last token sampled is never computed
        assert output.num_disk_tokens == output.num_cached_tokens == sealed
        assert output.num_compact_tokens == max(0, sealed - WINDOW) // SIZE * SIZE
    assert after.disk_stats is not None
    assert after.disk_stats.damaged == 0


@pytest.mark.parametrize(
    "depths",
    [
        pytest.param((10, 40, 100, 200, 208, 215, 240, 262, 269), id="some"),
        pytest.param(range(10, 270), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_fork_at_every_depth_after_a_restart_equals_cold(loaded, warm, depths) -> None:
    talk = prompt(260, 5)
    (answer,) = run(warm(), (talk, 10))
    tokens = [*talk, *answer.outputs[0].token_ids]
    hits = []
    for depth in depths:
        fork = [*tokens[:depth], 9]
        (forked,) = run(warm(), (fork, 4))
        assert forked.outputs == cold(loaded, fork, 4).outputs
        hits.append(forked.num_disk_tokens)
    assert hits[0] == 0
    assert forked.num_cached_tokens >= 256


def test_what_shares_a_prefix_in_memory_goes_on_from_disk(loaded, warm) -> None:
    system = prompt(64, 6)
    talks = [[*system, *prompt(length, 7)] for length in (100, 150)]
    answers = run(warm(), *((talk, 10) for talk in talks))
    engine = warm()
    for talk, answer in zip(talks, answers, strict=True):  # one after the other: the second finds the first's
        turn = [*talk, *answer.outputs[0].token_ids, 3]
        (output,) = run(engine, (turn, 6))
        assert output.outputs == cold(loaded, turn, 6).outputs
        assert output.num_cached_tokens >= len(talk) // SIZE * SIZE
    assert 0 < output.num_disk_tokens < output.num_cached_tokens


def test_blocks_far_behind_are_kept_on_disk_in_compact_form_alone(loaded, warm) -> None:
    engine = warm()
    (output,) = run(engine, (prompt(400, 8), 60))
    engine.close()
    assert engine._disk is not None
    entries = engine._disk._store.index.entries.values()
    blocks = (400 + 59) // SIZE
    compact = sum(entry.compact for entry in entries)
    stored = sum(not entry.compact for entry in entries)
    assert compact == (400 + 58 - WINDOW) // SIZE
    assert stored <= WINDOW // SIZE + 2
    assert compact + stored >= blocks
    assert output.finished


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"history": "tiny"}, "history must be one of exact, compact"),
        ({"history_values": "int2"}, "history_values must be one of int8, int4"),
        ({"history_window": 40}, "history_window must be a multiple of the block size 16, got 40"),
        ({"history_window": 0}, "history_window must be"),
        ({"block_size": 8}, "needs a block_size that is a multiple of 16, got 8"),
        ({"history_tokens": 0}, "history_tokens must be"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(tmp_path: Path, options, sentence: str) -> None:
    from octavo.engine.build import build_engine

    config = replace(CONFIG, model=str(tmp_path), cache=replace(CONFIG.cache, **options))
    with pytest.raises(ValueError, match=sentence):
        build_engine(config)


def test_torch_backends_refuse_compact_history(tmp_path: Path, loaded) -> None:
    with pytest.raises(ValueError, match="only fused and reference attention read compact history"):
        assemble(
            replace(CONFIG, attention="sdpa"),
            replace(loaded, options=loaded.options._replace(attention="sdpa")),
        )
