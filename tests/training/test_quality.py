"""The quality bench: alike for all, goes on where it stopped, and its numbers follow from its runs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import tiny_encoder

from octavo.bench import quality
from octavo.cli.app import exit_code

TINY = quality.QualitySettings(
    steps=2,
    seeds=2,
    batch_size=8,
    rates=(1, 2),
    topks=(2, 3),
    projected_len=4,
    max_tokens=12,
    recovery_steps=2,
)
NAMES = ["mha", "linformer", "c2psa r=1 k=2", "c2psa r=1 k=3", "c2psa r=2 k=2", "c2psa r=2 k=3"]


def write_rows(folder: Path, count: int = 40) -> Path:
    file = folder / "rows.tsv"
    lines = [f"{example.label}\t{example.text}" for example in tiny_encoder.examples(count)]
    file.write_text("\n".join(["label\ttext", *lines]) + "\n")
    return file


def go(model: Path, rows: Path, found: dict[str, Any] | None = None, saves: list[str] | None = None) -> Any:
    saved = [] if saves is None else saves
    return quality.run(
        str(model),
        rows,
        TINY,
        found=found,
        report=lambda _: None,
        save=lambda so_far: saved.append(json.dumps(so_far)),
    )


def test_every_attention_with_every_seed_once_and_on_from_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = tiny_encoder.write_encoder(tmp_path / "model"), write_rows(tmp_path)
    saves: list[str] = []
    result = go(model, rows, saves=saves)
    assert [(run["seed"], run["variant"]) for run in result["runs"]] == [
        (s, n) for s in (0, 1) for n in NAMES
    ]
    assert [json.loads(saved)["complete"] for saved in saves] == [False] * 12 + [True]
    assert (result["model"], result["data"], result["rows"]) == ("model", "rows.tsv", 40)
    parameters = {name: row["attention_parameters"] for name, row in result["summary"].items()}
    assert parameters["mha"] == parameters["c2psa r=1 k=2"] == 2 * 4 * (32 * 32 + 32)
    assert parameters["c2psa r=2 k=2"] == 2 * (3 * (16 * 32 + 16) + 16 * 32 + 32)
    assert parameters["linformer"] == parameters["mha"] + 2 * 2 * 4 * 24
    # What was saved after 7 runs is enough to do only the rest, to the same result.
    ran: list[tuple[str, int]] = []
    run_one = quality._run_one

    def counted(*args: Any) -> dict[str, Any]:
        ran.append((args[3].name, args[4]))
        return run_one(*args)

    monkeypatch.setattr(quality, "_run_one", counted)
    again = go(model, rows, found=json.loads(saves[6]))
    assert ran == [(name, 1) for name in NAMES[1:]]
    for old, new in zip(result["runs"], again["runs"], strict=True):
        assert {k: v for k, v in old.items() if k != "seconds"} == {
            k: v for k, v in new.items() if k != "seconds"
        }
    # Other rows are another bench.
    ran.clear()
    go(model, write_rows(tmp_path, 50), found=result)
    assert len(ran) == 12


def test_the_summary_and_the_goals_follow_from_the_runs() -> None:
    told = quality.QualitySettings(seeds=3, rates=(1, 4), topks=(8, 32))
    base = {"mha": 0.85, "linformer": 0.83, "c2psa r=1 k=8": 0.84, "c2psa r=1 k=32": 0.849}
    base |= {"c2psa r=4 k=8": 0.80, "c2psa r=4 k=32": 0.82}
    hard = [0.0, 0.02, -0.01]  # how hard a seed's split is, for all alike
    runs = [
        {"variant": name, "seed": seed, "accuracy": value + hard[seed], "attention_parameters": 1}
        for name, value in base.items()
        for seed in range(3)
    ]
    found = quality.summary(runs, told)
    for name, value in base.items():
        assert found[name]["mean"] == pytest.approx(100 * (value + statistics.fmean(hard)))
        assert found[name]["stdev"] == pytest.approx(100 * statistics.stdev(hard))
        assert found[name]["change"] == pytest.approx(100 * (value - base["mha"]))
        assert found[name]["change_stderr"] == pytest.approx(0.0, abs=1e-9)
    goals = {goal["goal"]: (round(goal["found"], 6), goal["met"]) for goal in quality.goals(found, told)}
    assert goals == {
        "c2psa r=1 k=32 loses at most 0.3 points": (0.1, True),
        "c2psa r=4 k=32 loses at most 1.5 points": (3.0, False),
        "c2psa r=4 k=32 is not below linformer": (-1.0, False),
    }


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows = tiny_encoder.write_encoder(tmp_path / "model"), write_rows(tmp_path)
    out = tmp_path / "results" / "quality.json"
    words = ["bench", "quality", "--data", str(rows), "--model", str(model), "--out", str(out)]
    words += ["--projected-len", "4"]
    assert (
        exit_code([*words, "--steps", "1", "--seeds", "1", "--rates", "1", "--topks", "2", "--threads", "1"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "c2psa r=1 k=2 loses at most 0.3 points" in shown
    result = json.loads(out.read_text())
    assert result["complete"]
    assert str(tmp_path) not in out.read_text()
    assert exit_code([*words, "--rates", "1,3"]) == 1
    assert capsys.readouterr().err.startswith("octavo: compress_rate must be 'auto' or divide num_heads=4")
    assert exit_code([*words, "--rates", "one"]) == 1
    assert capsys.readouterr().err == "octavo: expected whole numbers separated by commas, got 'one'\n"
