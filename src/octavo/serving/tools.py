"""Tool calls in a model's text: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

This is the form that Hermes, Qwen and SmolLM3 were trained on; other forms are left in the text as it is.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCallParser:
    """Splits a text that grows into content and calls. ``calls`` are those that are whole so far."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._rest = ""
        self._inside = False

    def push(self, text: str, *, final: bool = False) -> list[dict[str, Any]]:
        """What ``text`` adds, as deltas of a message: {"content": ...} or {"tool_calls": [...]}.

        A tail that may still become a tag, and a call that is not whole, are held back until ``final``.
        """
        self._rest += text
        deltas: list[dict[str, Any]] = []
        while True:
            tag = CLOSE if self._inside else OPEN
            before, found, after = self._rest.partition(tag)
            if not found:
                break
            self._rest = after
            if self._inside:
                deltas.append(self._call(before, CLOSE))
            elif before.strip():
                deltas.append({"content": before.rstrip()})
            self._inside = not self._inside
        if final:
            left, self._rest = (OPEN if self._inside else "") + self._rest, ""
            if left.strip() or (left and not self.calls):
                # A model may end its turn behind the object, without the closing tag.
                deltas.append(self._call(left.removeprefix(OPEN), "") if self._inside else {"content": left})
        elif not self._inside:
            held = _possible_start(self._rest)
            ready, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
            if ready:
                deltas.append({"content": ready})
        return deltas

    def _call(self, text: str, closing: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
            name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
            if not isinstance(name, str):
                raise TypeError("the name is no text")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {"content": f"{OPEN}{text}{closing}"}
        call = {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        self.calls.append(call)
        return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}


def _possible_start(text: str) -> int:
    """Characters at the end of ``text`` that may belong to a call: a part of its tag, white space before."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            break
    else:
        length = 0
    return len(text) - len(text[: len(text) - length].rstrip())
