"""The step-time policy in the engine."""

from __future__ import annotations

import time

from tiny_engine import greedy, prompt

from octavo.engine.pace import FEWEST, FIRST


def test_a_step_time_cuts_prompts_beside_answers_and_changes_nothing_else(tiny):
    """Two milliseconds a token and 50 a step leave a prompt 25 tokens of each step."""
    wanted, late = prompt(4), prompt(300, seed=1)
    alone = [tiny(num_blocks=128).run((ids, greedy(60)))[0] for ids in (wanted, late)]
    t = tiny(num_blocks=128, budget=128, step_ms=50)
    forward = t.model.forward

    def slow(batch, kv_cache, attention):
        time.sleep(0.002 * batch.num_tokens)
        return forward(batch, kv_cache, attention)

    t.model.forward = slow
    first = t.add(wanted, greedy(60))
    for _ in range(3):
        t.engine.step()
    second = t.add(late, greedy(60))
    before = len(t.model.forwards)
    last = t.drain()
    chunks = [size - 1 for size in t.model.forwards[before:] if size > 2]
    assert sum(chunks) >= 298
    assert chunks[0] == FIRST
    assert all(FEWEST <= size <= 25 for size in chunks[3:-1]), chunks
    for entry, want in zip((first, second), alone, strict=True):
        assert last[entry].outputs == want.outputs
