"""The real model gives the same answer cold, warm, in chunks, in company, preempted and on other threads.

On the native path the same means: every token id and every log-probability, to the bit, without an
exception. With torch's backends log-probabilities agree within ``TOLERANCE``, and ids up to the first
position at which the best two are closer than ``TIE`` (which is reported). Every case proves that it
happened and counts what it compared. The full matrix takes long and is marked slow; the default one takes
the same paths with fewer prompts.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from invariance import (
    BS,
    CASES,
    FULL,
    LIGHT,
    UNLIMITED,
    Baseline,
    Matrix,
    Run,
    assert_close,
    assert_same_bits,
    check_chunks,
    check_company,
    check_warm,
    prompt_of,
)

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.engine.runner import Runner
from octavo.kernels import bmm, fused
from octavo.models.native import NativeDecoder

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def baseline(smollm2_path: Path) -> Baseline:
    return Baseline(smollm2_path)


@pytest.fixture(scope="module")
def torch_baseline(smollm2_path: Path) -> Baseline:
    return Baseline(smollm2_path, "sdpa")


@pytest.mark.parametrize("case", CASES)
def test_p01_p08_s09_the_same_answer(case: str, baseline: Baseline) -> None:
    CASES[case](LIGHT, baseline)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_answer_full_matrix(case: str, baseline: Baseline) -> None:
    CASES[case](FULL, baseline)


# ---- top-k attention: the same law, under a budget of keys


@pytest.fixture(scope="module")
def topk_baseline(smollm2_path: Path) -> Baseline:
    return Baseline(smollm2_path, attn_topk=64)


#: With fewer than 300 keys the fast mode looks at all of them under a budget of 64, and at few under one of
#: 8.
POLICIES = {
    "tail": {"attn_topk": 64, "attn_topk_tail": True},
    "fast": {"attn_topk": 64, "attn_topk_mode": "fast"},
    "fast with tail": {"attn_topk": 8, "attn_topk_mode": "fast", "attn_topk_tail": True},
    "auto": {"attn_topk": "auto"},
    "lean": {"attn_topk": "lean"},
}
SHORT = Matrix((33, 300), 4, {})


@pytest.fixture(scope="module", params=POLICIES)
def policy_baseline(request: pytest.FixtureRequest, smollm2_path: Path) -> Baseline:
    return Baseline(smollm2_path, **POLICIES[request.param])


@pytest.mark.parametrize("case", ["warm", "chunks of 64"])
@pytest.mark.parametrize("policy_baseline", ["fast with tail", "auto"], indirect=True)
def test_the_same_answer_under_other_policies(case: str, policy_baseline: Baseline) -> None:
    CASES[case](SHORT, policy_baseline)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_answer_under_every_policy_full_matrix(case: str, policy_baseline: Baseline) -> None:
    CASES[case](FULL, policy_baseline)


@pytest.mark.slow
def test_a_prefix_hit_at_every_offset_under_every_policy(policy_baseline: Baseline) -> None:
    check_offsets(policy_baseline, 700)


@pytest.mark.parametrize("case", ["warm", "preempted", "chunks of 7"])
def test_the_same_answer_under_a_budget_of_keys(case: str, topk_baseline: Baseline) -> None:
    CASES[case](LIGHT, topk_baseline)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_answer_under_a_budget_of_keys_full_matrix(case: str, topk_baseline: Baseline) -> None:
    CASES[case](FULL, topk_baseline)


def check_offsets(baseline: Baseline, length: int) -> None:
    """A hit at every offset within a block, about 30 tokens before the end."""
    new, first = 4, length // BS * BS - 2 * BS
    (expected,) = baseline((length,), new)
    prompt = prompt_of(baseline.loaded, length)
    for cut in range(first, first + BS + 1):
        run = baseline.run(budget=UNLIMITED)
        # A cousin that leaves the prompt after `cut` tokens.
        run.answer([[*prompt[:cut], prompt[cut] + 1]], 1)
        (got,) = run.answer([prompt], new)
        assert got.num_cached_tokens == cut
        baseline.check([expected], [got], new)


def test_a_prefix_hit_at_every_offset_within_a_block(topk_baseline: Baseline) -> None:
    check_offsets(topk_baseline, 160)


def test_policies_that_differ_run_in_one_step_and_share_nothing(smollm2_path: Path) -> None:
    """All of them beside dense, in one engine that has every plane; each gives what it gives alone."""
    everything = Baseline(smollm2_path, attn_topk=8, attn_topk_mode="fast", attn_topk_tail=True)
    prompt, new = prompt_of(everything.loaded, 120), 3
    asked: list[dict[str, Any]] = [
        {"attn_topk": 0},
        {},
        {"attn_topk_tail": False},
        {"attn_topk_mode": "exact"},
        {"attn_topk": "auto", "attn_topk_mode": "exact"},
        {"attn_topk": "lean", "attn_topk_mode": "exact"},
    ]
    alone = []
    for ask in asked:
        run = everything.run(budget=UNLIMITED, caching=False)
        wanted = run.add(prompt, new, **ask)
        alone.append(run.go()[wanted])
    run = everything.run(budget=UNLIMITED)
    names = [run.add(prompt, new, **ask) for ask in asked]
    last = run.go()
    assert len(run.steps) == new, "all of them in each step"
    for expected, name in zip(alone, names, strict=True):
        everything.check([expected], [last[name]], new)
        assert last[name].num_cached_tokens == 0
    answers = [str(output.outputs[0].logprobs) for output in alone]
    assert len(set(answers)) == len(asked), "no two policies say the same"
    other = run.add(prompt, new, attn_topk_mode="exact", attn_topk_tail=False)
    reason = run.go()[other].cache_miss_reason or ""
    assert "attn_topk=8" in reason


def test_budgets_that_differ_run_in_one_step_and_share_nothing(topk_baseline: Baseline) -> None:
    prompt, new = prompt_of(topk_baseline.loaded, 300), 6
    budgets = (0, 16, 64, 4096)
    alone = {}
    for budget in budgets:
        run = topk_baseline.run(budget=UNLIMITED, caching=False)
        wanted = run.add(prompt, new, attn_topk=budget)
        alone[budget] = run.go()[wanted]
    run = topk_baseline.run(budget=UNLIMITED)
    ids = {budget: run.add(prompt, new, attn_topk=budget) for budget in budgets}
    last = run.go()
    assert len(run.steps) == new, "all of them in each step"
    for budget, name in ids.items():
        topk_baseline.check([alone[budget]], [last[name]], new)
        assert last[name].num_cached_tokens == 0
    # 4,096 places hold all keys.
    assert_same_bits(alone[0], alone[4096])
    assert alone[0].outputs[0].logprobs != alone[16].outputs[0].logprobs
    name = run.add(prompt, new, attn_topk=32)
    other = run.go()[name]
    assert other.num_cached_tokens == 0
    assert "attn_topk=32" in (other.cache_miss_reason or "")


def test_the_report_counts_what_was_kept(topk_baseline: Baseline) -> None:
    config, length, new = topk_baseline.loaded.config, 150, 3
    (output,) = topk_baseline((length,), new)
    report = output.attn_topk
    assert report is not None
    positions, rows = length + new - 1, config.num_layers * config.num_heads
    assert report.rows == positions * rows
    assert report.visible_keys == rows * sum(p + 1 for p in range(positions))
    assert report.kept_keys == rows * sum(min(p + 1, 64) for p in range(positions))
    assert 0.0 < report.mean_dropped_mass < report.worst_dropped_mass <= 1.0


SMALL = Matrix((17, 40), 4, {})


@pytest.mark.parametrize(
    "case",
    [
        "warm",
        pytest.param("company", marks=pytest.mark.slow),
        pytest.param("chunks of 7", marks=pytest.mark.slow),
    ],
)
def test_the_torch_decoder_gives_the_same_answer_within_its_tolerance(
    case: str, torch_baseline: Baseline
) -> None:
    CASES[case](SMALL, torch_baseline)


# ---- a fault turns it red

RED = r"log-probabilities differ|ids differ"


def test_an_order_that_depends_on_the_chunk_turns_it_red(
    baseline: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact mathematics in an order of its own: bmm's products of chunk and history instead of spans."""
    expected = baseline(SMALL.lengths, SMALL.new_tokens)
    check_chunks(SMALL, baseline, 16)
    for method, stand_in in (("plan", bmm.plan), ("attend", bmm.attend)):
        monkeypatch.setattr(fused, method, stand_in)
    with pytest.raises(AssertionError, match=RED):
        check_chunks(SMALL, baseline, 16)
    # A tolerance would not have seen it.
    prompts = [prompt_of(baseline.loaded, n) for n in SMALL.lengths]
    outputs = Run(baseline.loaded, budget=16, caching=False).alone(prompts, SMALL.new_tokens)
    assert [assert_close(e, g) for e, g in zip(expected, outputs, strict=True)] == [4, 4]


def test_an_order_that_depends_on_the_number_of_rows_turns_it_red(
    baseline: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's product for the logits: MKL sums one row in another order than sixteen."""
    decoder = baseline.loaded.decoder
    assert isinstance(decoder, NativeDecoder)
    (packed,) = decoder._head.weights
    head = torch.empty(packed.outputs, packed.inputs)
    for row in range(packed.outputs):
        packed.expand_row(row, head[row].data_ptr())
    norm = decoder._norm

    def by_torch(self: NativeDecoder, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(hidden[rows], hidden.shape[1:], norm.weight, norm.eps)
        return torch.nn.functional.linear(normed, head)

    monkeypatch.setattr(NativeDecoder, "logits", by_torch)
    mutant = copy.copy(baseline)
    mutant._known = {}
    mutant(SMALL.lengths, SMALL.new_tokens)
    with pytest.raises(AssertionError, match=RED):
        check_company(SMALL, mutant)


def test_a_mask_that_is_off_by_one_after_a_cached_prefix_turns_it_red(
    baseline: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline(SMALL.lengths, SMALL.new_tokens)
    plan = AttentionBackend.plan

    def hides_each_row_from_itself(self: AttentionBackend, batch: ForwardBatch) -> object:
        counts = batch.cu_seqlens_q.diff()
        wrong = (counts > 1) & (batch.seq_lens > counts)
        return plan(self, replace(batch, seq_lens=batch.seq_lens - wrong.to(torch.int32)))

    check_chunks(SMALL, baseline, 16)
    monkeypatch.setattr(AttentionBackend, "plan", hides_each_row_from_itself)
    with pytest.raises(AssertionError, match=RED):
        check_chunks(SMALL, baseline, 16)


def test_a_stale_block_turns_it_red(baseline: Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline(SMALL.lengths, SMALL.new_tokens)
    monkeypatch.setattr(Runner, "copy_blocks", lambda self, copies: None)
    with pytest.raises(AssertionError, match=RED):
        check_warm(SMALL, baseline)


def test_a_wrong_block_in_a_table_turns_it_red(baseline: Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline(SMALL.lengths, SMALL.new_tokens)
    plan = AttentionBackend.plan

    def reads_the_second_block_twice(self: AttentionBackend, batch: ForwardBatch) -> object:
        table = batch.block_table.clone()
        if table.shape[1] > 2:
            table[-1, 0] = table[-1, 1]
        return plan(self, replace(batch, block_table=table))

    monkeypatch.setattr(AttentionBackend, "plan", reads_the_second_block_twice)
    with pytest.raises(AssertionError, match=RED):
        check_chunks(SMALL, baseline, 16)
