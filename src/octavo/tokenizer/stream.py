"""From token ids to text, one id at a time: the one way in which ids become text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.tokenizer.vocabulary import Vocabulary

#: A UTF-8 character has at most four bytes, so only the last three can be an unfinished one.
_MAX_UNFINISHED = 3


class TextStream:
    """Decodes ids as they come; constant work a token.

    Text is given out as soon as its characters are whole. With ``prompt_ids`` the text goes on where theirs
    ends: a space before the first word stays, and a character that they left unfinished is finished here.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = any(token_id not in self._skipped for token_id in prompt_ids)
        self._strip = 0 if self._started else vocabulary.strip_left
        self._decoder.decode(self._tail(prompt_ids))

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) > _MAX_UNFINISHED:
                break
            if token_id not in self._skipped:
                tail = self._vocabulary.bytes_of(token_id) + tail
        return tail

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        if token_id in self._skipped:
            return ""
        data = self._vocabulary.bytes_of(token_id, first=not self._started)
        self._started = True
        if self._strip and data:
            spaces = len(data) - len(data.lstrip(b" "))
            dropped = min(spaces, self._strip)
            # Only an unbroken run at the very start is dropped.
            self._strip = self._strip - dropped if spaces == len(data) else 0
            data = data[dropped:]
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD for a character that was never finished, or nothing."""
        return self._decoder.decode(b"", final=True)
