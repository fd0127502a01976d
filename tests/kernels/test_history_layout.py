"""Which summaries stand for the first groups of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.history_layout import FAN, GROUP, first_kept, layout, num_groups, tokens_of


def groups_of(level: int, unit: int) -> range:
    return range(unit * FAN**level, (unit + 1) * FAN**level)


@given(st.integers(0, 6000))
def test_it_covers_every_group_once_in_order(groups: int) -> None:
    assert [g for pair in layout(groups) for g in groups_of(*pair)] == list(range(groups))


@given(st.integers(0, 6000))
def test_a_step_keeps_or_merges_and_never_splits(groups: int) -> None:
    before, after = layout(groups), layout(groups + 1)
    for level, unit in before:
        covers = [pair for pair in after if set(groups_of(level, unit)) <= set(groups_of(*pair))]
        assert len(covers) == 1


def test_a_unit_is_made_from_four_that_stood_before() -> None:
    """So each new unit has its sources at hand when it is needed."""
    for groups in range(1, 3000):
        before = set(layout(groups - 1))
        for level, unit in layout(groups):
            if level and (level, unit) not in before:
                assert {(level - 1, FAN * unit + i) for i in range(FAN)} <= before


@given(st.integers(1, 6000))
def test_one_to_four_units_a_level(groups: int) -> None:
    levels = [level for level, _ in layout(groups)]
    assert levels == sorted(levels, reverse=True)
    assert all(1 <= levels.count(level) <= FAN for level in range(levels[0] + 1))
    assert len(levels) <= 4 * 6


@pytest.mark.parametrize("budget_blocks", [17, 32, 100])
def test_a_group_is_summarised_once_it_is_wholly_out_of_the_budget(budget_blocks: int) -> None:
    for block in range(600):
        groups = num_groups(block, budget_blocks)
        # Blocks before the query's own that are read as blocks, without block 0.
        kept = block - first_kept(groups)
        if block <= budget_blocks:
            assert groups == 0
            assert first_kept(groups) == 0
        else:
            assert first_kept(groups) == 1 + GROUP * groups
            assert budget_blocks - GROUP - 1 <= kept < budget_blocks


def test_small_numbers() -> None:
    assert [num_groups(b, 32) for b in (0, 32, 33, 48, 49, 64, 65)] == [0, 0, 1, 1, 2, 2, 3]
    assert layout(0) == []
    assert layout(4) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert layout(5) == [(1, 0), (0, 4)]
    assert layout(6) == [(1, 0), (0, 4), (0, 5)]
    assert layout(21) == [(2, 0), (1, 4), (0, 20)]
    assert [tokens_of(level) for level in range(3)] == [16, 64, 256]
