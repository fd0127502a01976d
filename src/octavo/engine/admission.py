"""What a request must satisfy before it enters the engine. Every refusal is a ValueError of one sentence."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from octavo.attn_rule import ADAPTIVE, DENSE, AttnRule
from octavo.config import EngineConfig
from octavo.request import SamplingParams, is_int


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> list[int]:
    """The prompt as a list of ints. Refuses an empty one, ids outside 0 .. vocab_size - 1, and more
    than ``max_model_len`` tokens."""
    try:
        if isinstance(token_ids, bytes | bytearray | memoryview):
            raise TypeError("bytes are numbers to Python, but they are no token ids")
        ids = [operator.index(token) for token in token_ids]
    except TypeError:
        raise ValueError("a prompt is text or a list of token ids; this one holds something else") from None
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    if len(ids) > max_model_len:
        raise ValueError(f"the prompt has {len(ids)} tokens, more than max_model_len ({max_model_len})")
    if min(ids) < 0 or max(ids) >= vocab_size:
        place, token = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise ValueError(
            f"token id {token} at position {place} of the prompt is not in 0 .. {vocab_size - 1}"
        )
    return ids


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuses what is no SamplingParams, and token ids in them that the model does not have."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids or ():
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} has token id {token!r}, which is not in 0 .. {vocab_size - 1}")


def resolve_attn_topk(params: SamplingParams, config: EngineConfig) -> tuple[AttnRule, str]:
    """Which keys a request's attention keeps, and its policy, which names all that decides this ("" is
    dense).

    Refuses what the cache has no planes for, by the name of the flag, and what does not go together.
    """
    topk = config.attn_topk if params.attn_topk is None else params.attn_topk
    if topk == 0:
        return DENSE, ""
    if not config.has_planes:
        raise ValueError(
            f"attn_topk ({topk}) needs an engine started with attn_topk=K or topk_planes=True "
            "(--attn-topk K or --topk-planes)"
        )
    mode = params.attn_topk_mode or config.attn_topk_mode
    adaptive = topk in ADAPTIVE
    tail = next((t for t in (params.attn_topk_tail, config.attn_topk_tail) if t is not None), adaptive)
    if mode == "fast" and not config.has_fast:
        raise ValueError(
            'attn_topk_mode="fast" needs an engine started with it (--attn-topk-mode fast): '
            "the cache holds no bounds of keys"
        )
    if tail and not config.has_tail:
        what = f'attn_topk="{topk}", without attn_topk_tail=False,' if adaptive else "attn_topk_tail"
        raise ValueError(
            f"{what} needs an engine started with attn_topk_tail=True (--attn-topk-tail): "
            "the cache holds no means of values"
        )
    rule = AttnRule.of(topk, mode, tail)
    layers = ",".join(map(str, config.dense_layers))
    return rule, rule.words + (f" dense_layers={layers}" if layers else "")


def check_queueing(priority: int, cache_salt: str) -> None:
    """Refuses a priority that is not an int and a salt that is not text: requests are ordered by the
    one and blocks are named by the other, long after the caller has gone."""
    if not is_int(priority):
        raise ValueError(f"priority must be a whole number, got {priority!r:.100}")
    if not isinstance(cache_salt, str):
        raise ValueError(f"cache_salt must be text, got {type(cache_salt).__name__}")


def resolve_max_tokens(params: SamplingParams, prompt_len: int, max_model_len: int) -> int:
    """Output tokens at most: what was asked for, or the rest of the context if that is less."""
    room = max_model_len - prompt_len
    if params.max_tokens == 0:
        return 0
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt_len} tokens and max_model_len is {max_model_len}: "
            "no room is left for an answer"
        )
    return room if params.max_tokens is None else min(params.max_tokens, room)
