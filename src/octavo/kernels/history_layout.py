"""Which summaries stand for the oldest history once it has outgrown its budget. Integers only.

Blocks of 16 tokens count from 0. Block 0 is never summarised; *group* g is blocks 1 + 16 g to 16 + 16 g. A
summary is a pair (level, unit): the 16 entries of one compact block, which stand for the groups unit *
4**level to (unit + 1) * 4**level - 1, each entry for 16 * 4**level tokens. Of a group that is summarised in
part, the first entries of its summary stand for the blocks that are.

Example: with 100 blocks summarised, groups 0 to 5 and four blocks of group 6, level 0 keeps groups 4 and 5,
and groups 0 to 3 are unit 0 of level 1::

    layout(100) == [(1, 0), (0, 4), (0, 5), (0, 6)]
"""

from __future__ import annotations

#: Blocks of a group: one entry of a summary of level 0 stands for each.
GROUP = 16
#: Units of a level that become one unit of the next.
FAN = 4
#: More than any history has: a summary of the last level stands for a billion tokens.
MAX_LEVELS = 12


def num_summarised(block: int, budget_blocks: int) -> int:
    """How many blocks a query in ``block`` (its position // 16) reads as summaries."""
    return max(0, block - budget_blocks)


def layout(summarised: int) -> list[tuple[int, int]]:
    """The summaries (level, unit) that stand for so many blocks, oldest first.

    One to four units a level, and a group that is summarised in part: once a level holds more than four, the
    oldest four become one of the next.
    """
    levels: list[list[tuple[int, int]]] = []
    groups, rest = divmod(summarised, GROUP)
    units = groups
    while units:
        kept = units if units <= FAN else (units - 1) % FAN + 1
        levels.append([(len(levels), unit) for unit in range(units - kept, units)])
        units = (units - kept) // FAN
    return [pair for level in reversed(levels) for pair in level] + [(0, groups)] * (rest > 0)


def first_kept(summarised: int) -> int:
    """The first block after block 0 that is read as a block; 0 where nothing is summarised."""
    return 1 + summarised if summarised else 0


def tokens_of(level: int) -> int:
    """Tokens that one entry of a summary of ``level`` stands for."""
    return int(GROUP * FAN**level)


def last_block(level: int, unit: int) -> int:
    """The last block of those that a summary stands for."""
    return int(GROUP * FAN**level) * (unit + 1)
