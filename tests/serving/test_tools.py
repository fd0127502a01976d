"""Tool calls in a text, however it falls into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.serving.tools import ToolCallParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = [
    "no call at all",
    "a < b <tool",
    f"before {CALL}",
    f"{CALL}\n{CALL}",
    "<tool_call>not json</tool_call> after",
    '<tool_call>{"name": "f"}',
    "<tool_call>{",
    "lines\n\n",
]


def outcome(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser()
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    deltas += parser.push("", final=True)
    text = "".join(delta["content"] for delta in deltas if "content" in delta)
    return text, [(call["function"]["name"], call["function"]["arguments"]) for call in parser.calls]


@pytest.mark.parametrize("text", TEXTS)
@given(data=st.data())
def test_pieces_do_not_matter(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert outcome(pieces) == outcome([text])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (TEXTS[0], TEXTS[0], 0),
        (TEXTS[1], TEXTS[1], 0),
        (TEXTS[2], "before", 1),
        (TEXTS[3], "", 2),
        (TEXTS[4], TEXTS[4], 0),
        (TEXTS[5], "", 1),
        (TEXTS[6], TEXTS[6], 0),
        (TEXTS[7], TEXTS[7], 0),
    ],
)
def test_what_is_found(text, content, calls):
    found, made = outcome([text])
    assert (found, len(made)) == (content, calls)
    for _, arguments in made:
        assert isinstance(json.loads(arguments), dict)
