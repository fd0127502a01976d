"""The sections of the history bench on a tiny model: what they count, against what it must be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_tiny_model

from octavo.bench import (
    history,
    history_host,
    history_memory,
    history_pressure,
    history_quality,
    history_report,
    history_run,
    topk_needle,
)
from octavo.cli.app import exit_code
from octavo.engine.build import read_config, read_tokenizer
from octavo.weights.load import open_checkpoint

TEXT = "".join(f"Whale {i * i % 97} swam by ship {i}; nobody saw number {i * 7 % 31}. " for i in range(90))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(path, 2)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Chats and a text."""
    folder = tmp_path_factory.mktemp("texts")
    chats = [[f"So {i} said {j}: the whale is {i * j % 13}." for j in range(6)] for i in range(200)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "whales.txt").write_text(TEXT)
    return folder / "chats.jsonl", folder / "whales.txt"


def settings(model: Path, files: tuple[Path, Path], *sections: str) -> history_run.Settings:
    server = ("--threads=1",)
    return history_run.Settings(
        model=str(model),
        data=files[0],
        text=files[1],
        sections=sections,
        threads=1,
        memory=history_run.Memory(tokens=2048, together_tokens=1024, together_memory="1MiB"),
        turns=history_run.Turns(lengths=(1024, 2048), long=(1024, 2048), rounds=2),
        quality=history_quality.Settings(windows=(1024, 2048), tokens=2048, lengths=(1024,)),
        restart=history.Settings(
            model=str(model),
            conversations=2,
            tokens=600,
            kills=1,
            options=(*server, "--kv-cache-memory=8MiB"),
        ),
        pressure=history_pressure.Settings(
            model=str(model), minutes=0.05, conversations=8, tokens=1024, options=server, history="compact"
        ),
    )


def run(wanted: history_run.Settings, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    saved: list[dict[str, Any]] = []
    result = history_run.run(
        wanted, command="octavo bench history", earlier=earlier or {}, report=str, save=saved.append
    )
    assert saved[-1] == result
    assert history_run.faults(result) == []
    return json.loads(json.dumps(result))


def test_turns(model: Path, files: tuple[Path, Path], tmp_path: Path):
    result = run(settings(model, files, "turns"), {"kills": {"kept": 1}, "turns": {"old": 1}})
    assert set(result) == {"bench", "kills", "turns"}
    assert "old" not in result["turns"]
    section = result["turns"]
    next_turn = section["next_turn"]
    assert [row["way"] for row in next_turn["rows"]] == [name for name in history_memory.WAYS for _ in "ab"]
    assert next_turn["missing"] == {}
    for row in next_turn["rows"]:
        assert row["tokens"] - 300 < row["prompt_tokens"] <= row["tokens"] - next_turn["answer_tokens"]
        # The question is new, the history is not.
        assert row["cached_tokens"] > row["prompt_tokens"] - 200
        assert len(row["all"]["tokens_per_s"]) == 2
    dense = {name for name, way in history_memory.WAYS.items() if not way.attn_topk}
    by_noise = {row["way"] for row in section["next_turn_random_model"]["rows"]}
    assert by_noise == dense - {history_memory.BUDGET}
    by = {(row["way"], row["tokens"]): row["bytes_per_token"] for row in next_turn["rows"]}
    assert by["float32", 2048] == 2 * by["float16", 2048] == 2 * 2 * 32 * 2 * 2
    assert (
        by["compact-int4", 2048] < by["compact-int8", 2048] < by["compact-int8", 1024] < by["float16", 1024]
    )
    assert history_report.draw(result, tmp_path / "h.png")
    assert (tmp_path / "h.png").stat().st_size > 0
    assert any("first token after" in line for line in history_report.lines({"turns": section}))


def test_memory(model: Path, files: tuple[Path, Path]):
    result = run(settings(model, files, "memory"))
    section = result["memory"]
    sizes = {row["way"]: row for row in section["sizes"]}
    assert sizes["float32"]["stored_bytes"] == 2 * sizes["float16"]["stored_bytes"] == 2 * 2 * 2 * 32 * 2
    assert sizes["float16"]["conversations"] == history_memory.POOL_BYTES / (2 * 2 * 32 * 2 * 2048)
    assert len(section["goals"]) == 2 + 4
    for row in section["together"]:
        assert row["ran_at_once"] == row["conversations"] >= 2
    assert len(history_report.lines(result)) == 3 + 6


def test_conversations_that_do_not_fit_are_no_fault_of_the_bench(model: Path):
    with pytest.raises(ValueError, match="kv_cache_memory of 1000 bytes holds no block"):
        history_memory.run_together("float16", load(model), [5] * 100, tokens=64, memory="1kB", threads=1)


def load(model: Path):
    from octavo.config import EngineConfig
    from octavo.engine import build

    return build.load(open_checkpoint(model), EngineConfig(model=str(model), num_threads=1))


def test_host(model: Path, files: tuple[Path, Path]):
    result = run(settings(model, files, "host"))
    assert {row["tokens"] for row in result["host"]["rows"]} == {1024, 2048}
    assert len(history_report.lines(result)) == len(result["host"]["goals"]) == 4


def test_the_host_counts_a_step_and_an_admission_within_a_turn(model: Path):
    found = history_host.measure((256, 2048), read_tokenizer(open_checkpoint(model)), TEXT, rounds=3)
    rows = {(row["history"], row["tokens"]): row for row in found["rows"]}
    assert set(rows) == {(kind, n) for kind in ("exact", "compact") for n in (256, 2048)}
    for row in rows.values():
        assert 0 < row["step_us"] < row["turn_us"]
        assert row["admission_us"] < row["turn_us"]


def test_quality(model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(topk_needle, "DEPTHS", 2)
    result = run(settings(model, files, "quality"))
    section = result["quality"]
    changes = {(r["policy"], r["window"]): r["change_percent"] for r in section["perplexity"]["rows"]}
    assert changes["dense", 1024] == changes["dense", 2048] == 0
    for name in history_quality.GOALS:
        assert 0 < abs(changes[name, 2048]) < 0.5, "it is read, and near"
    assert [len(goal) for goal in section["perplexity"]["goals"]] == [3, 3]
    needle = {row["policy"]: row for row in section["needle"]["rows"]}
    assert {row["asked"] for row in needle.values()} == {4}
    assert 0 < abs(needle["compact-int4"]["mean_loss_nats"]) < 0.1
    assert len(section["needle"]["goals"]) == 1 + 2 * 2
    # What is known is not measured again.
    said: list[str] = []
    again = history_run.run(
        settings(model, files, "quality"), command="", earlier=result, report=said.append, save=str
    )
    assert said == []
    assert json.loads(json.dumps(again["quality"]["perplexity"]["rows"])) == section["perplexity"]["rows"]


def test_goals_are_of_the_worst_window():
    def row(policy: str, change: float) -> dict[str, Any]:
        return {"mode": policy, "policy": policy, "change_percent": change}

    rows = [row(name, change) for name in history_quality.GOALS for change in (-0.1, 0.5)]
    assert [goal["met"] for goal in history_quality.perplexity_goals(rows)] == [False, True]


@pytest.mark.slow
def test_pressure(model: Path, files: tuple[Path, Path]):
    section = run(settings(model, files, "pressure"))["pressure"]
    assert section["answers_compared"] > 0
    assert section["evictions"] > 0, "the pool was large enough for all"
    assert section["cached_tokens"] <= section["prompt_tokens"]


def test_a_pool_of_a_quarter(model: Path):
    wanted = replace(history_pressure.Settings(model=str(model)), tokens=1024)
    config = read_config(open_checkpoint(model))
    exact = history_pressure.small_pool(wanted, config)
    assert exact == wanted.conversations / 4 * 1024 * 2 * 2 * 32 * 4
    assert history_pressure.small_pool(replace(wanted, history="compact"), config) < exact


@pytest.mark.slow
def test_an_answer_that_differs_is_a_fault(
    model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    asked = iter(range(10**6))
    real = history.scored
    monkeypatch.setattr(history_pressure, "scored", lambda reply: [*real(reply), ("x", float(next(asked)))])
    wanted = settings(model, files, "pressure")
    result = history_run.run(wanted, command="", earlier={}, report=str, save=str)
    faults = history_run.faults(result)
    assert len(faults) == result["pressure"]["answers_compared"] > 0
    assert all("is not answered as with a large pool" in fault for fault in faults)


@pytest.mark.slow
@pytest.mark.parametrize("sections", ["restart", "kills"])
def test_a_process_that_is_killed(model: Path, files: tuple[Path, Path], sections: str):
    section = run(settings(model, files, sections))[sections]
    if sections == "restart":
        assert section["same_answers"] == section["conversations"] == 2
        assert (
            section["from_disk"]["disk_cached_tokens"] > section["computed_again"]["disk_cached_tokens"] == 0
        )
    else:
        assert (section["kills"], section["opened"], section["answers_compared"]) == (1, 1, 2)


def test_the_command_refuses_what_it_cannot_do(
    tmp_path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
):
    command = ["bench", "history", "--data", str(files[0]), "--out", str(tmp_path)]
    assert exit_code([*command, "--sections", "turns,naps"]) == 2
    assert "'naps' is not a section; these are: memory, host, turns, quality" in capsys.readouterr().err
    (tmp_path / "history.json").write_text("[]")
    assert exit_code([*command, "--sections", "kills"]) == 1
    assert "is no result of bench history" in capsys.readouterr().err
