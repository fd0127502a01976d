"""The benches of quality and needle: what they count, against what it must be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_checkpoint import write_tiny_model

from octavo.batch import ForwardBatch
from octavo.bench import topk, topk_engine
from octavo.bench import topk_needle as needle
from octavo.bench import topk_quality as quality
from octavo.bench.topk_policies import MODES, BandAttention, Lab, Policy, policies
from octavo.kernels.api import AttentionSpec, KVLayer
from octavo.kernels.native import ThreadPool
from octavo.request import SamplingParams

TEXT = "".join(f"Whale {i * i % 97} swam by ship {i}; nobody saw number {i * 7 % 31}. " for i in range(60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(path, 2)
    return str(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "whales.txt"
    path.write_text(TEXT)
    return path


def run(
    bench: Any, model: str, text: Path, settings: Any, found: Any = None, kept: int = 0
) -> tuple[Any, list[str]]:
    """The result and what was said. Even what is saved first holds ``kept`` rows of those found."""
    said: list[str] = []
    saved: list[int] = []

    def save(so_far: Any) -> None:
        saved.append(len(so_far["rows"]))

    result = bench.run(model, text, settings, threads=1, found=found, report=said.append, save=save)
    assert saved[0] >= max(1, kept)
    return json.loads(json.dumps(result)), said


# ---- policies


def test_policies_are_modes_by_budgets_with_and_without_dense_layers() -> None:
    made = policies(["exact", "streaming"], [8, 16], (0,))
    assert [p.name for p in made] == [
        "dense", "exact 8", "exact 8 dense 0", "exact 16", "exact 16 dense 0", "streaming 8", "streaming 16",
    ]  # fmt: skip
    assert made[0].options == {}
    assert made[2].options == {"attn_topk": 8, "dense_layers": (0,)}
    with pytest.raises(ValueError, match=r"modes are exact, .*window, got 'best'"):
        policies(["best"], [8])
    with pytest.raises(ValueError, match="streaming needs a budget above 4, got 4"):
        policies(["streaming"], [4])


def test_a_mode_without_its_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "odd", {"attn_odd": True})
    with pytest.raises(ValueError, match="'odd' needs the option attn_odd, which this engine has not"):
        policies(["odd"], [8])


@pytest.mark.parametrize(("sinks", "kept"), [(4, 20), (0, 16), (4, 1000)])
def test_a_band_is_a_mask_over_positions(sinks: int, kept: int) -> None:
    """7 queries that end at the 60th key, blocks in disorder, against a softmax over a mask."""
    torch.manual_seed(0)
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=8, block_size=16, kv_dtype=torch.float32, device="cpu"
    )
    k, v, q = torch.randn(60, 2, 8), torch.randn(60, 2, 8), torch.randn(7, 4, 8)
    table = torch.tensor([[3, 0, 2, 1]], dtype=torch.int32)
    cache = [torch.full((4, 2, 16, 8), float("nan")) for _ in range(2)]
    for position in range(60):
        for to, rows in zip(cache, (k, v), strict=True):
            to[table[0, position // 16], :, position % 16] = rows[position]
    positions = torch.arange(53, 60)
    batch = ForwardBatch(
        token_ids=positions,
        positions=positions,
        slot_mapping=positions,
        block_table=table,
        seq_lens=torch.tensor([60], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 7], dtype=torch.int32),
        logits_rows=positions[:0],
    )
    band = BandAttention(spec, ThreadPool(1), sinks, kept)
    out = band.run(q, KVLayer(*cache, scale=0.3), band.plan(batch))
    for row, p in enumerate(positions.tolist()):
        seen = [j for j in range(p + 1) if j < sinks or j > p - (kept - sinks)]
        assert len(seen) == min(kept, p + 1)
        for head in range(4):
            weights = torch.softmax(0.3 * k[seen, head // 2] @ q[row, head], 0)
            torch.testing.assert_close(out[row, head], weights @ v[seen, head // 2], atol=1e-5, rtol=1e-4)


# ---- quality


def test_quality_of_budgets_that_keep_all_is_that_of_dense(model: str, text: Path) -> None:
    settings = quality.Settings(
        modes=("exact", "streaming", "window"), topks=(128,), dense_layers=(1,), windows=(64, 128), tokens=256
    )
    result, _ = run(quality, model, text, settings)
    assert len(result["rows"]) == 2 * 5
    for row in result["rows"]:
        assert row["kept_percent"] == pytest.approx(100)
        assert len(row["losses"]) == 256 // row["window"]
        if row["mode"] == "exact":
            assert row["change_percent"] == 0, "to the bit"
            assert row["dropped_mass_mean"] == 0
        assert abs(row["change_percent"]) < 1e-2
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert quality.table(result).row_count == 10


def test_quality_counts_the_keys_of_the_second_half(model: str, text: Path, tmp_path: Path) -> None:
    settings = quality.Settings(
        modes=("exact", "streaming", "window"), topks=(16,), dense_layers=(1,), windows=(64,), tokens=64
    )
    result, said = run(quality, model, text, settings)
    rows = {row["policy"]: row for row in result["rows"]}
    seen = sum(range(33, 65))
    few = 100 * 32 * 16 / seen
    for name in ("exact 16", "streaming 16", "window 16"):
        assert rows[name]["kept_percent"] == pytest.approx(few)
        assert rows[name]["change_percent"] != 0
    # One of two layers keeps all.
    assert rows["exact 16 dense 1"]["kept_percent"] == pytest.approx((few + 100) / 2)
    assert 0 < rows["exact 16"]["dropped_mass_mean"] <= 1
    assert [goal["met"] for goal in result["goals"]] == [False, False]
    # What is known is not measured again, and what is not asked for stays.
    fewer = quality.Settings(modes=("exact",), topks=(16, 24), dense_layers=(), windows=(64,), tokens=64)
    again, said_again = run(quality, model, text, fewer, found=result, kept=len(rows))
    assert (len(said), len(said_again)) == (5, 1)
    assert {row["policy"] for row in again["rows"]} == {*rows, "exact 24"}
    other, said_other = run(quality, model, text, quality.Settings(
        modes=(), topks=(16,), windows=(64,), tokens=128), found=result)  # fmt: skip
    assert len(said_other) == len(other["rows"]) == 1
    quality.draw(again, tmp_path / "q.png")
    assert (tmp_path / "q.png").stat().st_size > 0


@pytest.mark.parametrize("policy", [Policy("dense"), Policy("exact", 16)])
def test_one_pass_scores_every_window_that_begins_there(model: str, text: Path, policy: Policy) -> None:
    lab = Lab(model, max_model_len=128, step_tokens=16, threads=1)
    ids = lab.tokenizer.encode(TEXT)[:128]
    together = quality.score(lab.engine(policy), policy, ids, [32, 64, 128], 2)
    for window, scored in together.items():
        engine = lab.engine(policy)
        assert quality.score(engine, policy, ids[:window], [window], 2) == {window: scored}
        engine.reset_prefix_cache()
        engine.add_request(ids[:window], SamplingParams(max_tokens=0, prompt_logprobs=0))
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        logprobs, half = outputs[-1].prompt_logprobs, window // 2
        expected = -sum(logprobs[i][ids[i]].logprob for i in range(half, window)) / half
        assert scored.loss == pytest.approx(expected, abs=1e-12)
    assert len({scored.loss for scored in together.values()}) == 3


def test_every_window_of_the_text_is_in_one_pass() -> None:
    made = quality.passes([64, 16, 32], 128)
    assert made == [(0, [16, 32, 64]), (16, [16]), (32, [16, 32]), (48, [16]), (64, [16, 32, 64]),
                    (80, [16]), (96, [16, 32]), (112, [16])]  # fmt: skip
    assert quality.passes([64], 40) == [(0, [64])], "one at least"


@pytest.mark.parametrize("windows", [(1,), (64, 96), (2048, 3000)])
def test_windows_are_whole_numbers_of_steps(windows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="whole multiples"):
        quality.step_tokens(windows)
    assert quality.step_tokens((2048, 4096, 8192)) == 512


# ---- the whole engine


def test_prompts_that_are_not_computed_are_the_same_for_every_way(model: str) -> None:
    """A budget that keeps all decodes what dense attention decodes; a small one does not."""
    bench = topk_engine.Bench.open(model, 400, 1)
    said = {}
    for name, options in {"dense": {}, "all": {"attn_topk": 400}, "few": {"attn_topk": 16}}.items():
        engine = bench.engine(400, options)
        topk_engine.start(engine, 300, 40)
        outputs = []
        while engine.has_unfinished():
            outputs = engine.step() or outputs
        (said[name],) = (output.outputs[0].token_ids for output in outputs)
    assert len(said["dense"]) == 40
    assert said["all"] == said["dense"] != said["few"]


def test_the_whole_engine_is_measured_at_every_length(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk, "QUICK", (64,))
    settings = topk.Settings(topk=32, rounds=1, threads=1, model=model, quick=True)
    result = topk.bench_topk(settings, command="bench", output=tmp_path, console=Console(quiet=True))
    assert [(row["keys"], row["way"]) for row in result["engine"]] == [
        (64, way) for way in ("dense_float32", "dense", "exact", "fast", "auto")
    ]
    assert all(row["tok_s"] > 0 for row in result["engine"])
    assert json.loads((tmp_path / "topk.json").read_text())["engine"] == result["engine"]
    assert (tmp_path / "topk.png").stat().st_size > 0


# ---- needle


def test_needle_asks_all_policies_the_same(
    model: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needle, "DEPTHS", 3)
    settings = needle.Settings(modes=("exact",), topks=(32, 2048), lengths=(400,))
    result, said = run(needle, model, text, settings)
    rows = {row["policy"]: row for row in result["rows"]}
    assert {len(row["cells"]) for row in rows.values()} == {3}
    assert {row["asked"] for row in rows.values()} == {6}
    assert rows["exact 2048"]["mean_loss_nats"] == 0, "it keeps all"
    assert rows["exact 2048"]["cells"] == rows["dense"]["cells"]
    assert rows["exact 32"]["mean_loss_nats"] != 0
    assert len(result["goals"]) == 3
    assert needle.table(result).row_count == 3
    more = needle.Settings(modes=("streaming",), topks=(48,), lengths=(400,))
    again, said_again = run(needle, model, text, more, found=result, kept=len(rows))
    assert (len(said), len(said_again)) == (3, 1)
    assert {row["policy"] for row in again["rows"]} == {*rows, "streaming 48"}
    needle.draw(again, tmp_path / "n.png")
    assert (tmp_path / "n.png").stat().st_size > 0


def test_the_log_probability_of_an_answer_is_that_of_a_prompt_with_it(model: str) -> None:
    lab = Lab(model, max_model_len=256, threads=1)
    engine = lab.engine(Policy("dense"))
    ids = lab.tokenizer.encode(TEXT)[:120]
    answer = lab.tokenizer.encode(" marmalade")
    total = needle.logprob_of(engine, ids, answer)
    output = needle._answer(engine, ids + answer, SamplingParams(max_tokens=1, prompt_logprobs=0))
    expected = sum(
        entry[token].logprob for entry, token in zip(output.prompt_logprobs[120:], answer, strict=True)
    )
    assert total == pytest.approx(expected, abs=1e-9)
    assert needle.greedy(engine, ids, 3) == needle.greedy(engine, ids, 4)[:3]


def test_the_needle_lies_at_its_depth_and_the_length_is_what_was_asked() -> None:
    parts = needle.Parts([-1, -2], [([-3, -4], [-5]), ([-6], [-7])])
    for depth in range(10):
        ids = parts.context(range(1000), 107, depth)
        assert len(ids) + 5 == 107
        at = ids.index(-1)
        assert ids[at : at + 2] == [-1, -2]
        assert ids[:at] + ids[at + 2 :] == list(range(100))
        assert at == 100 * depth // 9
