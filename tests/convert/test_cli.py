"""``octavo convert`` and ``octavo bench conversion`` as a user meets them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tiny

from octavo.bench import conversion
from octavo.cli.app import exit_code
from octavo.convert.recover import Recovery

TEXT = " ".join(tiny.WORDS[i * i % 13] for i in range(1200))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.write_encoder(folder, "bert")
    return folder


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> None:
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("octavo:")]
    assert out == ""
    assert "Traceback" not in err
    assert len(lines) == 1, err
    for word in words:
        assert word in lines[0]


def test_json_has_every_step(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    options = ["--compress-rate", "2", "--topk", "8", "--threads", "1", "--json"]
    options += ["--distill", str(text), "--steps", "4", "--window", "16"]
    capsys.readouterr()
    assert exit_code(["convert", str(model), str(tmp_path / "out"), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    names = ["original", "original, top-k", "mean-pooled", "aligned", "aligned+distilled"]
    assert [step["step"] for step in report["steps"]] == names
    assert (report["num_heads"], report["compress_rate"], report["topk"]) == ([6, 3], 2, 8)
    assert report["attention_weights"][0] == 2 * report["attention_weights"][1]
    assert (tmp_path / "out" / "config.json").is_file()


def test_without_a_text_it_says_what_pooling_loses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert exit_code(["convert", str(model), str(tmp_path / "out"), "--method", "mean"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model: 6 heads over 6 K and V heads become 3 over 3 (compress_rate 2")
    assert [line.split(":")[0] for line in lines[2:]] == ["lost by pooling, mean", "lost by pooling, aligned"]


def test_refusals(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    out = str(tmp_path / "out")
    assert exit_code(["convert", str(model), out, "--compress-rate", "4"]) == 1
    refused(capsys, 1, "divide num_heads=6 (1, 2, 3, 6), got 4")
    assert exit_code(["convert", str(model), out, "--compress-rate", "-1"]) == 2
    refused(capsys, 2, "--compress-rate must be a divisor of the heads or auto, got '-1'")
    assert exit_code(["convert", str(model), str(model)]) == 1
    refused(capsys, 1, "is not empty")
    assert exit_code(["convert", str(tmp_path / "none"), out]) == 1
    refused(capsys, 1, "none")
    assert exit_code(["convert", str(model), out, "--method", "sum"]) == 2
    refused(capsys, 2, "aligned, mean")
    assert exit_code(["convert", str(model), out, "--distill", str(tmp_path / "none")]) == 1
    refused(capsys, 1, "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert exit_code(["convert", str(model), out, "--distill", str(tmp_path / "binary")]) == 1
    refused(capsys, 1, "is not UTF-8 text")
    assert exit_code(["convert", str(model), out, "--learning-rate", "nan"]) == 2
    refused(capsys, 2, "--learning-rate must be above 0")
    assert not Path(out).exists()


def test_the_bench_has_a_row_for_each_step_of_each_case(model: Path, tmp_path: Path) -> None:
    decoder = tmp_path / "decoder"
    decoder.mkdir()
    tiny.write_decoder(decoder, "llama-mha")
    text = tmp_path / "text"
    text.write_text(TEXT)
    saved: list[int] = []
    cases = (conversion.Case(str(model), 2, 16, 512), conversion.Case(str(decoder), 3, 16, 512))
    asked: list[str] = []

    def progress(what: str, steps: int) -> Callable[[], None]:
        asked.append(what)
        return lambda: None

    def go(found: dict[str, Any] | None, steps: int = 2) -> dict[str, Any]:
        saved.clear()
        asked.clear()
        return conversion.run(
            text,
            cases=cases,
            recovery=Recovery(steps=steps),
            threads=1,
            found=found,
            progress=progress,
            save=lambda so_far: saved.append(len(so_far["cases"])),
        )

    result = go(None)
    assert saved == [1, 2, 2]
    # What was stopped after a case goes on behind it; another fit is another bench.
    again = go(result | {"cases": result["cases"][:1]})
    assert saved == [2, 2]
    assert again["cases"][0] == result["cases"][0]
    go(result)
    assert asked == []
    go(result, steps=3)
    assert asked.count("align") == 2
    assert str(tmp_path) not in json.dumps(result)
    json.dumps(result)
    assert [case["model"] for case in result["cases"]] == ["model", "decoder"]
    for case, metric in zip(result["cases"], ("cosine", "perplexity"), strict=True):
        assert all(metric in step for step in case["steps"])
        by_name = {step["step"]: step[metric] for step in case["steps"]}
        better = (1 if metric == "cosine" else -1) * (by_name["aligned"] - by_name["mean-pooled"])
        assert case["aligned_no_worse"] is (better >= 0)
    assert conversion.table(result).row_count == sum(len(case["steps"]) for case in result["cases"])
