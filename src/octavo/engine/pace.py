"""How much of the prompts a step computes beside running answers. Free of torch, and of clocks."""

from __future__ import annotations

#: Tokens: prompts always get this much of a step, however long it takes.
FEWEST = 16
#: Tokens of the first step that has both, before anything was measured.
FIRST = 64
#: A limit at most doubles or halves from one step to the next: a single odd step does little harm.
MOST_CHANGE = 2.0


class StepPace:
    """Keeps steps that decode near a time, ``target`` seconds, by limiting what they compute of prompts.

    The limit is scaled by target / measured after each step that it bound. As only a part of a step's time
    grows with the tokens of prompts, this approaches the target from either side and does not swing.
    ``most`` is the step's token budget. Answers do not depend on the limit, as they do not depend on how a
    prompt is cut into chunks.
    """

    def __init__(self, target: float, most: int) -> None:
        if not target > 0:
            raise ValueError(f"the target must be more than 0 seconds, got {target}")
        if most < 1:
            raise ValueError(f"a step needs at least one token, got {most}")
        self._target = target
        self._most = most
        self._fewest = min(FEWEST, most)
        #: Tokens of prompts in the next step that also decodes, from ``FEWEST`` to ``most``.
        self.limit = min(FIRST, most)

    def observe(self, num_decodes: int, num_prefill: int, seconds: float) -> None:
        """Take in a step: ``num_decodes`` answers by one token each, ``num_prefill`` tokens of prompts."""
        if not num_decodes or not num_prefill:
            return
        if num_prefill < self.limit and seconds <= self._target:
            return  # the prompts had no more to give
        change = self._target / max(seconds, 1e-9)
        change = min(max(change, 1 / MOST_CHANGE), MOST_CHANGE)
        self.limit = min(max(round(num_prefill * change), self._fewest), self._most)
