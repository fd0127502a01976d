"""Log-probabilities in the two forms that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.request import Logprob
from octavo.tokenizer import Tokenizer

Entry = dict[int, Logprob]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself: its text, or ``bytes:\\x..`` when it is a part of a character."""
    data = tokenizer.vocabulary.bytes_of(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    num_best: int,
    offset: int,
) -> dict[str, Any]:
    """``logprobs`` of ``/v1/completions``, four lists with an item a token.

    ``entries[i]`` is None where nothing comes before the token. ``offset`` is where the first token's text
    begins in the text of the choice.
    """
    texts = [token_text(tokenizer, token) for token in token_ids]
    offsets = []
    for token in token_ids:
        offsets.append(offset)
        offset += len(tokenizer.id_to_text(token))
    return {
        "tokens": texts,
        "token_logprobs": [
            None if entry is None else entry[token].logprob
            for token, entry in zip(token_ids, entries, strict=True)
        ],
        "top_logprobs": [
            None if entry is None else _best_texts(tokenizer, entry, token, num_best)
            for token, entry in zip(token_ids, entries, strict=True)
        ],
        "text_offset": offsets,
    }


def _best_texts(tokenizer: Tokenizer, entry: Entry, token: int, num_best: int) -> dict[str, float]:
    """Text -> log-probability; of several tokens with one text the best counts."""
    found: dict[str, float] = {}
    for token_id in [*_best(entry, num_best), token]:
        found.setdefault(token_text(tokenizer, token_id), entry[token_id].logprob)
    return found


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[Entry], num_best: int
) -> dict[str, Any]:
    """``logprobs`` of ``/v1/chat/completions``: an object a token, each with the best beside it."""

    def one(token_id: int, entry: Entry) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": entry[token_id].logprob,
            "bytes": list(tokenizer.vocabulary.bytes_of(token_id)),
        }

    return {
        "content": [
            {**one(token, entry), "top_logprobs": [one(best, entry) for best in _best(entry, num_best)]}
            for token, entry in zip(token_ids, entries, strict=True)
        ],
        "refusal": None,
    }


def _best(entry: Entry, num_best: int) -> list[int]:
    # The engine lists the best first and the chosen one last, unless that is among them.
    return list(entry)[:num_best]
