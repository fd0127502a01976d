"""Which summaries stand for the blocks that are beyond the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.history_layout import (
    FAN,
    GROUP,
    first_kept,
    last_block,
    layout,
    num_summarised,
    tokens_of,
)


def blocks_of(level: int, unit: int) -> range:
    size = GROUP * FAN**level
    return range(1 + unit * size, 1 + (unit + 1) * size)


@given(st.integers(0, 90_000))
def test_it_covers_every_block_once_in_order(number: int) -> None:
    covered = [b for pair in layout(number) for b in blocks_of(*pair)]
    assert covered[:number] == list(range(1, number + 1))
    assert 0 <= len(covered) - number < GROUP, "but for a group that is summarised in part"


@given(st.integers(0, 90_000))
def test_a_step_keeps_or_merges_and_never_splits(number: int) -> None:
    before, after = layout(number), layout(number + 1)
    for level, unit in before:
        covers = [pair for pair in after if set(blocks_of(level, unit)) <= set(blocks_of(*pair))]
        assert len(covers) == 1


def test_a_unit_is_made_from_four_that_stood_before() -> None:
    """So each new unit has its sources at hand when it is needed."""
    for number in range(1, 30_000):
        before = set(layout(number - 1))
        for level, unit in layout(number):
            if level and (level, unit) not in before:
                assert {(level - 1, FAN * unit + i) for i in range(FAN)} <= before


@given(st.integers(GROUP, 90_000))
def test_one_to_four_units_a_level_and_a_part(number: int) -> None:
    units = layout(number)
    levels = [level for level, _ in (units[:-1] if number % GROUP else units)]
    assert levels == sorted(levels, reverse=True)
    assert all(1 <= levels.count(level) <= FAN for level in range(levels[0] + 1))
    assert len(levels) <= 4 * 6


@pytest.mark.parametrize("budget_blocks", [17, 32, 100])
def test_exactly_what_is_beyond_the_budget_is_summarised(budget_blocks: int) -> None:
    for block in range(600):
        number = num_summarised(block, budget_blocks)
        assert number == max(0, block - budget_blocks)
        # Blocks before the query's own that are read as blocks, block 0 among them.
        kept = block - first_kept(number) + (number > 0)
        assert kept == min(block, budget_blocks)


def test_small_numbers() -> None:
    assert layout(0) == []
    assert layout(1) == [(0, 0)]
    assert layout(4 * GROUP) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert layout(5 * GROUP) == [(1, 0), (0, 4)]
    assert layout(5 * GROUP + 1) == [(1, 0), (0, 4), (0, 5)]
    assert layout(21 * GROUP) == [(2, 0), (1, 4), (0, 20)]
    assert [tokens_of(level) for level in range(3)] == [16, 64, 256]
    assert [last_block(0, 0), last_block(0, 1), last_block(1, 0)] == [16, 32, 64]
