"""The step-time policy against machines of many speeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.pace import FEWEST, StepPace

MOST = 512
TARGET = 0.2
MACHINE = {
    "base": st.floats(0.0, 0.5),  # seconds of the decodes
    "per_token": st.floats(1e-5, 0.05),
    "growth": st.floats(0.0, 1e-6),  # seconds per token and token of context
}


def prefill(pace: StepPace, steps: int, base: float, per_token: float, growth: float) -> list[float]:
    """Seconds of each of ``steps`` steps beside 4 answers, with a prompt that does not end."""
    times, context = [], 0
    for _ in range(steps):
        tokens = pace.limit
        times.append(base + tokens * (per_token + growth * context))
        context += tokens
        pace.observe(4, tokens, times[-1])
        assert FEWEST <= pace.limit <= MOST
    return times


@given(**MACHINE)
def test_steps_come_to_the_target(base: float, per_token: float, growth: float) -> None:
    pace = StepPace(TARGET, MOST)
    times = prefill(pace, 60, base, per_token, growth)
    slope = per_token + growth * MOST * 60
    for seconds in times[30:]:
        at_least, at_most = base + FEWEST * per_token, base + MOST * slope
        # A whole token is the finest step there is.
        assert seconds <= max(TARGET * 1.05 + slope, base + (FEWEST + 1) * slope)
        assert seconds >= min(TARGET * 0.9 - slope, at_most * 0.9, at_least + (MOST - FEWEST) * per_token)


@given(base=MACHINE["base"], per_token=MACHINE["per_token"])
def test_it_follows_a_machine_that_changes(base: float, per_token: float) -> None:
    """Where it comes from makes no difference in the end."""
    fresh, used = StepPace(TARGET, MOST), StepPace(TARGET, MOST)
    prefill(used, 30, 0.4, 0.01, 0.0)
    one = prefill(fresh, 60, base, per_token, 0.0)[-1]
    other = prefill(used, 60, base, per_token, 0.0)[-1]
    assert abs(one - other) <= 0.05 * TARGET + per_token


@given(seconds=st.floats(0.0, 100.0), tokens=st.integers(0, MOST))
def test_one_odd_step_changes_little(seconds: float, tokens: int) -> None:
    pace = StepPace(TARGET, MOST)
    prefill(pace, 30, 0.1, 0.001, 0.0)
    before = pace.limit
    pace.observe(4, tokens, seconds)
    if tokens >= before:
        assert before // 2 <= pace.limit <= min(2 * tokens, MOST)
    elif seconds <= TARGET:
        assert pace.limit == before, "a prompt that had no more to give says nothing"


def test_steps_of_one_kind_say_nothing() -> None:
    pace = StepPace(TARGET, MOST)
    before = pace.limit
    pace.observe(0, 512, 5.0)
    pace.observe(64, 0, 5.0)
    assert pace.limit == before


def test_a_small_budget_is_never_exceeded() -> None:
    pace = StepPace(TARGET, 3)
    assert pace.limit == 3
    pace.observe(1, 3, 9.0)
    assert pace.limit == 3


@pytest.mark.parametrize(("target", "most"), [(0.0, 1), (-1.0, 1), (float("nan"), 1), (1.0, 0)])
def test_bad_limits_are_refused(target: float, most: int) -> None:
    with pytest.raises(ValueError, match=r"at least one|more than 0"):
        StepPace(target, most)
