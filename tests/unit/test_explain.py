"""The heat map of ``--explain``."""

from __future__ import annotations

from octavo.cli.explain import NOTHING, heat_map, summary
from octavo.request import AttnReadReport, AttnTopkReport


def test_a_sign_is_the_mean_of_its_spans() -> None:
    reads = AttnReadReport(span=16, share=((0.0, 0.0, 1.0, 1.0, 0.3, 0.0), (0.0, 0.04, 0.0, 0.12, 0.0, 0.4)))
    assert heat_map(reads, 6) == [f"{NOTHING}{NOTHING}██▓{NOTHING}", f"{NOTHING}░{NOTHING}▒{NOTHING}▓"]
    assert heat_map(reads, 3) == [f"{NOTHING}█▒", "░▒▓"]
    # However narrow, it has a column, and no line is wider than it may be.
    for columns in range(1, 9):
        lines = heat_map(reads, columns)
        assert len(lines) == 2
        assert len({len(line) for line in lines}) == 1
        assert 1 <= len(lines[0]) <= columns


def test_the_summary_leaves_out_what_was_not_counted() -> None:
    report = AttnTopkReport(attn_topk=4, rows=2, visible_keys=200, kept_keys=8, mean_dropped_mass=0.25)
    assert "kept 4.0% of the keys" in summary(report)
    assert "bytes" not in summary(report)
    told = AttnTopkReport(attn_topk=4, bytes_read=30, dense_bytes=100)
    assert "read 30% of dense attention's bytes" in summary(told)
    assert "kept 100.0%" in summary(told)
