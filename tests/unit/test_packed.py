"""Linear layers on packed weights: the same numbers, from a bounded number of row counts."""

import pytest
import torch
import torch.nn.functional as F

from octavo.models import packed
from octavo.models.packed import MOST_ROWS, PackedWeight, can_pack, padded_rows


def test_padding_is_small_and_the_row_counts_are_few():
    counts = {padded_rows(rows) for rows in range(1, MOST_ROWS + 1)}
    assert len(counts) == 29
    for rows in range(1, MOST_ROWS + 1):
        assert rows <= padded_rows(rows) <= max(rows + 31, 8)
        assert padded_rows(padded_rows(rows)) == padded_rows(rows)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 31, 33, 63, 65, 511, 512, 513, 1100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_any_number_of_rows_equals_the_plain_product(rows, with_bias):
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(n, 40, generator=generator) for n in (24, rows))
    bias = torch.randn(24, generator=generator) if with_bias else None
    assert can_pack(weight)
    got = PackedWeight(weight).linear(x, bias)
    assert got.shape == (rows, 24)
    assert got.is_contiguous()
    torch.testing.assert_close(got, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_s16_only_the_bounded_row_counts_reach_onednn(monkeypatch):
    seen = set()
    real = torch.ops.mkldnn._linear_pointwise

    class Spy:
        @staticmethod
        def _linear_pointwise(x, *args):
            seen.add(x.shape[0])
            return real(x, *args)

        _reorder_linear_weight = torch.ops.mkldnn._reorder_linear_weight

    monkeypatch.setattr(packed.torch.ops, "mkldnn", Spy)
    weight = PackedWeight(torch.randn(8, 16))
    for rows in range(1, 1500, 7):
        weight.linear(torch.randn(rows, 16))
    assert len(seen) <= 29
