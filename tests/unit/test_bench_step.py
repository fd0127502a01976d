"""The bench of one stream's step: its parts belong to one step, and nothing is counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoint import write_tiny_model

from octavo.bench import step
from octavo.bench.step import Times


def test_what_is_left_is_outside() -> None:
    assert Times(step=10.0, attention=2.0, linear=5.0).outside == 3.0
    rows = step._row(
        [Times(10.0, 2.0, 5.0), Times(20.0, 4.0, 6.0), Times(30.0, 4.0, 25.0)], 4_000_000_000, 0.0
    )
    assert rows["share_outside"] == pytest.approx(0.3)  # of 0.3, 0.5 and 1 / 30
    assert rows["step_ms"] == 20_000
    assert rows["linear_gb_per_s"] == pytest.approx(4 / 6)


def test_the_parts_of_a_tiny_models_step(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, num_layers=2)
    lines: list[str] = []
    result = step.run(
        str(tmp_path), ["float32", "float16"], context=40, steps=4, threads=1, report=lines.append
    )
    wide, narrow = result["weights"]["float32"], result["weights"]["float16"]
    assert wide["weight_bytes"] == 2 * narrow["weight_bytes"]
    for row in (wide, narrow):
        assert 0 < row["attention_ms"] < row["step_ms"]
        assert row["linear_ms"] < row["step_ms"]
        assert len(row["step_ms_all"]) == 4
    assert [line.partition(":")[0] for line in lines] == ["float32", "float16"]
    assert step.table(result).row_count == 2


def test_unknown_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights are .*, got 'q3'"):
        step.run(str(tmp_path), ["q3"], context=4, steps=1, threads=1, report=print)
