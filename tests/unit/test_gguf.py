"""The GGUF header against the gguf package's writer and against hostile files; dequantisation to the bit."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.weights.errors import WeightsError
from octavo.weights.gguf import GGML_TYPES, read_header
from octavo.weights.quants import dequantize

METADATA = {
    "a.bool": True,
    "a.uint8": 7,
    "a.int8": -7,
    "a.uint16": 60000,
    "a.int16": -20000,
    "a.uint32": 4_000_000_000,
    "a.int32": -2_000_000_000,
    "a.uint64": 1 << 63,
    "a.int64": -(1 << 62),
    "a.float32": 0.5,
    "a.float64": 1e300,
    "a.string": "zwölf Boxkämpfer",
    "a.strings": ["", "Ġ t", "日本"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.25, -0.5],
    "a.bools": [True, False],
}


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in METADATA.items():
        add = getattr(writer, f"add_{key[2:]}", writer.add_array)
        add(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {
        "token_embd.weight": np.arange(24, dtype=np.float32).reshape(6, 4),
        "output_norm.weight": np.arange(4, dtype=np.float16),
        "blk.0.x": np.zeros((2, 3, 5), dtype=np.float32),
    }
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf", tensors)


def test_header_equals_what_was_written(small: Path) -> None:
    file = read_header(small)
    assert {key: file.metadata[key] for key in METADATA} == METADATA
    assert file.metadata["general.architecture"] == "llama"
    assert {name: t.shape for name, t in file.tensors.items()} == {
        "token_embd.weight": (6, 4),
        "output_norm.weight": (4,),
        "blk.0.x": (2, 3, 5),
    }
    for theirs in gguf.GGUFReader(small).tensors:
        ours = file.tensors[theirs.name]
        assert (ours.offset, ours.num_bytes) == (theirs.data_offset, theirs.n_bytes)
        assert ours.ggml_type == theirs.tensor_type.name
    with small.open("rb") as raw:
        raw.seek(file.tensors["token_embd.weight"].offset)
        assert np.frombuffer(raw.read(96), np.float32).tolist() == list(range(24))


@pytest.mark.real_model
def test_header_of_the_default_model_is_read_fast(smollm2_path: Path) -> None:
    start = time.process_time()
    file = read_header(smollm2_path)
    seconds = time.process_time() - start
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152  # type: ignore[arg-type]
    assert len(file.tensors) == 272
    last = max(file.tensors.values(), key=lambda t: t.offset)
    assert last.offset + last.num_bytes == smollm2_path.stat().st_size
    assert seconds < 0.2, f"{seconds:.3f} s"


# --- hostile files: built by hand, byte by byte ---


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(num_tensors: int = 0, num_metadata: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata)


def record(name: str, dims: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def array(key: str, item_type: int, count: int, body: bytes = b"") -> bytes:
    return string(key) + struct.pack("<IIQ", 9, item_type, count) + body


def nested(depth: int) -> bytes:
    return string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)


HUGE = 1 << 63
PAD = bytes(64)
HOSTILE = {
    "empty": b"",
    "too short": b"GGUF",
    "wrong magic": b"GGML" + header()[4:] + PAD,
    "version 1": header(version=1) + PAD,
    "version 4": header(version=4) + PAD,
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + PAD,
    "2^63 tensors": header(num_tensors=HUGE) + PAD,
    "2^63 metadata": header(num_metadata=HUGE) + PAD,
    "2^64-1 metadata": header(num_metadata=(1 << 64) - 1) + PAD,
    "key of 2^63 bytes": header(num_metadata=1) + struct.pack("<Q", HUGE) + PAD,
    "key of 70,000 bytes": header(num_metadata=1) + string("k" * 70_000) + PAD,
    "key not UTF-8": header(num_metadata=1) + struct.pack("<Q", 2) + b"\xff\xfe" + PAD,
    "string of 2^63 bytes": header(num_metadata=1) + string("k") + struct.pack("<IQ", 8, HUGE) + PAD,
    "array of 2^63 strings": header(num_metadata=1) + array("k", 8, HUGE),
    "array of 2^63 bytes": header(num_metadata=1) + array("k", 0, HUGE) + PAD,
    "array of 2^61 u64": header(num_metadata=1) + array("k", 10, 1 << 61) + PAD,
    "array of strings past the end": header(num_metadata=1) + array("k", 8, 2, struct.pack("<Q", 60)) + PAD,
    "array of 9M bytes": header(num_metadata=1) + array("k", 0, 9_000_000, bytes(9_000_000)),
    "nested arrays": header(num_metadata=1) + nested(10_000),
    "unknown value type": header(num_metadata=1) + string("k") + struct.pack("<I", 13) + PAD,
    "unknown item type": header(num_metadata=1) + array("k", 99, 1) + PAD,
    "same key twice": header(num_metadata=2) + (string("k") + struct.pack("<II", 4, 1)) * 2 + PAD,
    "alignment 0": header(num_metadata=1) + string("general.alignment") + struct.pack("<II", 4, 0) + PAD,
    "alignment 3": header(num_metadata=1) + string("general.alignment") + struct.pack("<II", 4, 3) + PAD,
    "alignment 2^31": header(num_metadata=1)
    + string("general.alignment")
    + struct.pack("<II", 4, 1 << 31)
    + PAD,
    "alignment true": header(num_metadata=1) + string("general.alignment") + struct.pack("<IB", 7, 1) + PAD,
    "2^42 dimension": header(num_tensors=1) + record("t", [1 << 42]) + PAD,
    "four 2^63 dimensions": header(num_tensors=1) + record("t", [HUGE] * 4) + PAD,
    "2^32 dimensions": header(num_tensors=1) + string("t") + struct.pack("<I", 0xFFFFFFFF) + PAD,
    "five dimensions": header(num_tensors=1) + record("t", [1] * 5) + PAD,
    "no dimension": header(num_tensors=1) + record("t", []) + PAD,
    "dimension 0": header(num_tensors=1) + record("t", [4, 0]) + PAD,
    "row not a multiple of the block": header(num_tensors=1) + record("t", [16], type_id=3) + PAD,
    "unknown tensor type": header(num_tensors=1) + record("t", [4], type_id=77) + PAD,
    "offset past the end": header(num_tensors=1) + record("t", [4], offset=1 << 40) + PAD,
    "offset 2^64-32": header(num_tensors=1) + record("t", [4], offset=(1 << 64) - 32) + PAD,
    "offset not aligned": header(num_tensors=1) + record("t", [4], offset=4) + PAD,
    "data past the end": header(num_tensors=1) + record("t", [40]) + PAD,
    "same tensor twice": header(num_tensors=2) + record("t", [4]) * 2 + PAD,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_w10_hostile_header_is_refused_at_once(case: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[case])
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert seconds < 0.1
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("2^42 dimension", "'t' of shape [4398046511104] takes"),
        ("unknown tensor type", "tensor 't' has the type unknown (77)"),
        ("2^63 tensors", "the tensor count is 9223372036854775808, more than the 64 bytes"),
        ("2^63 metadata", "the metadata count is 9223372036854775808, more than the 64 bytes"),
        ("array of 2^63 strings", "the length of 'k' is 9223372036854775808, more than the 0 bytes"),
        ("big endian", "big endian"),
        ("wrong magic", "b'GGML'"),
        ("version 4", "version is 4, supported are 2 and 3"),
    ],
)
def test_w10_the_error_says_what_is_wrong(case: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    assert words in str(caught.value)


def test_the_hand_made_header_is_valid_without_the_defect(tmp_path: Path) -> None:
    # Shows that the cases above fail for their defect, and not for the way they are built.
    path = tmp_path / "fine.gguf"
    body = header(num_tensors=1, num_metadata=2) + array("k", 8, 1, string("v"))
    body += string("general.alignment") + struct.pack("<II", 4, 64) + record("t", [4, 2])
    path.write_bytes(body + bytes(-len(body) % 64 + 32))
    file = read_header(path)
    assert file.metadata == {"k": ["v"], "general.alignment": 64}
    assert file.tensors["t"].shape == (2, 4)
    path.write_bytes(body + bytes(-len(body) % 64 + 31))
    with pytest.raises(WeightsError):
        read_header(path)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")  # opening it would wait for ever
    for path in (tmp_path, tmp_path / "pipe.gguf", tmp_path / "absent.gguf"):
        with pytest.raises(WeightsError):
            read_header(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_w10_any_damage_is_refused_or_harmless(data: st.DataObject, small: Path, tmp_path: Path) -> None:
    """Cut, overwrite with bytes or extreme numbers: no hang, no big allocation, no other exception."""
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        extreme = st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**42, 2**63, 2**64 - 1])
        new = data.draw(st.binary(min_size=1, max_size=8) | extreme.map(lambda n: struct.pack("<Q", n)))
        raw[at : at + len(new)] = new
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    tracemalloc.start()
    try:
        file = read_header(path)
    except WeightsError:
        pass
    else:
        size = path.stat().st_size
        assert all(t.offset + t.num_bytes <= size for t in file.tensors.values())
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


def test_every_cut_of_a_valid_file_is_refused(small: Path, tmp_path: Path) -> None:
    raw = small.read_bytes()
    path = tmp_path / "cut.gguf"
    last = max(read_header(small).tensors.values(), key=lambda t: t.offset)
    for length in range(0, last.offset + last.num_bytes):
        path.write_bytes(raw[:length])
        with pytest.raises(WeightsError):
            read_header(path)


# --- dequantisation ---


def random_blocks(kind_name: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Random bytes, with the float16 scales set to finite numbers, so that no NaN hides a difference."""
    kind = next(k for k in GGML_TYPES.values() if k.name == kind_name)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // kind.block_size, kind.block_bytes), dtype=np.uint8)
    half_at = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
    half_at |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    for at in half_at.get(kind_name, []):
        scales = rng.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind_name in ("F32", "F16", "BF16"):
        values = rng.standard_normal(shape).astype(np.float32)
        dtype = gguf.GGMLQuantizationType[kind_name]
        return gguf.quants.quantize(values, dtype).view(np.uint8).reshape(-1)
    return blocks.reshape(-1)


@pytest.mark.parametrize("kind", [k.name for k in GGML_TYPES.values()])
def test_dequantised_values_equal_the_gguf_package_to_the_bit(kind: str) -> None:
    rng = np.random.default_rng(0)
    shape = (96, 512)
    raw = random_blocks(kind, rng, shape)
    want = gguf.quants.dequantize(raw.reshape(shape[0], -1), gguf.GGMLQuantizationType[kind])
    want = np.ascontiguousarray(want).view(np.float32).reshape(shape)
    got = dequantize(kind, raw, shape)
    assert got.dtype == np.float32
    assert np.isfinite(want).all()
    assert np.array_equal(got.view(np.int32), want.view(np.int32))


def test_a_tensor_of_many_chunks_equals_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q4_1", np.random.default_rng(1), (64, 32))
    whole = dequantize("Q4_1", raw, (64, 32))
    monkeypatch.setattr("octavo.weights.quants._CHUNK_BLOCKS", 7)
    assert np.array_equal(dequantize("Q4_1", raw, (64, 32)), whole)


def test_unaligned_data_is_read_too() -> None:
    raw = np.zeros(17, np.uint8)
    raw[1:] = np.arange(4, dtype=np.float32).view(np.uint8)
    assert dequantize("F32", raw[1:], (4,)).tolist() == [0, 1, 2, 3]
