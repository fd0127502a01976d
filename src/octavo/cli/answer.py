"""One streamed answer: printed as it grows, timed, and stopped by Ctrl-C without losing the program."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from octavo.request import RequestOutput


class InterruptFlag:
    """While the block runs, Ctrl-C sets ``raised`` instead of breaking into a step of the engine.

    A second Ctrl-C is a ``KeyboardInterrupt`` again, for a step that takes too long to wait for.
    """

    def __init__(self) -> None:
        self.raised = False
        self._before: Any = None

    def __enter__(self) -> InterruptFlag:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.raised:
            raise KeyboardInterrupt
        self.raised = True


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. Times in seconds from the moment of asking; ``first_token_s`` None: no token."""

    output: RequestOutput | None
    interrupted: bool
    first_token_s: float | None
    total_s: float

    @property
    def text(self) -> str:
        return self.output.outputs[0].text if self.output and self.output.outputs else ""

    @property
    def num_tokens(self) -> int:
        return len(self.output.outputs[0].token_ids) if self.output and self.output.outputs else 0

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of the tokens after the first, which alone waited for the prompt."""
        if self.first_token_s is None or self.num_tokens < 2 or self.total_s <= self.first_token_s:
            return None
        return (self.num_tokens - 1) / (self.total_s - self.first_token_s)

    def summary(self) -> str:
        """One line: tokens, speed, time to the first token, how much of the prompt was cached."""
        if self.output is None:
            return "stopped before the first token"
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        if self.first_token_s is not None:
            parts.append(f"first after {self.first_token_s:.2f} s")
        parts.append(
            f"{self.output.num_cached_tokens} of {len(self.output.prompt_token_ids)} prompt tokens cached"
        )
        if self.interrupted:
            parts.append("stopped")
        return " · ".join(parts)


def receive(
    stream: Iterator[RequestOutput], write: Callable[[str], None], interrupt: InterruptFlag
) -> Answer:
    """Drain a stream of cumulative outputs into ``write``, piece by piece; ``interrupt`` ends it early.

    Raises ValueError with the engine's sentence when the request was refused or failed.
    """
    start = time.perf_counter()
    last: RequestOutput | None = None
    first_token_s: float | None = None
    shown = 0
    for last in stream:
        if last.error is not None:
            raise ValueError(last.error)
        if first_token_s is None and last.outputs and last.outputs[0].token_ids:
            first_token_s = time.perf_counter() - start
        text = last.outputs[0].text if last.outputs else ""
        if len(text) > shown:
            write(text[shown:])
            shown = len(text)
        if interrupt.raised and not last.finished:
            stream.close()  # type: ignore[attr-defined]  # a generator: aborts the request
            break
    interrupted = interrupt.raised and (last is None or not last.finished)
    return Answer(last, interrupted, first_token_s, time.perf_counter() - start)
