"""Weights as stored: the bits of the file, whole rows moved, pages let go; and the option ``weights``."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.config import WEIGHTS
from octavo.kernels.linear import StoredMatrix, WeightMemory, pack
from octavo.kernels.native import ThreadPool
from octavo.models.registry import canonical
from octavo.weights.convert import Converter
from octavo.weights.errors import WeightsError
from octavo.weights.load import load_model, load_stored, open_checkpoint
from octavo.weights.quantize import QUANTIZERS, quantize
from octavo.weights.quants import dequantize
from octavo.weights.stored import BlockTensor, equal

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Q_PROJ, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"
BLOCK_KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K")
WITHOUT_KERNEL = ("Q5_1", "Q5_K")
HEADS, DIM, WIDTH, VOCAB = 4, 8, 256, 40
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Shelf:
    """A target that keeps what it is given: copies, because the pages go."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.given: dict[str, Tensor | StoredMatrix] = {}

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def load_weight(self, name: str, weight: Tensor | StoredMatrix) -> None:
        if isinstance(weight, StoredMatrix):
            weight = replace(weight, data=weight.data.clone())
        else:
            weight = weight.to(torch.float32, copy=True)
        self.given[name] = weight

    def values(self, name: str) -> Tensor:
        """float32, as a kernel would expand it."""
        weight = self.given[name]
        if isinstance(weight, Tensor):
            return weight
        shape = (weight.outputs, weight.inputs)
        if weight.expanded:
            packed = pack(weight, ThreadPool(1), WeightMemory())
            values = torch.empty(shape)
            for row in range(shape[0]):
                packed.expand_row(row, values[row].data_ptr())
            return values
        if weight.type in DTYPES:
            return weight.data.view(DTYPES[weight.type]).view(shape).float()
        return torch.from_numpy(dequantize(weight.type, weight.data.numpy(), shape))

    def types(self) -> dict[str, str]:
        return {n: w.kept for n, w in self.given.items() if isinstance(w, StoredMatrix)}


SHAPES = {EMBED: (VOCAB, WIDTH), NORM: (WIDTH,), Q_PROJ: (HEADS * DIM, WIDTH), GATE: (48, WIDTH)}
GGUF_NAMES = {
    EMBED: "token_embd.weight",
    NORM: "output_norm.weight",
    Q_PROJ: "blk.0.attn_q.weight",
    GATE: "blk.0.ffn_gate.weight",
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state() -> dict[str, Tensor]:
    return {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}


def write_gguf(path: Path, tensors: dict[str, np.ndarray], kind: str | None, arch: str = "llama") -> Path:
    """Matrices in a block type, everything else as it is."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_head_count(HEADS)
    for name, tensor in tensors.items():
        if kind is None or tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, blocks_of(tensor, kind), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks_of(values: np.ndarray, kind: str) -> np.ndarray:
    """uint8 [rows, bytes of a row]: the package's own quantiser, or random blocks where it has none."""
    dtype = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(values, dtype)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[dtype]
        rng = np.random.default_rng(len(values))
        blocks = rng.integers(0, 256, (values.size // block, size), dtype=np.uint8)
        for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]:
            scales = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
        return blocks.reshape(len(values), -1)


def gguf_file(path: Path, kind: str) -> Path:
    return write_gguf(path, {GGUF_NAMES[name]: t.numpy() for name, t in state().items()}, kind)


def folder(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, path / "model.safetensors")
    return path


def stored(path: Path, weights: str = "auto", shapes: dict[str, tuple[int, ...]] = SHAPES) -> Shelf:
    shelf = Shelf(shapes)
    load_stored(shelf, open_checkpoint(path), weights, tied=True)
    return shelf


def assert_same_bits(one: Shelf, other: Shelf) -> None:
    """But for the sign of a zero, which the kernels leave out."""
    assert one.given.keys() == other.given.keys() != set()
    for name in one.given:
        a, b = one.values(name) + 0.0, other.values(name) + 0.0
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), name


# --- as stored ---


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_gguf_keeps_its_bits_and_means_what_it_means_as_float32(tmp_path: Path, kind: str) -> None:
    path = gguf_file(tmp_path / "x.gguf", kind)
    kept, expanded = stored(path), stored(path, "float32")
    assert kept.types() == dict.fromkeys((EMBED, Q_PROJ, GATE), kind.lower())
    assert expanded.types() == dict.fromkeys((EMBED, Q_PROJ, GATE), "f32")
    assert_same_bits(kept, expanded)
    # The same values as the torch path, which the reference model reads.
    tensors = Shelf(SHAPES)
    load_model(tensors, open_checkpoint(path), tied=True)
    assert_same_bits(kept, tensors)
    # And the very bytes of the file.
    source = {t.name: t for t in gguf.GGUFReader(path).tensors}[GGUF_NAMES[GATE]]
    assert np.array_equal(kept.given[GATE].data.numpy(), source.data.reshape(-1))


@pytest.mark.parametrize("kind", [*BLOCK_KINDS, "F16", "BF16", "F32"])
def test_w04_rotary_rows_move_whole(tmp_path: Path, kind: str) -> None:
    """Row r of a head's first half is stored at 2r, of its second at 2r + 1."""
    path = gguf_file(tmp_path / "x.gguf", kind)
    source = {t.name: t for t in gguf.GGUFReader(path).tensors}[GGUF_NAMES[Q_PROJ]]
    file_rows = np.ascontiguousarray(source.data).view(np.uint8).reshape(HEADS * DIM, -1)
    got = stored(path).given[Q_PROJ].data.numpy().reshape(HEADS * DIM, -1)
    for head in range(HEADS):
        for r in range(DIM):
            at = head * DIM + 2 * (r % (DIM // 2)) + r // (DIM // 2)
            assert np.array_equal(got[head * DIM + r], file_rows[at])


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_safetensors_keep_their_bits(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    dtype = getattr(torch, name)
    tensors = {n: t.to(dtype) for n, t in state().items()}
    path = folder(tmp_path / "m", tensors)
    with caplog.at_level(logging.INFO, "octavo"):
        kept = stored(path)
    assert set(kept.types().values()) == {{"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[name]}
    for n, tensor in tensors.items():
        assert torch.equal(kept.values(n), tensor.float())
    assert kept.given[NORM].dtype == torch.float32
    told = [] if name == "float32" else [f"m: 1 tensors stored as {name} are used as float32"]
    assert [r.getMessage() for r in caplog.records] == told
    assert_same_bits(kept, stored(path, "float32"))


@pytest.mark.parametrize("kind", WITHOUT_KERNEL)
def test_a_type_without_a_kernel_becomes_float16_with_one_line(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf_file(tmp_path / "x.gguf", kind)
    with caplog.at_level(logging.INFO, "octavo"):
        kept = stored(path)
    assert [r.getMessage() for r in caplog.records] == [
        f"x.gguf: 3 tensors stored as {kind.lower()} are used as float16"
    ]
    expanded = stored(path, "float32")
    for name in (EMBED, Q_PROJ, GATE):
        assert torch.equal(kept.values(name), expanded.values(name).half().float())


@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_gpt2_matrices_of_a_gguf_keep_their_bits_and_come_apart_into_q_k_v(tmp_path: Path, kind: str) -> None:
    """GGUF stores them [out, in], as the kernels want them; only HF's names say otherwise."""
    qkv = normal(3 * WIDTH, WIDTH).numpy()
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.attn_qkv.weight": qkv}, kind, arch="gpt2")
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    shelf = Shelf(dict.fromkeys(names, (WIDTH, WIDTH)))
    checkpoint = open_checkpoint(path)
    load_stored(shelf, checkpoint, "auto", tied=True, canonical=lambda n, w: canonical("gpt2", n, w))
    assert shelf.types() == dict.fromkeys(names, kind.lower())
    want = gguf.quants.quantize(qkv, gguf.GGMLQuantizationType[kind]).view(np.uint8).reshape(-1)
    got = torch.cat([shelf.given[name].data for name in names])
    assert np.array_equal(got.numpy(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gpt2_matrices_of_safetensors_are_transposed_in_their_type(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    weight = normal(WIDTH, 2 * WIDTH).to(dtype)
    path = folder(tmp_path / "m", {"h.0.mlp.c_fc.weight": weight})
    shelf = Shelf({"model.layers.0.mlp.up_proj.weight": (2 * WIDTH, WIDTH)})
    load_stored(
        shelf, open_checkpoint(path), "auto", tied=True, canonical=lambda n, w: canonical("gpt2", n, w)
    )
    (name,) = shelf.shapes
    assert shelf.given[name].type == {torch.float32: "f32", torch.float16: "f16"}[dtype]
    assert torch.equal(shelf.values(name), weight.t().float())


# --- the option ---


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_at_load_equals_the_quantised_file(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    tensors = {n: t.to(dtype) for n, t in state().items()}
    at_load = stored(folder(tmp_path / "m", tensors), kind)
    file = {GGUF_NAMES[n]: t.float().numpy() for n, t in tensors.items()}
    file[GGUF_NAMES[Q_PROJ]] = interleave(file[GGUF_NAMES[Q_PROJ]])
    from_file = stored(write_gguf(tmp_path / "x.gguf", file, kind.upper()))
    assert at_load.types() == from_file.types() == dict.fromkeys((EMBED, Q_PROJ, GATE), kind)
    for name in at_load.types():
        assert torch.equal(at_load.given[name].data, from_file.given[name].data)
    assert_same_bits(at_load, from_file)


def interleave(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(HEADS, 2, DIM // 2, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_quantisers_equal_the_gguf_package_to_the_bit(kind: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((64, 256)).astype(np.float32) * rng.lognormal(0, 3, (64, 1)).astype(
        np.float32
    )
    values[0] = 0  # a block without a scale
    values[1] = 3.5  # without a spread
    values[2, ::2] = np.arange(128) - 64.5  # halves, to be rounded away from zero
    values[2, 1::2] = 127
    want = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
    got = quantize(torch.from_numpy(values), kind).numpy()
    assert np.array_equal(got, want)


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_K", "F16"])
def test_any_type_can_be_expanded(tmp_path: Path, kind: str, weights: str) -> None:
    path = gguf_file(tmp_path / "x.gguf", kind)
    got, exact = stored(path, weights), stored(path, "float32")
    dtype = getattr(torch, weights)
    assert {DTYPES[t] for t in got.types().values()} == {dtype}
    for name in got.types():
        assert torch.equal(got.values(name), exact.values(name).to(dtype).float())
    assert torch.equal(got.given[NORM], exact.given[NORM])


def test_a_quantised_matrix_is_not_quantised_again(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "x.gguf", "Q4_1")
    assert_same_bits(stored(path, "q4_1"), stored(path))
    with pytest.raises(
        WeightsError, match=r"weights='q8_0' would round 'model\S+' a second time, .* q4_1: use"
    ):
        stored(path, "q8_0")


def test_positions_are_never_quantised() -> None:
    table = normal(4, 32)
    for kind in QUANTIZERS:
        matrix = Converter(kind).matrix("model.embed_positions.weight", table)
        assert matrix.type == "f32"
        assert Converter(kind).matrix(EMBED, table).type == kind


def test_what_a_type_cannot_hold_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"'x' has values beyond float16: use weights='bfloat16'"):
        Converter("float16").matrix("x", torch.full((2, 32), 1e5))
    with pytest.raises(WeightsError, match=r"'x' has rows of 48 values; q8_0 needs a multiple of 32"):
        Converter("q8_0").matrix("x", torch.ones(2, 48))
    with pytest.raises(WeightsError, match=r"'x' cannot be kept as q4_1: it holds values that q4_1 cannot"):
        Converter("q4_1").matrix("x", torch.full((2, 32), 1e9))
    with pytest.raises(ValueError, match=r"weights must be one of auto, float32, .* got 'int3'"):
        Converter("int3")
    for weights in WEIGHTS:
        Converter(weights)


# --- ties ---


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_w01_a_tie_of_quantised_tensors_is_checked_by_their_bits(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = normal(VOCAB, WIDTH).numpy()
    changed = values.copy()
    changed[7, 3] += 1
    shapes = {EMBED: (VOCAB, WIDTH)}
    names = ("token_embd.weight", "output.weight")
    same = write_gguf(tmp_path / "a.gguf", dict(zip(names, (values, values), strict=True)), kind)
    other = write_gguf(tmp_path / "b.gguf", dict(zip(names, (values, changed), strict=True)), kind)
    with pytest.raises(WeightsError, match="two different tensors"):
        stored(other, shapes=shapes)

    def expand(self: BlockTensor) -> Tensor:
        raise AssertionError("expanded")

    monkeypatch.setattr(BlockTensor, "expand", expand)
    assert stored(same, shapes=shapes).types() == {EMBED: kind.lower()}


def test_w01_a_tie_may_be_of_two_types() -> None:
    values = normal(70, 32)
    rows = quantize(values, "q8_0")
    block = BlockTensor("q8_0", rows, 32)
    assert equal(block, block.expand(), rows=16)
    different = block.expand()
    different[69, 31] += 1
    assert not equal(block, different, rows=16)


# --- memory ---

MEMORY = """
import sys
import torch
from octavo.kernels.linear import StoredMatrix
from octavo.weights.load import load_stored, open_checkpoint

def mib(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) / 1024

class Target:
    kept = []
    def expected_weights(self):
        return {name: shape for name, shape in shapes.items()}
    def load_weight(self, name, weight):
        self.kept.append(weight.data.clone() if isinstance(weight, StoredMatrix) else weight.clone())

checkpoint = open_checkpoint(sys.argv[1])
shapes = {name: info.shape for name, info in checkpoint.source.tensors.items()}
shapes = {f"model.layers.{name.split('.')[1]}.mlp.gate_proj.weight": s for name, s in shapes.items()}
torch.zeros(1).clone()
before = mib("VmRSS")
load_stored(Target(), checkpoint, "auto", tied=True)
print(mib("VmHWM") - before, checkpoint.num_bytes / 2**20)
"""


def test_loading_never_holds_two_copies(tmp_path: Path) -> None:
    """Peak over what the process had before: the weights once, and one tensor's pages (8 of 256 MiB)."""
    rows = 4096
    block = blocks_of(normal(rows, 2048 // 8).numpy(), "Q8_0")
    tensor = np.tile(block, (1, 8))[:, : 2048 // 32 * 34]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for i in range(30):
        writer.add_tensor(f"blk.{i}.ffn_gate.weight", tensor, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "x.gguf")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    peak, weights = map(float, done.stdout.split())
    assert weights > 250
    assert weights < peak < weights + 30
