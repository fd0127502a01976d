"""What the tests of invariance are made of: runs of the real model by hand, the law, and the cases.

A case runs, proves that it happened, and compares with a baseline to the bit (``fused``) or within
``TOLERANCE`` (torch's backends).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine.build import LoadedModel, assemble, load
from octavo.engine.engine import Engine
from octavo.request import RequestOutput, SamplingParams
from octavo.weights.load import open_checkpoint

TOLERANCE = 1e-4
TIE = 1e-3
BS = 16
UNLIMITED = 4096

ALL_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 63, 65, 128, 255, 256, 257, 400, 511, 513, 700, 1024, 1500)
FEW_LENGTHS = (1, 15, 16, 17, 257, 400)
CHUNKS = (1, 7, 16, 64, UNLIMITED)


@dataclass(frozen=True)
class Matrix:
    """Which prompts, how many new tokens, and which lengths a chunk size is tried on."""

    lengths: tuple[int, ...]
    new_tokens: int
    longest_in_chunks: dict[int, int]

    def in_chunks_of(self, size: int) -> list[int]:
        return [n for n in self.lengths if n <= self.longest_in_chunks.get(size, max(self.lengths))]


FULL = Matrix(ALL_LENGTHS, 48, {})
LIGHT = Matrix(FEW_LENGTHS, 6, {1: 17, 7: 257, 16: 257})


def open_model(path: Path, attention: str = "fused", num_threads: int = 2) -> LoadedModel:
    config = EngineConfig(model="smollm2", attention=attention, num_threads=num_threads)
    return load(open_checkpoint(path), config)


def text_of(num_words: int, seed: int) -> str:
    """Sentences that no two prompts share."""
    rng = random.Random(seed)
    things = ["river", "engine", "garden", "letter", "market", "station", "winter", "painter", "harbour"]
    deeds = ["carries", "finds", "repairs", "follows", "remembers", "describes", "sells", "paints", "opens"]
    kinds = ["old", "quiet", "green", "narrow", "famous", "broken", "early", "heavy", "distant", "curious"]
    words: list[str] = []
    while len(words) < num_words:
        a, b = rng.sample(things, 2)
        words += f"The {rng.choice(kinds)} {a} {rng.choice(deeds)} the {rng.choice(kinds)} {b}".split()
        words.append(rng.choice(["in 1987.", "again,", "because of it.", "twice a day;", "and then..."]))
    return " ".join(words)


def prompt_of(loaded: LoadedModel, length: int, seed: int = 0) -> list[int]:
    ids = loaded.tokenizer.encode(text_of(length + 20, seed * 10_000 + length))
    assert len(ids) >= length
    return ids[:length]


class Run:
    """An engine on the loaded model, and what each of its steps computed."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        budget: int,
        num_blocks: int = 1100,
        caching: bool = True,
        **attn: Any,
    ) -> None:
        config = EngineConfig(
            model="smollm2",
            cache=CacheConfig(block_size=BS, num_blocks=num_blocks, enable_prefix_caching=caching),
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=budget),
            attention=loaded.options.attention,
            num_threads=loaded.options.num_threads,
            **attn,
        )
        self.engine: Engine = assemble(config, loaded)
        #: Of each step: prompt -> (start, number of tokens).
        self.steps: list[dict[tuple[int, ...], tuple[int, int]]] = []
        run = self.engine._runner.run

        def spy(scheduled):
            self.steps.append({tuple(s.request.prompt_token_ids): (s.start, s.num_tokens) for s in scheduled})
            return run(scheduled)

        self.engine._runner.run = spy  # type: ignore[method-assign]  # to look in

    def add(self, prompt: list[int], new_tokens: int, priority: int = 0, **attn: Any) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, logprobs=2, **attn)
        return str(self.engine.add_request(prompt, params, priority=priority))

    def go(self, num_steps: int | None = None) -> dict[str, RequestOutput]:
        """The last output of each request after so many steps, or at the end."""
        last: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished() and num_steps != 0:
            last |= {output.request_id: output for output in self.engine.step()}
            num_steps = None if num_steps is None else num_steps - 1
        return last

    def answer(self, prompts: Sequence[list[int]], new_tokens: int) -> list[RequestOutput]:
        ids = [self.add(prompt, new_tokens) for prompt in prompts]
        last = self.go()
        return [last[i] for i in ids]

    def alone(self, prompts: Sequence[list[int]], new_tokens: int) -> list[RequestOutput]:
        return [self.answer([p], new_tokens)[0] for p in prompts]

    def chunks_of(self, prompt: list[int]) -> list[int]:
        """Sizes of the chunks in which a prompt was computed, from the first to the one that sampled."""
        sizes = []
        for step in self.steps:
            start, count = step.get(tuple(prompt), (len(prompt), 0))
            if start < len(prompt):
                sizes.append(count)
        return sizes


def assert_same_bits(expected: RequestOutput, got: RequestOutput) -> int:
    """Every id and log-probability; returns how many positions that were."""
    assert got.error is None
    a, b = expected.outputs[0], got.outputs[0]
    assert a.logprobs is not None
    assert b.logprobs is not None
    where = f"prompt of {len(expected.prompt_token_ids)}"
    assert a.token_ids == b.token_ids, f"{where}: ids differ"
    assert len(a.logprobs) == len(b.logprobs) == len(a.token_ids)
    for i, (these, those) in enumerate(zip(a.logprobs, b.logprobs, strict=True)):
        assert these == those, f"{where}, output position {i}: log-probabilities differ"
    return len(a.token_ids)


def assert_close(expected: RequestOutput, got: RequestOutput) -> int:
    """Up to the first position at which the ids part, which must be a tie; returns how many positions."""
    assert got.error is None
    a, b = expected.outputs[0], got.outputs[0]
    assert len(a.token_ids) == len(b.token_ids)
    assert a.logprobs is not None
    assert b.logprobs is not None
    for i, (token, other) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
        best, second, *_ = sorted((e.logprob for e in a.logprobs[i].values()), reverse=True)
        where = f"prompt of {len(expected.prompt_token_ids)}, output position {i}"
        for candidate in a.logprobs[i].keys() & b.logprobs[i].keys():
            difference = abs(a.logprobs[i][candidate].logprob - b.logprobs[i][candidate].logprob)
            assert difference < TOLERANCE, f"{where}: log-probabilities differ by {difference:.2e}"
        if token != other:
            assert best - second < TIE, f"{where}: ids differ, {best - second:.2e} apart"
            print(f"{where}: a tie, compared up to there")
            return i
    return len(a.token_ids)


class Baseline:
    """Each prompt alone, in one chunk, nothing cached; computed once and kept. ``check`` is the law."""

    def __init__(self, path: Path, attention: str = "fused", **attn: Any) -> None:
        self.path = path
        self.loaded = open_model(path, attention)
        self.exact = attention == "fused"
        self.attn = attn
        self._run = self.run(budget=UNLIMITED, caching=False)
        self._known: dict[tuple[int, int], RequestOutput] = {}

    def run(self, **options: int) -> Run:
        return Run(self.loaded, **self.attn, **options)  # type: ignore[arg-type]  # options as they come

    def __call__(self, lengths: Sequence[int], new_tokens: int) -> list[RequestOutput]:
        for length in lengths:
            if (length, new_tokens) not in self._known:
                prompt = prompt_of(self.loaded, length)
                self._run.steps.clear()
                (output,) = self._run.answer([prompt], new_tokens)
                assert output.num_cached_tokens == 0
                assert self._run.chunks_of(prompt) == [length]
                self._known[length, new_tokens] = output
        return [self._known[length, new_tokens] for length in lengths]

    def check(self, expected: Sequence[RequestOutput], got: Sequence[RequestOutput], positions: int) -> None:
        """Compare, and assert that so many positions were there to be compared."""
        assert_same = assert_same_bits if self.exact else assert_close
        compared = sum(assert_same(e, g) for e, g in zip(expected, got, strict=True))
        assert compared == positions if self.exact else positions // 2 < compared <= positions


# ---- the cases: each runs, proves that it happened, and compares


def check_warm(matrix: Matrix, baseline: Baseline) -> None:
    loaded, new = baseline.loaded, matrix.new_tokens
    prompts = [prompt_of(loaded, n) for n in matrix.lengths]
    expected = baseline(matrix.lengths, new)
    run = baseline.run(budget=UNLIMITED)
    for prompt, wanted in zip(prompts, expected, strict=True):
        (cold,) = run.answer([prompt], new)
        baseline.check([wanted], [cold], new)
        (warm,) = run.answer([prompt], new)
        assert warm.num_cached_tokens == len(prompt) - 1
        baseline.check([wanted], [warm], new)
    # what was generated is cached too: the text goes on as it did
    for prompt, wanted in zip(prompts, expected, strict=True):
        longer = prompt + wanted.outputs[0].token_ids[: new // 2]
        (rest,) = run.answer([longer], new - new // 2)
        assert rest.num_cached_tokens == len(longer) - 1
        baseline.check([_after(wanted, new // 2)], [rest], new - new // 2)


def _after(output: RequestOutput, count: int) -> RequestOutput:
    choice = output.outputs[0]
    assert choice.logprobs is not None
    rest = replace(choice, token_ids=choice.token_ids[count:], logprobs=choice.logprobs[count:])
    return replace(output, outputs=[rest])


def check_chunks(matrix: Matrix, baseline: Baseline, size: int) -> None:
    lengths = matrix.in_chunks_of(size)
    prompts = [prompt_of(baseline.loaded, n) for n in lengths]
    run = baseline.run(budget=size, caching=False)
    outputs = run.alone(prompts, matrix.new_tokens)
    for prompt in prompts:
        assert len(run.chunks_of(prompt)) == -(-len(prompt) // size)
    baseline.check(baseline(lengths, matrix.new_tokens), outputs, len(lengths) * matrix.new_tokens)


def check_company(matrix: Matrix, baseline: Baseline) -> None:
    """All prompts in groups of 16, the last one filled up with strangers."""
    groups = [matrix.lengths[i : i + 16] for i in range(0, len(matrix.lengths), 16)]
    for group in groups:
        strangers = [prompt_of(baseline.loaded, 5 + 3 * i, seed=2) for i in range(16 - len(group))]
        prompts = [prompt_of(baseline.loaded, n) for n in group] + strangers
        run = baseline.run(budget=8192, caching=False)
        outputs = run.answer(prompts, matrix.new_tokens)
        assert [len(step) for step in run.steps] == [16] * matrix.new_tokens
        wanted = baseline(group, matrix.new_tokens)
        baseline.check(wanted, outputs[: len(group)], len(group) * matrix.new_tokens)


def check_preempted(matrix: Matrix, baseline: Baseline) -> None:
    """In the middle of its answer a request loses all its blocks to an urgent one that needs the pool."""
    for length in matrix.lengths:
        num_blocks = -(-(length + matrix.new_tokens) // BS) + 1
        urgent = prompt_of(baseline.loaded, (num_blocks - 1) * BS + 1, seed=3)
        run = baseline.run(budget=UNLIMITED, num_blocks=num_blocks)
        wanted = run.add(prompt_of(baseline.loaded, length), matrix.new_tokens, priority=1)
        last = run.go(num_steps=matrix.new_tokens // 2)
        assert len(last[wanted].outputs[0].token_ids) == matrix.new_tokens // 2
        run.add(urgent, 2, priority=0)
        output = run.go()[wanted]
        assert output.metrics is not None
        assert output.metrics.num_preemptions == 1, f"prompt of {length} was not preempted"
        assert output.num_cached_tokens == 0, "a resume is not a hit"
        baseline.check(baseline([length], matrix.new_tokens), [output], matrix.new_tokens)


def check_threads(matrix: Matrix, baseline: Baseline) -> None:
    """Another number of threads, more than there are processors too."""
    prompts = [prompt_of(baseline.loaded, n) for n in matrix.lengths]
    expected = baseline(matrix.lengths, matrix.new_tokens)
    for num_threads in (1, 3):
        loaded = open_model(baseline.path, baseline.loaded.options.attention, num_threads)
        assert loaded.pool.num_threads == num_threads != baseline.loaded.pool.num_threads
        run = Run(loaded, budget=UNLIMITED, caching=False, **baseline.attn)
        outputs = run.alone(prompts, matrix.new_tokens)
        baseline.check(expected, outputs, len(prompts) * matrix.new_tokens)


CASES: dict[str, Callable[[Matrix, Baseline], None]] = {
    "warm": check_warm,
    "company": check_company,
    "preempted": check_preempted,
    "threads": check_threads,
} | {f"chunks of {n}": (lambda m, b, n=n: check_chunks(m, b, n)) for n in CHUNKS}
