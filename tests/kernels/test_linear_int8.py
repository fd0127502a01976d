"""Products with activations in 8 bits: the numbers of the reference, whatever rows, threads and ISA."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import linear_int8, native
from octavo.kernels.linear import PackedLinear, int8_types, weight_formats

from .paged import pool
from .stored import SCALES, bits, edge_matrix, layer_of, multiply, random_matrix, values_of

TYPES = tuple(int8_types())
#: Around every size of a register tile, 4 and 8.
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 25)
ISAS = tuple(isa for isa in ("portable", "avx2", "avx512") if native.runs(isa))


def rows_of(count: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Blocks of very different sizes, some of them all zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs // 32, 32, generator=generator)
    sizes = torch.randn(count, inputs // 32, 1, generator=generator).exp()
    sizes[torch.rand(sizes.shape, generator=generator) < 0.1] = 0
    return (x * sizes).reshape(count, inputs)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To the bit; NaN is NaN, whatever its sign."""
    return torch.equal(bits(got.nan_to_num(7.0)), bits(want.nan_to_num(7.0)))


def test_the_types_that_have_a_kernel() -> None:
    assert TYPES == ("q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q6_k")
    with pytest.raises(ValueError, match=r"activations in int8 need q8_0, q4_0, .*, q6_k, got f32"):
        linear_int8.fields(random_matrix("f32", 2, 32))


@pytest.mark.parametrize("kind", TYPES)
def test_fields_are_those_of_the_format(kind: str) -> None:
    for stored in (random_matrix(kind, 20, 512), edge_matrix(kind, 20, 512)):
        values, scales, offsets = linear_int8.fields(stored)
        weights = scales.repeat_interleave(32 // scales.shape[2], 2) * values
        if offsets is not None:
            weights = weights + offsets[..., None]
        assert torch.equal(weights.reshape(20, 512), values_of(stored))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_isa_and_number_of_rows_gives_the_bits_of_the_reference(kind: str, isa: str) -> None:
    inputs = 768 if kind.endswith("_k") else 672
    stored = random_matrix(kind, 70, inputs)
    layer = layer_of(stored, threads=2)
    x = rows_of(max(ROWS), inputs)
    want = linear_int8.product(x, stored)
    for rows in ROWS:
        assert same(multiply(layer, x[:rows], isa, int8=True), want[:rows]), rows
        assert same(multiply(layer, x[-rows:], isa, int8=True), want[-rows:]), rows


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_sums_are_exact(kind: str, isa: str) -> None:
    """All fields and all values at their ends: where 16 bits would not hold, a kernel would saturate."""
    inputs = 512
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        stored = random_matrix(kind, 16, inputs)
        blocks = stored.data.view(-1, weight_formats()[kind].block_bytes)
        for at in range(blocks.shape[1]):
            if not any(scale <= at < scale + 2 for scale in SCALES[kind]):
                blocks[:, at] = byte
        for x in (
            torch.ones(5, inputs),
            -torch.ones(5, inputs),
            torch.ones(5, inputs) * (1 - 2 * (torch.arange(inputs) % 2)),
        ):
            assert same(multiply(layer_of(stored), x, isa, int8=True), linear_int8.product(x, stored))


@pytest.mark.parametrize("isa", ISAS)
def test_values_at_the_borders(isa: str) -> None:
    stored = random_matrix("q4_1", 16, 64)
    halves = torch.arange(32) - 127.0  # ties, once scaled
    x = torch.zeros(9, 64)
    x[0, :32], x[1, 32:] = halves, halves / 2 - 0.25
    x[2, 5], x[3, 40], x[4, 0] = torch.nan, torch.inf, -torch.inf
    x[5] = 2.0**-119
    x[6] = 2.0**-118
    x[7, ::2], x[7, 1::2] = 3e36, -3e36
    x[8, 3] = 1e-45
    got, want = multiply(layer_of(stored), x, isa, int8=True), linear_int8.product(x, stored)
    assert same(got, want)
    assert got[2:5].isnan().all()
    assert got[[0, 1, 6, 7]].isfinite().all()
    assert (got[[5, 8]] == 0).all()


def test_rounding_is_to_the_nearest_ties_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.4999, 0.5001, *[0.0] * 24]])
    values, scales = linear_int8.quantize(x)
    assert values[0, 0, :8].tolist() == [127, 0, 2, 2, 0, -2, 0, 1]
    assert scales.tolist() == [[1.0]]


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_neither_threads_nor_row_blocks_matter(kind: str) -> None:
    """Rows past one block of x: 4096 inputs are blocks of 93 rows at most."""
    stored = random_matrix(kind, 40, 4096)
    x = rows_of(130, 4096)
    alone = torch.cat([multiply(layer_of(stored), x[r : r + 1], "auto", int8=True) for r in range(130)])
    for threads in (1, 3):
        layer = PackedLinear(4096, {"w": 40}, pool(threads), int8=True)
        layer.pack("w", stored)
        assert same(layer(x), alone)


@pytest.mark.parametrize("kind", TYPES)
def test_the_error_is_that_of_rounding_to_127_steps(kind: str) -> None:
    """Each value is off by at most half a step, 1/254 of its block's largest."""
    stored = random_matrix(kind, 64, 768)
    x = rows_of(20, 768)
    exact = x.double() @ values_of(stored).double().T
    blocks = x.view(20, -1, 32)
    step = (blocks.abs().amax(-1, keepdim=True) / 127).expand(blocks.shape).reshape(20, -1)
    bound = step.double() @ values_of(stored).abs().double().T / 2
    error = (multiply(layer_of(stored), x, "auto", int8=True) - exact).abs()
    assert (error <= bound * (1 + 1e-4)).all()
    # Roundings do not add up: a wrong value of one in 768 could hide under the bound.
    assert error.norm() / exact.norm() < 0.012


def test_bias_residual_parts_and_rows_that_lie_apart() -> None:
    torch.manual_seed(0)
    parts = [random_matrix(kind, 21, 256, seed=i) for i, kind in enumerate(TYPES)]
    layer = layer_of(*parts, threads=2)
    for rows in (1, 5, 30):
        wide = torch.randn(rows, 300)
        x, bias, residual = wide[:, 11:267], torch.randn(126), torch.randn(rows, 126)
        want = torch.cat([linear_int8.product(x, part) for part in parts], 1) + bias + residual
        got = multiply(layer, x, "auto", bias, residual=residual, out=residual, int8=True)
        assert same(got, want)


def test_a_product_with_a_part_that_has_no_kernel_keeps_float32() -> None:
    x = rows_of(9, 256)
    layer = layer_of(random_matrix("q8_0", 20, 256), random_matrix("f16", 20, 256))
    assert same(multiply(layer, x, "auto", int8=True), multiply(layer, x, "auto"))
    alone = layer_of(random_matrix("q8_0", 20, 256))
    assert not same(multiply(alone, x, "auto", int8=True), multiply(alone, x, "auto"))
