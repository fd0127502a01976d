"""What a token's mask costs with llguidance and with xgrammar, in CPU time of one thread.

Needs xgrammar beside octavo: `python benchmarks/grammars.py`. Each walks the tokens of the same valid
documents and computes the mask before every token; both must allow it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xgrammar
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from octavo.engine.build import read_tokenizer
from octavo.serving.grammar import WHITESPACE, _Source
from octavo.weights import hub
from octavo.weights.hub import DEFAULT_MODEL
from octavo.weights.load import open_checkpoint

TEXT = {"type": "string"}
PERSON = {
    "type": "object",
    "properties": {"name": TEXT, "age": {"type": "integer"}, "tags": {"type": "array", "items": TEXT}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "state": {"enum": ["open", "paid", "sent", "returned"]},
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"what": TEXT, "count": {"type": "integer"}, "price": {"type": "number"}},
                "required": ["what", "count", "price"],
                "additionalProperties": False,
            },
        },
        "buyer": PERSON,
    },
    "required": ["id", "state", "lines", "buyer"],
    "additionalProperties": False,
}
ANN = {"name": "Ann Lee", "age": 41, "tags": ["reader", 'likes "quotes" and the sea']}
LINES = [{"what": f"book {i}, second hand", "count": i, "price": 3.25 * i} for i in range(1, 9)]
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "small object": (PERSON, ANN),
    "nested, enum, pattern": (ORDER, {"id": "AB-1234", "state": "paid", "lines": LINES, "buyer": ANN}),
    "any object": ({"type": "object"}, {"a": [1, 2.5, None, {"b": True}], "c": "text " * 20}),
}
ROUNDS = 20


def spent(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and the CPU seconds of this process that it took."""
    start = time.process_time()
    return work(), time.process_time() - start


def walk(
    make: Callable[[], Any],
    mask: Callable[[Any], Any],
    take: Callable[[Any, int], bool],
    allows: Callable[[Any, int], bool],
    ids: list[int],
) -> list[float]:
    """Seconds of each mask and the token before it."""
    times = []
    for _ in range(ROUNDS):
        matcher, before = make(), None
        for token in ids:
            start = time.thread_time()
            if before is not None and not take(matcher, before):
                raise AssertionError("a token of a valid document was refused")
            found = mask(matcher)
            times.append(time.thread_time() - start)
            assert allows(found, token), "the mask forbids a token of a valid document"
            before = token
    return times


def bit(words: np.ndarray, token: int) -> bool:
    return bool(words[token >> 5] >> (token & 31) & 1)


def say(name: str, case: str, compiled: float, times: list[float]) -> None:
    micro = sorted(1e6 * t for t in times)
    found = {
        "median": statistics.median(micro),
        "mean": statistics.fmean(micro),
        "p99": micro[int(len(micro) * 0.99)],
        "most": micro[-1],
    }
    masks = "   ".join(f"{what} {value:6.1f}" for what, value in found.items())
    print(f"{name:11} {case:22} compile {1e3 * compiled:6.2f} ms   mask, microseconds: {masks}")


def main() -> None:
    tokenizer = read_tokenizer(open_checkpoint(hub.resolve(DEFAULT_MODEL)))
    eos, size = tokenizer.eos_token_ids[0], tokenizer.vocab_size
    source = _Source(tokenizer, eos, size)
    ours, seconds = spent(lambda: LLTokenizer(TokenizerWrapper(source), eos_token=[eos]))
    print(f"llguidance: index {1e3 * seconds:.0f} ms")
    info, seconds = spent(
        lambda: xgrammar.TokenizerInfo(source.tokens, xgrammar.VocabType.RAW, stop_token_ids=[eos])
    )
    print(f"xgrammar: index {1e3 * seconds:.0f} ms; {size} tokens, {ROUNDS} rounds")
    for case, (schema, document) in CASES.items():
        ids = tokenizer.encode(json.dumps(document), add_bos=False)
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}
        )
        first, seconds = spent(lambda grammar=grammar: LLMatcher(ours, grammar, log_level=0))
        times = walk(
            first.deep_copy,
            lambda m: np.frombuffer(m.compute_bitmask(), np.uint32),
            lambda m, token: bool(m.consume_tokens([token])),
            bit,
            ids,
        )
        say("llguidance", case, seconds, times)
        # A compiler of its own each time: it remembers what it compiled.
        compiled, seconds = spent(
            lambda schema=schema: xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(
                json.dumps(schema), any_whitespace=True, strict_mode=True
            )
        )
        room = xgrammar.allocate_token_bitmask(1, size)

        def fill(matcher: Any, room: Any = room) -> np.ndarray:
            matcher.fill_next_token_bitmask(room)
            words: np.ndarray = room[0].numpy().view(np.uint32)
            return words

        times = walk(
            lambda compiled=compiled: xgrammar.GrammarMatcher(compiled),
            fill,
            lambda m, token: bool(m.accept_token(token)),
            bit,
            ids,
        )
        say("xgrammar", case, seconds, times)


if __name__ == "__main__":
    main()
