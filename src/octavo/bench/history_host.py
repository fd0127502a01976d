"""What a turn costs the host beside the model: scheduler, prefix cache and the step's tensors.

A scheduler serves one conversation and nothing is computed. Its history of so many tokens is cached; the turn
adds a question and says an answer. Hashing is timed inside the chain's hash function and taken off, since it
is linear in what is new on any engine with a prefix cache; both are reported.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from octavo.cache.chain import sha256
from octavo.config import SchedulerConfig
from octavo.engine import runner
from octavo.engine.blocks import PoolShape
from octavo.engine.history import History
from octavo.engine.scheduler import Scheduler
from octavo.request import Request, SamplingParams
from octavo.tokenizer import Tokenizer

BLOCK_SIZE, WINDOW, VOCAB = 16, 512, 49_152
QUESTION, ANSWER = 48, 32
#: Its work may differ by so much between the shortest and the longest history.
GOAL_FLAT = 0.1


class _Clock:
    """A hash function that knows how long it took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, data: bytes) -> bytes:
        start = time.perf_counter()
        digest = sha256(data)
        self.seconds += time.perf_counter() - start
        return digest


class _Conversation:
    """One conversation that grows turn by turn."""

    def __init__(self, tokens: int, compact: bool, rounds: int) -> None:
        self.clock = _Clock()
        most = tokens + rounds * (QUESTION + ANSWER) + 1
        blocks = 2 * (most // BLOCK_SIZE + rounds + 2)
        shape = PoolShape(BLOCK_SIZE, blocks, blocks, WINDOW) if compact else PoolShape(BLOCK_SIZE, blocks)
        self.history = History(BLOCK_SIZE, WINDOW) if compact else None
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=1, max_model_len=most),
            shape,
            fingerprint="synthetic",
            hash_function=self.clock,
        )
        self.draw = random.Random(0)
        self.ids = self.draw.choices(range(VOCAB), k=tokens)
        self._number = 0
        self._serve(self.ids, 1)

    def turn(self) -> tuple[list[float], float]:
        """Seconds of each step of the next turn, hashing left out; and of hashing."""
        self.ids = self.ids + self.draw.choices(range(VOCAB), k=QUESTION)
        self.clock.seconds = 0.0
        steps, said = self._serve(self.ids, ANSWER)
        self.ids = self.ids + said
        return steps, self.clock.seconds

    def _serve(self, ids: list[int], max_tokens: int) -> tuple[list[float], list[int]]:
        number, self._number = self._number, self._number + 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            id=number,
            label=str(number),
            prompt_token_ids=ids,
            params=params,
            max_tokens=max_tokens,
            arrival=number,
        )
        start = time.perf_counter()
        self.scheduler.add(request)
        steps, added = [], time.perf_counter() - start
        while self.scheduler.has_unfinished():
            start, hashed = time.perf_counter(), self.clock.seconds
            output = self.scheduler.schedule()
            runner.build(output.scheduled, BLOCK_SIZE, "cpu", self.history)
            built = time.perf_counter() - start
            sampled = {s.request.id: self.draw.randrange(VOCAB) for s in output.scheduled if s.samples}
            start = time.perf_counter()
            self.scheduler.update(output, sampled)
            steps.append(built + time.perf_counter() - start - (self.clock.seconds - hashed))
        steps[0] += added
        return steps, request.output_token_ids


def measure(lengths: Sequence[int], tokenizer: Tokenizer, text: str, *, rounds: int = 15) -> dict[str, Any]:
    """Exact and compact history at each length, each step's least of ``rounds`` turns; and tokenizing.

    Lengths take turns within a round, so that their ratio holds even when the machine's speed drifts.
    Python's garbage collection rests meanwhile: it would come in the same step of every round, and walk what
    other modules have made.
    """
    rows: list[dict[str, Any]] = []
    made = []
    for kind in ("exact", "compact"):
        chats = {length: _Conversation(length, kind == "compact", rounds) for length in lengths}
        gc.collect()
        gc.disable()
        found: dict[int, list[tuple[list[float], float]]] = {length: [] for length in lengths}
        for _ in range(rounds):
            for length, chat in chats.items():
                found[length].append(chat.turn())
        gc.enable()
        for length in lengths:
            # Every round has the same steps, and what else the machine does can only add to one.
            usual = [min(same) for same in zip(*(turn[0] for turn in found[length]), strict=True)]
            rows.append(
                {
                    "history": kind,
                    "tokens": length,
                    "turn_us": 1e6 * sum(usual),
                    "admission_us": 1e6 * usual[0],
                    "step_us": 1e6 * statistics.median(usual[1:]),
                    "hashing_us": 1e6 * min(turn[1] for turn in found[length]),
                }
            )
        for what, name in (("turn_us", "a turn"), ("step_us", "a step of decoding")):
            values = [row[what] for row in rows if row["history"] == kind]
            goal = (
                f"{kind} history: the host's work of {name}, beside tokenizing and hashing, is flat within "
                f"{GOAL_FLAT:.0%} from {lengths[0]:,} to {lengths[-1]:,} tokens"
            )
            growth = values[-1] / values[0] - 1
            made.append({"goal": goal, "value": growth, "met": abs(growth) <= GOAL_FLAT})
    tokenizing = {str(length): _tokenizing_us(length, tokenizer, text) for length in lengths}
    return {
        "rounds": rounds,
        "question": QUESTION,
        "answer": ANSWER,
        "rows": rows,
        "tokenizing_us": tokenizing,
        "goals": made,
    }


def _tokenizing_us(tokens: int, tokenizer: Tokenizer, text: str) -> float:
    """Microseconds in which a text of about so many tokens becomes token ids."""
    piece = tokenizer.decode(tokenizer.encode(text)[:tokens])
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        tokenizer.encode(piece)
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)
