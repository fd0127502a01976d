"""The bench of C2PSA: sections in one JSON, memory from processes of their own, fits that say so."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from octavo.bench import c2psa, c2psa_memory, c2psa_report
from octavo.bench.c2psa_variants import QUICK, SECTIONS, C2psaSettings, variants
from octavo.cli.app import exit_code
from octavo.nn import MultiHeadAttention

TINY = C2psaSettings(sections=("heads",), threads=1, memory_limit=1 << 30, rounds=1, **QUICK)


@pytest.mark.slow  # a process for each peak that is measured
def test_the_command_adds_sections_to_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "c2psa", "--quick", "--threads", "1", "--rounds", "1", "--out", str(tmp_path)]
    assert exit_code([*words, "--sections", "batch-memory"]) == 0
    first = json.loads((tmp_path / "c2psa.json").read_text())
    assert exit_code([*words, "--sections", "times,bert"]) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "c2psa.json").read_text())
    assert set(result["sections"]) == set(SECTIONS) - {"length-memory"}
    assert result["sections"]["batch-memory"] == first["sections"]["batch-memory"]
    assert (tmp_path / "c2psa.png").stat().st_size > 10_000
    assert "c2psa r=4 k=4: Q, K and V have exactly 75% fewer parameters: 0.250, met" in shown
    names = [variant.name for variant in variants(TINY)]
    sizes = {"batch-time": 3, "length-time": 4, "batch-memory": 3}
    for section, count in sizes.items():
        found = [row["variant"] for row in result["sections"][section]["rows"]]
        assert sorted(found) == sorted(names * count)
    for row in result["sections"]["heads"]["rows"]:
        assert row["one_by_one_ms"] == pytest.approx(sum(row["heads_ms"]))
        assert len(row["heads_ms"]) == (1 if row["variant"].startswith("c2psa r=4") else 4)
    assert [row["batch"] for row in result["sections"]["bert"]["rows"]] == [1, 2, 4] * 4
    assert exit_code([*words, "--sections", "speed"]) == 1
    assert capsys.readouterr().err.endswith(f"must be some of {', '.join(SECTIONS)}, got speed\n")


def test_peaks_are_those_of_the_tensors_that_there_must_be() -> None:
    """Scores and weights of materialised attention, and the whole of what the pass makes beside them."""
    variant = variants(TINY)[0]
    peak = c2psa_memory.in_own_process(partial(c2psa_memory.block_bytes, TINY, variant, (2, 1024), False))
    scores = 2 * 4 * 1024 * 1024 * 4
    assert 2 * scores < peak < 4 * scores


def test_what_does_not_fit_is_fitted_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c2psa_memory, "in_own_process", lambda job: job())
    ran = []

    def job(n: int) -> int:
        ran.append(n)
        return 3 * n * n + 5 * n + 7

    def measure(numbers: list[int], degree: int, limit: int) -> list[tuple[int, bool]]:
        return c2psa_memory.measure(numbers, [partial(job, n) for n in numbers], degree, limit)

    found = measure([10, 20, 40, 80, 160], 2, 10_000)
    assert ran == [10, 20, 40]
    assert [fitted for _, fitted in found] == [False, False, False, True, True]
    for n, (count, _) in zip([10, 20, 40, 80, 160], found, strict=True):
        assert count == pytest.approx(3 * n * n + 5 * n + 7, abs=1)
    with pytest.raises(ValueError, match=r"only 2 of 3 sizes fit into 0.0 GiB: too few for a fit"):
        measure([10, 20, 40], 2, 2_000)


def test_a_process_that_the_system_ends_ends_the_measuring() -> None:
    numbers = [1, 2, 3]
    jobs = [partial(int, "100"), partial(int, "200"), partial(os.abort)]
    assert c2psa_memory.measure(numbers, jobs, 1, 1 << 30) == [(100, False), (200, False), (300, True)]


def test_heads_alone_are_what_all_together_are() -> None:
    x = torch.randn(2, 9, 64)
    for variant in variants(TINY):
        module = variant.make(TINY.shape, 9).eval() if variant.projected_len == 0 else None
        if module is None or module.num_kv_heads != module.num_heads:
            continue
        each = [c2psa.read(module, x, head, 1) for head in range(module.num_heads)]
        together = c2psa.read(module, x, 0, module.num_heads)
        torch.testing.assert_close(torch.cat(each, 1), together)
        merged = module.out_proj(together.transpose(1, 2).flatten(2))
        torch.testing.assert_close(merged, module(x))
        assert isinstance(module, MultiHeadAttention) or variant.kind == "c2psa"


def test_goals_say_what_is_missed() -> None:
    names = ["mha, scores kept", "mha, sdpa", "linformer 128", "c2psa r=4 k=32", "c2psa r=4 k=64"]
    ours = names[-1]
    ms = dict(zip(names, [9.0, 5.0, 4.0, 1.0, 4.5], strict=True))
    memory = dict(zip(names, [600.0, 300.0, 300.0, 50.0, 101.0], strict=True))
    result = {
        "parameters": {name: {"qkv": 100 if "r=4" in name else 400, "all": 0} for name in names},
        "sections": {
            "length-time": {
                "rows": [
                    {"variant": name, "batch": 1, "length": length, "ms": ms[name]}
                    for length in (512, 4096)
                    for name in names
                ]
            },
            "batch-memory": {
                "rows": [
                    {"variant": name, "batch": 32, "length": 512, "training_bytes": memory[name]}
                    for name in names
                ]
            },
            "length-memory": {
                "rows": [
                    {
                        "variant": ours,
                        "batch": 1,
                        "length": n,
                        "forward_bytes": 8 * n,
                        "training_bytes": n * n,
                    }
                    for n in (1, 2)
                ]
            },
        },
    }
    found = [(goal["found"], goal["met"]) for goal in c2psa_report.goals(result)]
    assert found == [
        (0.25, True),
        (101 / 600, False),
        (4.5 / 4.0, False),
        (4.5 / 4.0, False),
        (0.0, True),
        (1.0, False),
    ]
