"""Which keys attention keeps for a request, in whole numbers."""

from __future__ import annotations

from typing import NamedTuple

MODES = ("exact", "fast")


class Adaptive(NamedTuple):
    """A budget of as many keys as matter.

    A row keeps ``recent`` keys, and beside them those with at least ``least`` millionths of its softmax where
    it sees 8,192 keys or more, and 8192 / n times as many where it sees n, down to 1,024: so much more than
    an equal share.
    """

    recent: int
    least: int


#: In place of a number of keys. "auto" asks for 1.6 times an equal share, "lean" for 2.7 times.
ADAPTIVE = {"auto": Adaptive(16, 195), "lean": Adaptive(4, 330)}


class AttnRule(NamedTuple):
    """``topk`` keys are kept at most, 0 is dense; ``recent`` of them are the last visible ones.

    ``tail`` 1: what is not kept enters by the means of its spans. ``fast`` 1: only keys of the spans that
    rank highest compete. ``least`` above 0: of the keys that are not recent only those are kept that have so
    many millionths of the row's softmax, or more where it sees fewer keys (``csrc/topk_adapt.cpp``).
    """

    topk: int = 0
    recent: int = 0
    tail: int = 0
    fast: int = 0
    least: int = 0

    @classmethod
    def of(cls, topk: int | str, mode: str, tail: bool) -> AttnRule:
        """Of a user's words. Raises ValueError for two that do not go together."""
        if isinstance(topk, str):
            if mode == "fast":
                raise ValueError(f'attn_topk="{topk}" weighs all keys: it needs attn_topk_mode="exact"')
            recent, least = ADAPTIVE[topk]
            # No more keys than this can have so large a share.
            return cls(recent + 1_000_000 // least, recent, int(tail), 0, least)
        return cls(topk, topk // 2, int(tail), int(mode == "fast")) if topk else DENSE

    @property
    def budget(self) -> int | str:
        """What a user calls it: a number of keys or a name of ``ADAPTIVE``."""
        return next((name for name, its in ADAPTIVE.items() if its == (self.recent, self.least)), self.topk)

    @property
    def words(self) -> str:
        """All that decides what is kept, for the prefix cache and its reader; "" is dense."""
        if self.topk == 0:
            return ""
        exactly = f" ({self.recent} recent, {self.least} ppm)" if self.least else ""
        return f"attn_topk={self.budget}{exactly}" + " mode=fast" * self.fast + " tail" * self.tail


DENSE = AttnRule()
