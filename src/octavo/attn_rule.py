"""Which keys attention keeps for a request, in whole numbers."""

from __future__ import annotations

from typing import NamedTuple

MODES = ("exact", "fast")
#: In place of a number of keys: as many as matter.
AUTO = "auto"
#: "auto" keeps this many recent keys, and beside them those with at least so many millionths of a row's
#: softmax where it sees 8,192 keys or more, and 8192 / n times as many where it sees n, down to 1,024: 1.6
#: times an equal share.
AUTO_RECENT = 16
AUTO_LEAST = 195


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
        if topk == AUTO:
            if mode == "fast":
                raise ValueError('attn_topk="auto" weighs all keys: it needs attn_topk_mode="exact"')
            # No more keys than this can have so large a share.
            return cls(AUTO_RECENT + 1_000_000 // AUTO_LEAST, AUTO_RECENT, int(tail), 0, AUTO_LEAST)
        keys = int(topk)
        return cls(keys, keys // 2, int(tail), int(mode == "fast")) if keys else DENSE

    @property
    def words(self) -> str:
        """All that decides what is kept, for the prefix cache and its reader; "" is dense."""
        if self.topk == 0:
            return ""
        budget = (
            f"attn_topk=auto ({self.recent} recent, {self.least} ppm)"
            if self.least
            else f"attn_topk={self.topk}"
        )
        return budget + " mode=fast" * self.fast + " tail" * self.tail


DENSE = AttnRule()
