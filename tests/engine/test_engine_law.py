"""One law over everything: a request gets, to the bit, what it would get alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from octavo.cache.kv_cache import KVCache
from octavo.engine import sampler
from octavo.engine.runner import Runner
from octavo.request import SamplingParams

EOS = 256
STEM = [random.Random(1).randrange(32, 127) for _ in range(40)]

PARAMS = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 3]),
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 4]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.8]),
    logit_bias=st.sampled_from([None, {EOS: 8.0}, {40: 6.0}]),
    seed=st.integers(0, 2**63 - 1),
    stop=st.sampled_from([None, "I", ["ab", "III"]]),
    min_tokens=st.sampled_from([0, 0, 3]),
    max_tokens=st.integers(3, 20),
    logprobs=st.sampled_from([None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)
JOBS = st.lists(
    st.fixed_dictionaries(
        {
            "shared": st.integers(0, 40),
            "own": st.lists(st.integers(32, 126), min_size=1, max_size=6),
            "params": PARAMS,
            "priority": st.integers(0, 1),
            "salt": st.sampled_from(["", "", "s"]),
            "arrives": st.integers(0, 12),
            "abort_after": st.sampled_from([None, None, None, 1, 6]),
        }
    ),
    min_size=2,
    max_size=7,
)


COMPANY = given(
    jobs=JOBS,
    block_size=st.sampled_from([1, 4, 16]),
    pool_tokens=st.sampled_from([80, 112, 400]),
    budget=st.sampled_from([1, 5, 64]),
    max_num_seqs=st.sampled_from([1, 3, 16]),
)
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def in_company(
    tiny: Callable[..., Any],
    jobs: list[dict[str, Any]],
    block_size: int,
    pool_tokens: int,
    budget: int,
    max_num_seqs: int,
) -> None:
    options = {"block_size": block_size, "num_blocks": pool_tokens // block_size}
    crowd = tiny(**options, budget=budget, max_num_seqs=max_num_seqs)
    started: dict[int, tuple[int, dict[str, Any]]] = {}
    last = {}
    for step in range(3000):
        for job in jobs:
            if job["arrives"] == step:
                ids = [*STEM[: job["shared"]], *job["own"]]
                entry = crowd.add(ids, job["params"], priority=job["priority"], cache_salt=job["salt"])
                started[entry] = (step, job)
        for output in crowd.engine.step():
            last[int(output.request_id)] = output
        for entry, (since, job) in started.items():
            if job["abort_after"] is not None and step - since == job["abort_after"]:
                aborted = crowd.engine.abort(entry)
                if aborted is not None:
                    last[entry] = aborted
        crowd.scheduler.check_invariants()
        if step > 12 and not crowd.engine.has_unfinished():
            break
    assert len(last) == len(jobs)
    assert crowd.engine.scheduler_stats.used_blocks == 0

    for entry, (_, job) in started.items():
        together = last[entry]
        alone_engine = tiny(**options, budget=10_000, max_num_seqs=16, prefix_cache=False)
        (alone,) = alone_engine.run((together.prompt_token_ids, job["params"]))
        assert together.error is None
        assert together.finished
        if together.prompt_logprobs is not None and all(together.prompt_logprobs[1:]):
            assert together.prompt_logprobs == alone.prompt_logprobs
        for mine, its in zip(together.outputs, alone.outputs, strict=True):
            if mine.finish_reason == "abort":
                count = len(mine.token_ids)
                assert mine.token_ids == its.token_ids[:count]
                assert mine.logprobs is None or mine.logprobs == its.logprobs[:count]
            else:
                assert mine == its


test_a_request_in_any_company_gets_what_it_gets_alone = settings(SETTINGS, max_examples=12)(
    COMPANY(in_company)
)


def _skip_the_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Runner, "copy_blocks", lambda self, copies: None)


def _draw_from_a_stream(patch: pytest.MonkeyPatch) -> None:
    """As an engine would whose random state advances with every draw of the batch."""
    count = itertools.count()
    patch.setattr(sampler, "noise_key", lambda seed, choice, position: (seed & 0xFF, next(count)))


def _write_one_row_too_low(patch: pytest.MonkeyPatch) -> None:
    write = KVCache.write

    def misplaced(self: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        write(self, layer, k, v, (slots - 1).clamp(min=0) if len(slots) == 5 else slots)

    patch.setattr(KVCache, "write", misplaced)


@pytest.mark.parametrize(
    "break_it",
    [_skip_the_copies, _draw_from_a_stream, pytest.param(_write_one_row_too_low, marks=pytest.mark.slow)],
)
def test_the_law_finds_a_fault(tiny, monkeypatch: pytest.MonkeyPatch, break_it) -> None:
    break_it(monkeypatch)
    quick = settings(SETTINGS, max_examples=200, phases=[Phase.generate], database=None, derandomize=True)
    with pytest.raises((AssertionError, ExceptionGroup)):
        quick(COMPANY(in_company))(tiny=tiny)
