"""Texts and pairs of texts to the token ids of an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from octavo.tokenizer.errors import TokenizerError, check_text
from octavo.tokenizer.hf import parts_from_hf

Text = str | tuple[str, str]


class Encoded(NamedTuple):
    """One text with the model's own tokens around it; ``segments`` is 1 in the second text of a pair."""

    ids: list[int]
    segments: list[int]


class EncoderTokenizer:
    """The model's own rules; the text of a control token, such as "[SEP]", is plain text here.

    Raises TokenizerError, a ValueError, for a folder without a usable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        parts = parts_from_hf(folder)
        self._backend = parts.backend
        self.vocab_size = parts.vocab_size

    def encode(self, text: Text, *, max_tokens: int, truncate: bool) -> Encoded:
        """The ids of a text or of a pair.

        ``truncate`` cuts what is longer than ``max_tokens``, the longer text of a pair first. Raises
        TokenizerError for a longer text without it, and for what is no text.
        """
        items = (text,) if isinstance(text, str) else text
        if not isinstance(items, tuple | list) or not 1 <= len(items) <= 2:
            raise TokenizerError(f"an input must be a text or a pair of texts, got {text!r:.60}")
        for item in items:
            if not isinstance(item, str):
                raise TokenizerError(f"an input must be a text or a pair of texts, got {type(item).__name__}")
            check_text(item, "the text")
        own = self._backend.num_special_tokens_to_add(len(items) == 2)
        encoding = self._backend.encode(*items)
        if len(encoding.ids) > max_tokens:
            if not truncate:
                raise TokenizerError(
                    f"the text has {len(encoding.ids)} tokens and the model takes {max_tokens}: "
                    "shorten it, or pass truncate=True"
                )
            if max_tokens <= own:
                raise TokenizerError(f"max_tokens must be more than the model's own {own}, got {max_tokens}")
            self._backend.enable_truncation(max_tokens)
            try:
                encoding = self._backend.encode(*items)
            finally:
                self._backend.no_truncation()
        if not encoding.ids:
            raise TokenizerError("the text is empty, and this model puts no tokens of its own around it")
        return Encoded(encoding.ids, encoding.type_ids)

    def from_ids(self, ids: list[int], *, max_tokens: int) -> Encoded:
        """Ids as they are, all in the first segment. Raises TokenizerError for none, many or bad ones."""
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or i < 0:
                raise TokenizerError(f"a token id must be a whole number from 0, got {i!r:.60}")
        if not ids:
            raise TokenizerError("the list of token ids is empty")
        if len(ids) > max_tokens:
            raise TokenizerError(
                f"the text has {len(ids)} tokens and the model takes {max_tokens}: shorten it"
            )
        return Encoded(ids, [0] * len(ids))

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of ids, as the tokenizer gives it back. Raises TokenizerError for ids it does not have."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise TokenizerError(f"token {i} is not one of the tokenizer's {self.vocab_size}")
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text
