"""Safetensors folders: what is read, and what is refused before any library sees it."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from octavo.weights.errors import WeightsError
from octavo.weights.hf import Entry, open_folder, read_safetensors_header

A, B, C = torch.arange(6.0).view(2, 3), torch.tensor([1.5, -2.0]), torch.ones(4, dtype=torch.bfloat16)


def folder(path: Path, **files: dict[str, torch.Tensor]) -> Path:
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")
    return path


def index(path: Path, weight_map: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read(path: Path) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in open_folder(path).tensors()}


@pytest.mark.parametrize("name", ["model", "other"])
def test_single_file(tmp_path: Path, name: str) -> None:
    opened = open_folder(folder(tmp_path, **{name: {"a": A, "b": B, "c": C}}))
    assert opened.config == {"model_type": "llama"}
    got = dict(opened.tensors())
    assert got["c"].dtype == torch.bfloat16
    assert all(torch.equal(got[key], value) for key, value in {"a": A, "b": B, "c": C}.items())


def test_w02_the_index_is_the_authority(tmp_path: Path) -> None:
    wrong = {"a": -A, "b": -B, "stray": C}
    folder(tmp_path, part1={"a": A, "unnamed": C}, part2={"b": B, "a": -A}, model=wrong, zz_extra=wrong)
    index(tmp_path, {"a": "part1.safetensors", "b": "part2.safetensors"})
    assert read(tmp_path) == {"a": A.tolist(), "b": B.tolist()}
    assert [file.name for file in open_folder(tmp_path).files] == ["part1.safetensors", "part2.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "part2.safetensors"}, "has no part2.safetensors"),
        ({"b": "part1.safetensors"}, "places 'b' in part1.safetensors, which does not hold it"),
        ({"a": "../part1.safetensors"}, "is not the name of a file in the folder"),
        ({"a": "/etc/passwd"}, "is not the name of a file in the folder"),
        ({"a": 3}, "is not the name of a file in the folder"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_w02_an_index_that_is_wrong_is_refused(tmp_path: Path, weight_map: object, words: str) -> None:
    index(folder(tmp_path, part1={"a": A}), weight_map)
    with pytest.raises(WeightsError) as caught:
        open_folder(tmp_path)
    assert words in str(caught.value)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    folder(tmp_path, x={"a": A}, y={"b": B})
    with pytest.raises(WeightsError, match="holds 2 safetensors files and neither"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_w09_a_pickle_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    folder(tmp_path)
    torch.save({"a": A}, tmp_path / name)
    with pytest.raises(
        WeightsError, match=r"pickle checkpoint .* can run any code .* convert it to safetensors"
    ):
        open_folder(tmp_path)


def test_w09_a_pickle_beside_safetensors_is_not_looked_at(tmp_path: Path) -> None:
    folder(tmp_path, model={"b": B})
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert read(tmp_path) == {"b": B.tolist()}


def test_a_folder_that_lacks_something_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        open_folder(tmp_path)
    with pytest.raises(WeightsError, match="holds no safetensors file"):
        open_folder(folder(tmp_path))
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(WeightsError, match=r"config\.json"):
        open_folder(tmp_path)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes


def file_bytes(header: object, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(24)


HOSTILE = {
    "empty": b"",
    "seven bytes": bytes(7),
    "header of 2^63 bytes": file_bytes({"a": entry()}, length=1 << 63),
    "header of 2^64-1 bytes": file_bytes({"a": entry()}, length=(1 << 64) - 1),
    "header one byte past the end": file_bytes(b"{}", length=2 + 24 + 1),
    "not JSON": file_bytes(b'{"a": '),
    "not UTF-8": file_bytes(b'{"\xff": 1}'),
    "not an object": file_bytes([1]),
    "100,000 open brackets": file_bytes(b'{"a":' + b"[" * 100_000),
    "a number of 10,000 digits": file_bytes(b'{"a":' + b"9" * 10_000 + b"}"),
    "same name twice": file_bytes(b'{"a": 1, "a": 2}'),
    "entry is a number": file_bytes({"a": 1}),
    "no shape": file_bytes({"a": {"dtype": "F32", "data_offsets": [0, 24]}}),
    "unknown dtype": file_bytes({"a": entry(dtype="Q99")}),
    "dtype is a list": file_bytes({"a": entry(dtype=["F32"])}),
    "2^42 dimension": file_bytes({"a": entry(shape=[1 << 42])}),
    "2^63 dimensions": file_bytes({"a": entry(shape=[(1 << 63) - 1] * 8)}),
    "ten thousand dimensions": file_bytes({"a": entry(shape=[(1 << 62)] * 10_000)}),
    "negative dimension": file_bytes({"a": entry(shape=[-2, -3])}),
    "dimension true": file_bytes({"a": entry(shape=[True, 6])}),
    "dimension 2.0": file_bytes({"a": entry(shape=[2.0, 3])}),
    "end past the file": file_bytes({"a": entry(shape=[2, 4], data_offsets=[0, 32])}),
    "offset 2^62": file_bytes({"a": entry(data_offsets=[1 << 62, (1 << 62) + 24])}),
    "ends before it begins": file_bytes({"a": entry(data_offsets=[24, 0])}),
    "three offsets": file_bytes({"a": entry(data_offsets=[0, 12, 24])}),
    "shape and bytes differ": file_bytes({"a": entry(shape=[2, 2])}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_w10_hostile_safetensors_is_refused_at_once(case: str, tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(HOSTILE[case])
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(WeightsError) as caught:
        open_folder(tmp_path)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert seconds < 0.1
    assert peak < 4 << 20


def test_w10_the_header_length_is_checked_before_anything_is_read(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    for case in ("header of 2^63 bytes", "header one byte past the end"):
        path.write_bytes(HOSTILE[case])
        with pytest.raises(WeightsError, match=r"its header claims \d+ bytes, the file has \d+"):
            open_folder(tmp_path)


def test_the_hand_made_file_is_valid_without_the_defect(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(file_bytes({"__metadata__": {"x": "y"}, "a": entry()}))
    assert read_safetensors_header(tmp_path / "model.safetensors") == {"a": Entry("F32", (2, 3), 101, 24)}
    assert read(tmp_path) == {"a": [[0.0] * 3] * 2}


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_w10_any_damage_is_refused_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    """Cut or overwrite a valid file: every tensor can be read, or the one error is raised."""
    folder(tmp_path, model={"a": A, "b": B, "c": C})
    path = tmp_path / "model.safetensors"
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        new = data.draw(
            st.binary(min_size=1, max_size=4) | st.sampled_from([b"9", b"[", b"]", b'"', b",", b"-1"])
        )
        raw[at : at + len(new)] = new
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    try:
        shapes = {name: entry.shape for name, entry in read_safetensors_header(path).items()}
        got = {name: tuple(tensor.shape) for name, tensor in open_folder(tmp_path).tensors()}
    except WeightsError:
        return
    assert got == shapes
