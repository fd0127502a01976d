"""Row kernels: the numbers, and the same bits on every instruction set, length by length."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.layer import NormWeights
from octavo.kernels.native import _native

LENGTHS = [1, 7, 8, 9, 20, 31, 32, 33, 48, 63, 100, 576, 1000]
ISAS = _native.isas()
SPECIAL = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 104.0, -104.0, 3e3, -3e3, 1e20, -1e20])
EXACT = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activate(name: str, gate: torch.Tensor, up: torch.Tensor | None, isa: str) -> torch.Tensor:
    out = torch.empty_like(gate)
    address = 0 if up is None else up.data_ptr()
    _native.activate(
        activation=name, gate=gate.data_ptr(), up=address, n=len(gate), out=out.data_ptr(), isa=isa
    )
    return out


def norm(weights: NormWeights, x: torch.Tensor, isa: str) -> torch.Tensor:
    out = torch.empty_like(x)
    _native.norm(norm=weights.native(), x=x.data_ptr(), n=len(x), out=out.data_ptr(), isa=isa)
    return out


@pytest.mark.parametrize("name", EXACT)
def test_activations_are_right_over_the_whole_range_and_alike_on_every_isa(name: str) -> None:
    x = torch.cat([torch.linspace(-100, 100, 200_003), torch.linspace(-6, 6, 200_003), SPECIAL])
    exact = EXACT[name](x.double())
    results = [activate(name, x, None, isa) for isa in ISAS]
    error = (results[0] - exact).abs() / exact.abs().clamp(min=1e-3)
    assert error.max() < 1e-6, x[error.argmax()]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", EXACT)
def test_what_is_not_finite_stays_so_and_reaches_no_neighbour(name: str) -> None:
    for bad in (float("nan"), float("inf")):
        for isa_name in ISAS:
            x = torch.linspace(-3, 3, 21)
            good = activate(name, x, None, isa_name)
            x[13] = bad
            got = activate(name, x, None, isa_name)
            assert not got[13].isfinite()
            got[13] = good[13]
            assert torch.equal(got, good)


@pytest.mark.parametrize("length", LENGTHS)
def test_gated_rows_of_any_length(length: int) -> None:
    torch.manual_seed(length)
    gate, up = torch.randn(2, length)
    results = [activate("silu", gate, up, isa) for isa in ISAS]
    torch.testing.assert_close(results[0], F.silu(gate) * up, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_norms_of_any_length(length: int, center: bool) -> None:
    torch.manual_seed(length)
    x = torch.randn(length) * 3 + 5  # far from the middle, where a variance by difference would suffer
    weights = NormWeights(torch.randn(length), torch.randn(length) if center else None, 1e-5, center)
    results = [norm(weights, x, isa) for isa in ISAS]
    d = x.double()
    if center:
        assert weights.bias is not None
        want = F.layer_norm(d, (length,), weights.weight.double(), weights.bias.double(), 1e-5)
    else:
        want = F.rms_norm(d, (length,), weights.weight.double(), 1e-5)
    torch.testing.assert_close(results[0].double(), want, rtol=1e-5, atol=2e-5)
    assert all(torch.equal(results[0], other) for other in results[1:])
