"""The text of one output while it grows, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.tokenizer.errors import TokenizerError
from octavo.tokenizer.stream import TextStream

if TYPE_CHECKING:
    from octavo.tokenizer.core import Tokenizer


class _StopString:
    """Follows one stop string through a text, a character at a time (Knuth, Morris and Pratt, 1977).

    ``matched`` is the length of the longest end of the text so far that begins the stop string. Its table
    grows with ``matched`` only, so that a long stop string costs nothing that the text does not ask for.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # _shorter[n]: the longest proper prefix of text[:n] that is also its suffix.
        self._shorter = [0, 0]

    def feed(self, char: str) -> bool:
        """True when this character completes the stop string."""
        k = self.matched
        while k and self.text[k] != char:
            k = self._shorter[k]
        k += self.text[k] == char
        if k == len(self._shorter):
            self._extend()
        complete = k == len(self.text)
        self.matched = self._shorter[k] if complete else k
        return complete

    def _extend(self) -> None:
        text, n = self.text, len(self._shorter) - 1
        k = self._shorter[n]
        while k and text[k] != text[n]:
            k = self._shorter[k]
        self._shorter.append(k + (text[k] == text[n]))


class IncrementalDetokenizer:
    """Text for one output, token by token, with stop strings.

    The joined results of ``push`` and ``flush`` are ``text``. Without a stop they equal
    ``tokenizer.decode(ids, prompt_ids=prompt_ids)``. Text that could still become a stop string is held
    back until that is decided. The stop string that is complete first ends the text, of several complete
    at the same character the longest; so the result does not depend on how text falls into tokens.

    Args:
        tokenizer: whose ids will be pushed.
        skip_special_tokens: leave special tokens out of the text.
        stop: strings that end the text; an empty one is an error.
        include_stop_str_in_output: keep the stop string at the end of the text.
        prompt_ids: what the output continues (a space before its first word is then kept).

    Attributes:
        stop_hit: the stop string that ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        if isinstance(stop, str) or any(not isinstance(text, str) or not text for text in stop):
            raise TokenizerError("stop must be a list of strings, none of them empty")
        self._stream = TextStream(
            tokenizer.vocabulary, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids
        )
        self._stops = [_StopString(text) for text in dict.fromkeys(stop)]
        self._include = include_stop_str_in_output
        self._held = ""
        self._given: list[str] = []
        self.stop_hit: str | None = None

    @property
    def text(self) -> str:
        """Everything given out so far."""
        if len(self._given) > 1:
            self._given = ["".join(self._given)]
        return self._given[0] if self._given else ""

    def push(self, token_id: int, check_stop: bool = True) -> str:
        """The text that is safe to show after this token; may be empty.

        With ``check_stop=False`` (before min_tokens) a stop string that this token completes is
        ordinary text. Nothing comes after a stop.
        """
        if self.stop_hit is not None:
            return ""
        return self._accept(self._stream.push(token_id), check_stop)

    def flush(self, check_stop: bool = True) -> str:
        """The rest: text that was held back, and U+FFFD for a character that was never finished."""
        if self.stop_hit is not None:
            return ""
        text = self._accept(self._stream.flush(), check_stop)
        if self.stop_hit is None and self._held:
            self._given.append(self._held)
            text, self._held = text + self._held, ""
        return text

    def _accept(self, new: str, check_stop: bool) -> str:
        text = self._held + new
        safe = len(text)
        for end, char in enumerate(new, start=len(self._held) + 1):
            complete = [stop.text for stop in self._stops if stop.feed(char)]
            if complete and check_stop:
                self.stop_hit = max(complete, key=len)
                safe = end if self._include else end - len(self.stop_hit)
                self._held = ""
                break
        else:
            safe -= max((stop.matched for stop in self._stops), default=0)
            self._held = text[safe:]
        if safe:
            self._given.append(text[:safe])
        return text[:safe]
