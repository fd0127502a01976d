"""What a request is told of its top-k attention, against what it must add up to."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoint import write_tiny_model

from octavo import LLM, SamplingParams
from octavo.request import RequestOutput
from octavo.serving.answers import usage
from octavo.serving.metrics import Snapshot, render

LAYERS, HEADS, TOPK = 3, 2, 40
PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(333)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(path, LAYERS)
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), attn_topk=TOPK, dense_layers=(1,), num_blocks=128, num_threads=1)


def answer(llm: LLM, prompt: list[int] = PROMPT, **params: object) -> RequestOutput:
    how = SamplingParams(**{"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "logprobs": 1} | params)
    (output,) = llm.generate([prompt], how, use_tqdm=False)
    return output


def visible(num_keys: int) -> np.ndarray:
    """Keys of each span of 16."""
    return np.diff([*range(0, num_keys, 16), num_keys])


@pytest.mark.parametrize("cached", [False, True])
def test_reads_add_up_to_the_budget(llm: LLM, cached: bool) -> None:
    llm.reset_prefix_cache()
    if cached:
        answer(llm)
    output = answer(llm, attn_explain=True)
    assert bool(output.num_cached_tokens) == cached
    reads = output.attn_reads
    assert reads is not None
    assert (reads.span, len(reads.share)) == (16, LAYERS)
    for layer, share in enumerate(reads.share):
        keys = np.array(share) * visible(len(PROMPT))
        if layer == 1:
            assert share == (1.0,) * len(share)
        else:
            # Shares are rounded to four digits.
            assert keys.sum() == pytest.approx(TOPK, abs=16 * len(share) * 1e-4)
            # The last 20 positions are always kept: 320 to 332 and, of the span before, 313 to 319.
            assert share[-1] == 1.0
            assert share[-2] >= 7 / 16 - 1e-4


def test_several_tokens_are_means_of_each(llm: LLM) -> None:
    """An answer of three tokens reads what three answers of one token read together."""
    whole = answer(llm, max_tokens=3, attn_explain=True)
    read = np.zeros((LAYERS, 21))
    seen = np.zeros(21)
    for done in range(3):
        prompt = PROMPT + whole.outputs[0].token_ids[:done]
        one = answer(llm, prompt, attn_explain=True)
        assert one.attn_reads is not None
        share = np.array(one.attn_reads.share)
        read += share * visible(len(prompt))
        seen += visible(len(prompt))
    assert whole.attn_reads is not None
    np.testing.assert_allclose(np.array(whole.attn_reads.share), read / seen, atol=1e-3)


def test_explaining_changes_no_answer_and_is_there_only_when_asked(llm: LLM) -> None:
    plain, explained = answer(llm, max_tokens=5), answer(llm, max_tokens=5, attn_explain=True)
    assert plain.outputs == explained.outputs
    assert plain.attn_reads is None
    assert answer(llm, attn_explain=True, attn_topk=0).attn_reads is None
    assert answer(llm, attn_explain=True, max_tokens=0).attn_reads is None
    (pair,) = llm.generate(
        [PROMPT], SamplingParams(n=2, max_tokens=2, attn_explain=True, seed=1), use_tqdm=False
    )
    assert pair.attn_reads is not None
    with pytest.raises(ValueError, match="attn_explain must be True or False"):
        SamplingParams(attn_explain=1)  # type: ignore[arg-type]


def test_a_context_no_longer_than_the_budget_is_read_whole(llm: LLM) -> None:
    output = answer(llm, PROMPT[:TOPK], attn_explain=True)
    assert output.attn_reads is not None
    assert set(sum(output.attn_reads.share, ())) == {1.0}


def test_reports_metrics_and_usage_tell_the_same(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.metrics()
    outputs = [answer(llm, max_tokens=4, attn_explain=True), answer(llm, PROMPT[:100], max_tokens=2)]
    reports = [output.attn_topk for output in outputs]
    assert None not in reports
    after = llm.metrics()
    for name in ("rows", "visible_keys", "kept_keys", "bytes_read", "dense_bytes"):
        sum_of = sum(getattr(report, name) for report in reports)
        assert getattr(after.attn_topk, name) - getattr(before.attn_topk, name) == sum_of
    dropped = sum(report.mean_dropped_mass * report.rows for report in reports)
    assert after.attn_topk_dropped_mass - before.attn_topk_dropped_mass == pytest.approx(dropped)
    assert after.attn_topk.worst_dropped_mass >= max(report.worst_dropped_mass for report in reports)
    # Steps of one token: three for the first answer; for the second, whose prompt is cached, two.
    element = HEADS // 2 * 32 * 4 * 2 * (LAYERS - 1)
    assert reports[0].dense_bytes == element * sum(len(PROMPT) + i for i in (1, 2, 3))
    assert outputs[1].num_cached_tokens == 99
    assert reports[1].dense_bytes == element * (100 + 101)
    assert 0 < reports[0].bytes_read < reports[0].dense_bytes
    used = json.loads(json.dumps(usage(outputs)))
    assert used["attn_topk"]["kept_keys"] == sum(report.kept_keys for report in reports)
    assert len(used["attn_reads"]) == 1
    assert "attn_topk" not in usage([answer(llm, attn_topk=0)])


def test_prometheus_reads_the_same(llm: LLM) -> None:
    answer(llm)
    engine = llm.engine
    shown = render(
        Snapshot(engine.metrics, engine.scheduler_stats, num_open=0, draining=False), "tiny"
    ).decode()
    totals = llm.metrics().attn_topk
    expected = {
        "rows_total": totals.rows,
        "visible_keys_total": totals.visible_keys,
        "kept_keys_total": totals.kept_keys,
        "bytes_read_total": totals.bytes_read,
        "dense_bytes_total": totals.dense_bytes,
        "dropped_mass_total": totals.mean_dropped_mass * totals.rows,
        "worst_dropped_mass": totals.worst_dropped_mass,
    }
    for name, value in expected.items():
        found = re.search(rf'^octavo:attn_topk_{name}{{model_name="tiny"}} (\S+)$', shown, re.MULTILINE)
        assert found is not None, name
        assert float(found[1]) == pytest.approx(value)
        assert value > 0


def octavo(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from octavo.cli import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_run_explains_on_the_terminal_and_as_png(checkpoint: Path, tmp_path: Path) -> None:
    png = tmp_path / "reads.png"
    made = octavo(
        "run", str(checkpoint), "--prompt", "a long tale " * 30, "--raw", "--max-tokens", "3",
        "--attn-topk", "32", "--explain", "--plot", str(png), "--json",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    lines = made.stderr.splitlines()
    assert sum(line.startswith("layer ") for line in lines) == LAYERS
    assert any("dropped mass at most" in line for line in lines)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(made.stdout)["attn_reads"]["share"]) == LAYERS


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--explain",), "--explain needs --attn-topk"),
        (("--plot", "x.png", "--attn-topk", "8"), "--plot needs --explain"),
        (("--attn-topk", "8", "--explain", "--plot", "x.jpg"), "ends in .png"),
        (("--attn-topk", "8", "--explain", "--plot", "/no/such/x.png"), "there is no folder"),
    ],
)
def test_what_cannot_be_explained_is_refused_first(args: tuple[str, ...], said: str) -> None:
    made = octavo("run", "no-such-model", "--prompt", "a", *args)
    assert made.returncode in (1, 2)
    assert said in made.stderr
    assert len(made.stderr.strip().splitlines()) == 1
