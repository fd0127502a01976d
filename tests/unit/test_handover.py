"""The files that the throughput bench hands to the peers hold the weights of the one checkpoint."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.bench.handover import Handover, matrix_type, write_gguf
from octavo.weights.gguf import read_header
from octavo.weights.load import open_checkpoint

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two matrices in Q4_1, one in Q8_0, one norm in float32."""
    path = tmp_path_factory.mktemp("handover") / "small.gguf"
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", "<|end|>"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
    writer.add_add_bos_token(False)
    for name, kind in (("blk.0.attn_q", Q4_1), ("blk.0.ffn_up", Q4_1), ("token_embd", Q8_0)):
        values = rng.standard_normal((4, 64)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", rng.standard_normal(64).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in open_checkpoint(path).tensors()}


def test_the_float32_file_holds_the_values_to_the_bit_and_the_same_metadata(source, tmp_path):
    write_gguf(source, tmp_path / "F32.gguf", "F32")
    before, after = read_header(source), read_header(tmp_path / "F32.gguf")
    assert {tensor.ggml_type for tensor in after.tensors.values()} == {"F32"}
    assert after.metadata.pop("general.file_type") == 0
    assert after.metadata == before.metadata
    expected, found = values(source), values(tmp_path / "F32.gguf")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_the_q8_0_file_is_within_half_a_step_of_the_values_and_leaves_norms_alone(source, tmp_path):
    write_gguf(source, tmp_path / "Q8_0.gguf", "Q8_0")
    header = read_header(tmp_path / "Q8_0.gguf")
    assert matrix_type(header) == "Q8_0"
    assert header.tensors["output_norm.weight"].ggml_type == "F32"
    expected, found = values(source), values(tmp_path / "Q8_0.gguf")
    for name, value in expected.items():
        # A block's step is its largest value / 127, rounded to float16: half of it, and a little.
        step = np.abs(value).max() / 127 if value.ndim > 1 else 0.0
        assert np.abs(found[name] - value).max() <= 0.51 * step


def test_a_file_that_has_the_type_already_is_handed_over_itself(source, tmp_path):
    handover = Handover(str(source), tmp_path)
    assert matrix_type(read_header(source)) == "Q4_1"
    assert handover.path("gguf-q4_1") == source
    made = handover.path("own-fp32")
    stamp = made.stat().st_mtime_ns
    assert handover.path("gguf-f32") == made
    assert made.stat().st_mtime_ns == stamp
    assert [path.name for path in made.parent.iterdir()] == ["F32.gguf"]


def test_an_export_without_its_environment_is_refused_in_a_sentence(source, tmp_path, monkeypatch):
    handover = Handover(str(source), tmp_path)
    monkeypatch.setattr(Handover, "_write_folder", lambda self, target: target.mkdir())
    with pytest.raises(ValueError, match="not installed: there is no openvino/bin/python"):
        handover.path("openvino-fp32")
    assert not list(tmp_path.rglob("openvino-fp32"))
