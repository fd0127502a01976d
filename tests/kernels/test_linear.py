"""Linear layers: the numbers, and the law that a row's result depends on nothing but the row."""

from __future__ import annotations

import torch

from octavo.kernels.linear import PackedLinear, StoredMatrix

from .paged import pool


def test_parts_bias_and_residual() -> None:
    torch.manual_seed(0)
    sizes = {"q": 40, "k": 16, "v": 9}
    weights = {name: torch.randn(n, 64) for name, n in sizes.items()}
    layer = PackedLinear(64, sizes, pool(2))
    for name, weight in weights.items():
        layer.pack(name, StoredMatrix.of(weight))
    x, bias, residual = torch.randn(7, 64), torch.randn(65), torch.randn(7, 65)
    want = x.double() @ torch.cat(list(weights.values())).double().T + bias + residual
    assert (layer(x, bias, residual) - want).abs().max() < 1e-4
