"""Linear layers: the numbers, and the law that a row's result depends on nothing but the row.

The law is of bits: every storage type gives those of its expanded float32 weight, whatever the rows, the
threads and the instruction set.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from octavo.bench.linear import bench_linear
from octavo.kernels import native
from octavo.kernels.linear import PackedLinear, StoredMatrix, WeightMemory, weight_formats
from octavo.kernels.native import _native

from .paged import pool
from .stored import SCALES, TYPES, bits, edge_matrix, layer_of, multiply, random_matrix, values_of

#: Rows around every size of a register tile, and of the border between the two ways through.
ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25)
ISAS = tuple(isa for isa in ("portable", "avx2", "avx512") if native.runs(isa))


def expanded(layer: PackedLinear) -> torch.Tensor:
    """All weights ``[outputs, inputs]`` as the kernels see them."""
    rows = []
    for weight in layer.weights:
        out = torch.full((weight.outputs, weight.inputs), torch.nan)
        for row in range(weight.outputs):
            weight.expand_row(row, out[row].data_ptr())
        rows.append(out)
    return torch.cat(rows)


def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The law's definition, a step at a time.

    A product of two float32 is exact in float64. The sum is rounded twice, to float64 and to float32, where a
    fused multiply-add rounds once; that differs once in 2^29 steps, and in none of those that are tested.
    """
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(x.shape[1]):
        sums = (x[:, k, None].double() * weight[None, :, k].double() + sums.double()).float()
    return sums


def test_parts_bias_and_residual() -> None:
    torch.manual_seed(0)
    sizes = {"q": 40, "k": 16, "v": 9}
    weights = {name: torch.randn(n, 64) for name, n in sizes.items()}
    layer = PackedLinear(64, sizes, pool(2))
    for name, weight in weights.items():
        layer.pack(name, StoredMatrix.of(weight))
    for rows in (1, 7, 20):
        x, bias, residual = torch.randn(rows, 64), torch.randn(65), torch.randn(rows, 65)
        want = x.double() @ torch.cat(list(weights.values())).double().T + bias + residual
        assert (layer(x, bias, residual) - want).abs().max() < 1e-4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 4, 14])
def test_an_output_is_one_chain_of_fused_multiply_adds(rows: int, isa: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 320), torch.randn(21, 320)
    layer = layer_of(StoredMatrix.of(weight))
    assert torch.equal(bits(multiply(layer, x, isa)), bits(chain(x, weight)))


@pytest.mark.parametrize("kind", TYPES)
def test_weights_are_those_of_the_format(kind: str) -> None:
    inputs = 512
    for stored in (
        random_matrix(kind, 35, inputs),
        *([edge_matrix(kind, 35, inputs)] if kind in SCALES else []),
    ):
        assert torch.equal(expanded(layer_of(stored)), values_of(stored))  # -0 equals +0


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_type_and_isa_gives_the_bits_of_its_float32_weight(kind: str, isa: str) -> None:
    torch.manual_seed(0)
    inputs = 768 if kind.endswith("_k") else 672
    layer = layer_of(random_matrix(kind, 70, inputs), random_matrix(kind, 21, inputs, seed=1), threads=2)
    plain = layer_of(StoredMatrix.of(expanded(layer)))
    x, bias = torch.randn(max(ROWS), inputs), torch.randn(91)
    want = torch.cat([multiply(plain, x[r : r + 1], "portable", bias) for r in range(max(ROWS))])
    for rows in ROWS:
        assert torch.equal(bits(multiply(layer, x[:rows], isa, bias)), bits(want[:rows])), rows


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1), (17, 3), (16, 33), (5, 301)])
def test_plain_types_take_any_shape(kind: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    stored = random_matrix(kind, *shape)
    layer = layer_of(stored)
    for rows in (1, 3, 13):
        x = torch.randn(rows, shape[1])
        want = bits(chain(x, values_of(stored)))
        for isa in ISAS:
            assert torch.equal(bits(multiply(layer, x, isa)), want)


@pytest.mark.parametrize("kind", ["f32", "q4_1"])
def test_neither_threads_nor_row_blocks_matter(kind: str) -> None:
    """Rows past one block of x: 2560 inputs are blocks of 51 rows."""
    torch.manual_seed(0)
    stored = random_matrix(kind, 150, 2560)
    x = torch.randn(110, 2560)
    want = torch.cat([layer_of(stored)(x[r : r + 1]) for r in range(110)])
    for threads in (1, 2, 3, 13):  # more threads than panels: some have none of their own
        layer = layer_of(stored, threads=threads)
        for rows in (1, 8, 110):
            assert torch.equal(bits(layer(x[:rows])), bits(want[:rows]))


def test_weights_of_one_memory_keep_apart_and_outlive_it() -> None:
    """Packed one after the other, in sizes that fill huge pages and in sizes that do not."""
    torch.manual_seed(0)
    memory = WeightMemory()
    parts = [random_matrix("f32", outputs, 512, seed=outputs) for outputs in (3, 2100, 16, 40, 17000, 5)]
    layers = []
    for part in parts:
        layers.append(PackedLinear(512, {"w": part.outputs}, pool(2), memory=memory))
        layers[-1].pack("w", part)
    del memory
    gone = layers.pop(1)
    del gone
    x = torch.randn(2, 512)
    for layer, part in zip(layers, [parts[0], *parts[2:]], strict=True):
        assert torch.equal(bits(layer(x)), bits(layer_of(part)(x)))


def test_parts_of_different_types() -> None:
    torch.manual_seed(0)
    parts = [random_matrix(kind, 20, 256, seed=i) for i, kind in enumerate(TYPES)]
    x = torch.randn(14, 256)
    together = layer_of(*parts, threads=2)
    for rows in (1, 14):
        apart = torch.cat([layer_of(part)(x[:rows]) for part in parts], 1)
        assert torch.equal(bits(together(x[:rows])), bits(apart))


def test_rows_may_lie_apart_and_the_residual_may_be_the_result() -> None:
    torch.manual_seed(0)
    layer = layer_of(random_matrix("q4_0", 50, 64), threads=2)
    for rows in (1, 5, 30):
        wide = torch.randn(rows, 100)
        x = wide[:, 11:75]
        residual = torch.randn(rows, 50)
        want = multiply(layer, x.contiguous(), "auto", residual=residual)
        assert torch.equal(want, multiply(layer, x.contiguous(), "auto") + residual)
        got = multiply(layer, x, "auto", residual=residual, out=residual)
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("kind", TYPES)
def test_packing_in_pieces(kind: str) -> None:
    stored = random_matrix(kind, 53, 512)
    whole = layer_of(stored).weights[0]
    pieces = _native.PackedWeight(kind, 53, 512, WeightMemory())
    row_bytes = stored.data.numel() // 53
    for first, last in ((0, 5), (5, 16), (16, 17), (17, 50), (50, 53)):
        pieces.pack_rows(stored.data.data_ptr() + first * row_bytes, first, last - first, pool(2))
    out = torch.zeros(2, 512)
    for row in range(53):
        whole.expand_row(row, out[0].data_ptr())
        pieces.expand_row(row, out[1].data_ptr())
        assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("outputs", [53, 64])
def test_a_matrix_that_is_kept_expanded_has_the_values_of_the_stored_one(kind: str, outputs: int) -> None:
    for make in (random_matrix, edge_matrix) if kind in SCALES else (random_matrix,):
        stored = make(kind, outputs, 512)
        layer = layer_of(replace(stored, expanded=True), threads=2)
        assert layer.weights[0].type == "f32"
        assert torch.equal(bits(expanded(layer)), bits(expanded(layer_of(stored))))
        assert torch.equal(expanded(layer), values_of(stored))


def test_what_cannot_be_expanded() -> None:
    data = torch.zeros(1000, dtype=torch.uint8).data_ptr()
    weight = _native.PackedWeight("f16", 4, 48, WeightMemory())
    with pytest.raises(ValueError, match="only an f32 weight takes expanded values, this one is f16"):
        weight.pack_expanded("q8_0", data, pool(1))
    weight = _native.PackedWeight("f32", 4, 48, WeightMemory())
    with pytest.raises(ValueError, match="inputs of a q8_0 weight must be a multiple of 32, got 48"):
        weight.pack_expanded("q8_0", data, pool(1))
    with pytest.raises(ValueError, match=r"a q4_1 matrix \[2, 64\] must be 80 contiguous bytes"):
        layer_of(StoredMatrix("q4_1", 2, 64, torch.zeros(79, dtype=torch.uint8), expanded=True))


@pytest.mark.parametrize("kind", TYPES)
def test_packed_weights_keep_their_bits_per_weight(kind: str) -> None:
    form = weight_formats()[kind]
    weight = _native.PackedWeight(kind, 64, 2048, WeightMemory())
    # Q4_K's scales of 6 bits take 8.
    spare = 4 / 144 if kind == "q4_k" else 0
    assert weight.bytes == 64 * 2048 // form.block_size * form.block_bytes * (1 + spare)


@pytest.mark.parametrize(
    ("kind", "outputs", "inputs", "sentence"),
    [
        ("q9", 1, 32, "weight type must be f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q4_k or q6_k, got 'q9'"),
        ("q8_0", 4, 48, "inputs of a q8_0 weight must be a multiple of 32, got 48"),
        ("q6_k", 4, 128, "inputs of a q6_k weight must be a multiple of 256, got 128"),
        ("f32", 0, 8, r"a weight must have at least one output and one input, got \[0, 8\]"),
    ],
)
def test_a_weight_that_cannot_be(kind: str, outputs: int, inputs: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _native.PackedWeight(kind, outputs, inputs, WeightMemory())


def test_wrong_data_and_rows() -> None:
    with pytest.raises(
        ValueError, match=r"a q4_1 matrix \[2, 64\] must be 80 contiguous bytes, got .* \[79\]"
    ):
        layer_of(StoredMatrix("q4_1", 2, 64, torch.zeros(79, dtype=torch.uint8)))
    weight = _native.PackedWeight("f32", 4, 8, WeightMemory())
    data = torch.zeros(64)
    with pytest.raises(ValueError, match="rows 2 to 5 do not lie in a weight of 4"):
        weight.pack_rows(data.data_ptr(), 2, 3, pool(1))
    with pytest.raises(ValueError, match="row 4 does not lie in a weight of 4"):
        weight.expand_row(4, data.data_ptr())
    odd = layer_of(random_matrix("f32", 4, 8))
    odd._packed["0"], odd.parts["1"], odd._packed["1"] = (
        weight,
        4,
        _native.PackedWeight("f32", 4, 9, WeightMemory()),
    )
    with pytest.raises(ValueError, match="weights of one product must have the same inputs, got 8 and 9"):
        multiply(odd, torch.zeros(1, 8), "auto")
    with pytest.raises(ValueError, match="isa must be auto, avx512, avx2 or portable, got 'mmx'"):
        multiply(layer_of(random_matrix("f32", 4, 8)), torch.zeros(1, 8), "mmx")


def test_bench_writes_its_table_json_and_plot(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    bench_linear(
        threads=1, command="octavo bench linear", output=tmp_path, rounds=1, quick=True, console=console
    )
    assert isinstance(console.file, io.StringIO)
    assert "all linear layers of tiny" in console.file.getvalue()
    (model,) = json.loads((tmp_path / "linear.json").read_text())["models"]
    assert [case["rows"] for case in model["cases"]] == [1, 8]
    for case in model["cases"]:
        for kind in TYPES:
            assert case[kind]["ms"] > 0
            assert case[kind]["gflop_per_s"] == pytest.approx(
                2 * case["rows"] * model["num_weights"] / case[kind]["ms"] / 1e6
            )
    assert (tmp_path / "linear.png").stat().st_size > 0
