"""Which summaries stand for the oldest history once it has outgrown its budget. Integers only.

Blocks of 16 tokens count from 0. Block 0 is never summarised; *group* g is blocks 1 + 16 g to 16 + 16 g. A
summary is a pair (level, unit): the 16 entries of one compact block, which stand for the groups
unit * 4**level to (unit + 1) * 4**level - 1, each entry for 16 * 4**level tokens.

Example: with 6 groups, level 0 keeps groups 4 and 5, and groups 0 to 3 are unit 0 of level 1::

    layout(6) == [(1, 0), (0, 4), (0, 5)]
"""

from __future__ import annotations

#: Blocks of a group: one entry of a summary of level 0 stands for each.
GROUP = 16
#: Units of a level that become one unit of the next.
FAN = 4
#: More than any history has: a summary of the last level stands for a billion tokens.
MAX_LEVELS = 12


def num_groups(block: int, budget_blocks: int) -> int:
    """How many of the first groups a query in ``block`` (its position // 16) reads as summaries."""
    return max(0, -((budget_blocks - block) // GROUP))


def layout(groups: int) -> list[tuple[int, int]]:
    """The summaries (level, unit) that stand for the first ``groups`` groups, oldest first.

    One to four units a level: once it holds more than four, the oldest four become one of the next level.
    """
    levels: list[list[tuple[int, int]]] = []
    units = groups
    while units:
        kept = units if units <= FAN else (units - 1) % FAN + 1
        levels.append([(len(levels), unit) for unit in range(units - kept, units)])
        units = (units - kept) // FAN
    return [pair for level in reversed(levels) for pair in level]


def first_kept(groups: int) -> int:
    """The first block after block 0 that is read as a block; 0 where nothing is summarised."""
    return 1 + GROUP * groups if groups else 0


def tokens_of(level: int) -> int:
    """Tokens that one entry of a summary of ``level`` stands for."""
    return int(GROUP * FAN**level)


def last_block(level: int, unit: int) -> int:
    """The last block of those that a summary stands for."""
    return int(GROUP * FAN**level) * (unit + 1)
