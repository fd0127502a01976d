"""Top-k attention over compact history in the engine: cold, cached, chunked and in company, the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from .test_compact_history import cold, engine_of, loaded, prompt, run

__all__ = ["loaded"]

WAYS: dict[str, dict[str, Any]] = {
    "exact": {"attn_topk": 16},
    "tail": {"attn_topk": 8, "attn_topk_tail": True},
    "auto": {"attn_topk": "auto"},
    "fast": {"attn_topk": 8, "attn_topk_mode": "fast", "attn_topk_tail": True},
}


@pytest.mark.parametrize("values", ["int8", "int4"])
@pytest.mark.parametrize("way", WAYS)
def test_a_dialogue_in_any_company_gets_what_it_gets_cold(loaded, way: str, values: str) -> None:
    engine = engine_of(loaded, budget=37, attn=WAYS[way], history_values=values)
    talk = prompt(150, 1)
    (first,) = run(engine, (talk, 8))
    assert first.outputs == cold(loaded, talk, 8, attn=WAYS[way], history_values=values).outputs
    turn = [*talk, *first.outputs[0].token_ids, *prompt(60, 2)]
    fork = [*talk[:100], *prompt(90, 3)]
    for tokens, output in zip((turn, fork), run(engine, (turn, 8), (fork, 8)), strict=True):
        assert output.num_cached_tokens >= 100
        want = cold(loaded, tokens, 8, attn=WAYS[way], history_values=values)
        assert output.outputs == want.outputs
    dense = cold(loaded, turn, 8, history_values=values)
    assert dense.outputs != cold(loaded, turn, 8, attn=WAYS[way], history_values=values).outputs
