"""Control tokens in text: finding those that a template wrote, and disguising those that a user wrote."""

from __future__ import annotations

import bisect
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from octavo.tokenizer.errors import ChatTemplateError, TokenizerError
from octavo.tokenizer.parts import ControlToken

MAX_CONTROL_CHARACTERS = 256

#: As many of a marker's characters as are enough to recognise a marker that was cut in two.
_MARKER_ROOT = 16


class ControlTokens:
    """The control tokens of a model, ready to be found in text (leftmost first, then longest)."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self._by_text = {token.text: token for token in tokens if token.text}
        lengths: dict[str, set[int]] = {}
        for text in self._by_text:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(re.escape(first) for first in self._lengths)
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._sorted = sorted(self._by_text)
        self._sorted_backwards = sorted(text[::-1] for text in self._by_text)
        self._longest = max(map(len, self._by_text), default=0)
        if self._longest > MAX_CONTROL_CHARACTERS:
            raise TokenizerError(
                f"the vocabulary has a control token of {self._longest} characters; "
                f"at most {MAX_CONTROL_CHARACTERS} are allowed"
            )

    def _at(self, text: str, start: int) -> ControlToken | None:
        for length in self._lengths[text[start]]:
            token = self._by_text.get(text[start : start + length])
            if token is not None and not (token.single_word and _inside_word(text, start, start + length)):
                return token
        return None

    def split(self, text: str) -> Iterator[str | ControlToken]:
        """``text`` cut into control tokens and the plain text between them (never empty), in order."""
        if self._first is None:
            if text:
                yield text
            return
        done = position = 0
        while (match := self._first.search(text, position)) is not None:
            start = match.start()
            token = self._at(text, start)
            if token is None:
                position = start + 1
                continue
            end = position = start + len(token.text)
            if token.lstrip:
                start = max(done, len(text[:start].rstrip()))
            if token.rstrip:
                end = position = len(text) - len(text[end:].lstrip())
            if start > done:
                yield text[done:start]
            yield token
            done = end
        if done < len(text):
            yield text[done:]

    def risky_characters(self, text: str, *, edges: bool = True) -> list[int]:
        """Positions of characters of ``text`` without which it has no part in any control token.

        They are the first character of each control token in it (overlapping ones too), the first of
        each tail that could begin one, and the last of each head that could end one: a template may
        put anything beside the text. Without ``edges`` only the first kind.
        """
        found: set[int] = set()
        if self._first is None or not text:
            return []
        for match in self._first.finditer(text):
            start = match.start()
            if any(text[start : start + n] in self._by_text for n in self._lengths[text[start]]):
                found.add(start)
        if not edges:
            return sorted(found)
        # Templates like to trim, so the edges of the trimmed text count as edges too.
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for edge in {end, len(text)}:
            found.update(
                i
                for i in range(max(0, edge - self._longest + 1), edge)
                if _begins_one(self._sorted, text[i:edge])
            )
        for edge in {0, begin}:
            stop = min(len(text), edge + self._longest - 1)
            found.update(
                i - 1
                for i in range(edge + 1, stop + 1)
                if _begins_one(self._sorted_backwards, text[edge:i][::-1])
            )
        return sorted(found)


def _begins_one(texts: list[str], prefix: str) -> bool:
    """Whether one of the sorted ``texts`` begins with ``prefix`` and goes on after it."""
    after = bisect.bisect_right(texts, prefix)
    return after < len(texts) and texts[after].startswith(prefix)


def _inside_word(text: str, start: int, end: int) -> bool:
    before = text[start - 1 : start]
    after = text[end : end + 1]
    return bool(re.match(r"\w", before) or re.match(r"\w", after))


class Disguise:
    """Hides control tokens in user text while a template handles it.

    A risky character becomes a marker, an unguessable number made for one rendering, and the
    character's code. The control token is then no longer there to be found in the rendered text. What a
    template does to the text around it (trim, join, JSON, upper case) leaves a run of digits alone, so
    the disguise can be taken off after the rendered text has been cut at the real control tokens,
    and before it is encoded. Text without control tokens is not touched at all, so its encoding is
    what it would be without any of this: no cut is ever made where the user's text begins or ends.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        # One zero, at the front: no two markers can overlap.
        self._marker = "0" + "".join(secrets.choice("123456789") for _ in range(40))
        self._hidden = re.compile(self._marker + "([0-9]{7})")

    def put_on(self, value: Any) -> Any:
        """A copy of ``value`` (strings, lists, dicts, at any depth) with its strings disguised."""
        if isinstance(value, str):
            return self._put_on(value)
        if isinstance(value, dict):
            # A template looks for keys by name, so their edges stay as they are.
            return {
                self._put_on(key, edges=False) if isinstance(key, str) else key: self.put_on(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.put_on(item) for item in value]
        return value

    def _put_on(self, text: str, *, edges: bool = True) -> str:
        pieces, done = [], 0
        for position in self._control.risky_characters(text, edges=edges):
            pieces += [text[done:position], self._marker, f"{ord(text[position]):07d}"]
            done = position + 1
        return "".join([*pieces, text[done:]])

    def take_off(self, text: str) -> str:
        """The text as its writer meant it."""
        text = self._hidden.sub(lambda match: chr(int(match[1])), text)
        if self._marker[:_MARKER_ROOT] in text:
            raise ChatTemplateError(
                "the chat template cuts a message in the middle of the text of a control token, "
                "so that text cannot be kept apart from the template's own"
            )
        return text
