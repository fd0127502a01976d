"""The request mixes of the throughput bench, cut from one text so that every engine gets the same ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Chats that run side by side.

    In turn t every chat sends its whole history, its replies included, followed by ``turns[chat][t]``,
    and gets ``new_tokens`` greedy tokens back; the next turn starts when all chats have theirs. A
    workload of single requests has one turn.
    """

    key: str
    title: str
    turns: list[list[list[int]]]
    new_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that are sent, summed over chats and turns, the history sent again each time."""
        total = 0
        for chat in self.turns:
            history = 0
            for turn in chat:
                history += len(turn)
                total += history
                history += self.new_tokens
        return total

    @property
    def num_new_tokens(self) -> int:
        return sum(len(chat) for chat in self.turns) * self.new_tokens


#: key -> (title, chats, turns, tokens shared by all chats, own tokens a turn, new tokens a turn)
SHAPES: dict[str, tuple[str, int, int, int, int, int]] = {
    "a": ("1 stream, 128 in, 128 out", 1, 1, 0, 128, 128),
    "b": ("32 requests, 128 in, 64 out", 32, 1, 0, 128, 64),
    "c": ("32 requests sharing 1,024, 32 own, 32 out", 32, 1, 1024, 32, 32),
    "d": ("8 chats of 6 turns, 64 in and 32 out a turn", 8, 6, 0, 64, 32),
    "e": ("1 prompt of 4,096, 64 out", 1, 1, 0, 4096, 64),
    "e8k": ("1 prompt of 8,000, 64 out", 1, 1, 0, 8000, 64),
}


def make(keys: Sequence[str], text_ids: Sequence[int], scale: int = 1) -> list[Workload]:
    """Cut the chosen workloads from the token ids of a text; no two of them share a passage.

    ``scale`` divides every length and the number of chats (at least 1 is left), for a quick look.
    Raises ValueError for an unknown key and for a text that is too short.
    """
    unknown = [key for key in keys if key not in SHAPES]
    if unknown or not keys:
        raise ValueError(f"workloads are {', '.join(SHAPES)}, got {', '.join(unknown) or 'none'}")
    passages = _passages(text_ids)
    made = {}
    for key, (title, chats, turns, shared, own, new) in SHAPES.items():
        chats, shared, own, new = (max(min(n, 1), n // scale) for n in (chats, shared, own, new))
        prefix = _take(passages, shared)
        conversations = [
            [(prefix if turn == 0 else []) + _take(passages, own) for turn in range(turns)]
            for _ in range(chats)
        ]
        if scale > 1:
            title += f", shrunk {scale} times"
        made[key] = Workload(key, title, conversations, new)
    return [made[key] for key in keys]


def _passages(text_ids: Sequence[int]) -> Iterator[int]:
    yield from text_ids
    raise ValueError(f"the text has {len(text_ids)} tokens, too few for the workloads: give a longer --text")


def _take(passages: Iterator[int], count: int) -> list[int]:
    return [next(passages) for _ in range(count)]
