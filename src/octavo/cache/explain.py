"""Why a prefix stopped matching, in words. Free of torch."""

from __future__ import annotations

from octavo.cache.chain import TOKEN_BYTES, Chain, Match
from octavo.cache.prefix_cache import PrefixCache

#: What the empty attention policy is called.
DENSE = "attn_topk=0"
#: A miss is explained by no more policies than this.
MAX_POLICIES_LOOKED_AT = 4


def explain(cache: PrefixCache, chain: Chain, match: Match, num_loaded: int = 0) -> str:
    """Why the prefix stopped matching, with the first token that is computed. One salt only.

    ``num_loaded`` tokens after the match come from disk.

    Cached rows of another attention policy are no match, which is said.
    """
    if not cache.enabled:
        return "prefix caching is off"
    first = len(match.nodes) * cache.block_size + match.tail_rows + num_loaded
    if chain.num_tokens == 1:
        return "the prompt is one token (0), which is always computed"
    if first == chain.num_tokens - 1:
        return f"the whole prompt is cached; its last token ({first}) is always computed"
    other = _policy_with_more(cache, chain, first)
    if other is not None:
        return (
            f"token {first} is the first computed: what is cached from there on was computed with "
            f"{other or DENSE}, this request has {chain.policy or DENSE}, and the two share nothing"
        )
    known = len(match.known) * cache.block_size
    if len(match.known) > len(match.nodes) and not num_loaded:
        return (
            f"token {first} is the first computed: {known} tokens of the prefix are cached, but what "
            "is read of their end as stored was given up"
        )
    if first == 0:
        return "no cached block starts with this prefix: token 0 is the first computed"
    if num_loaded:
        return f"nothing whole on disk continues this prefix: token {first} is the first computed"
    if match.tail is not None:
        ended = match.tail_rows * TOKEN_BYTES == len(match.tail.tokens)
    else:
        ended = match.nodes[-1].num_children == 0
    if ended:
        return f"nothing cached continues this prefix: token {first} is the first computed"
    return f"token {first} differs from what is cached"


def _policy_with_more(cache: PrefixCache, chain: Chain, rows: int) -> str | None:
    """Another attention policy under which more of these tokens are cached, of the last few in use."""
    for policy in list(cache.forest.policies)[-MAX_POLICIES_LOOKED_AT:]:
        if policy != chain.policy:
            match = cache.match(Chain(chain.salt, chain.packed, policy))
            if len(match.nodes) * cache.block_size + match.tail_rows > rows:
                return policy
    return None
