"""What the engines of the throughput bench read, written from the one checkpoint: the same weights for all.

Everything starts from the float32 values that the checkpoint stands for. Files are kept beside the
peers' environments, under the checkpoint's digest, and appear whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo.bench.variants import python_of
from octavo.engine.build import read_config
from octavo.weights import hub
from octavo.weights.gguf import GGUFFile
from octavo.weights.load import Checkpoint, open_checkpoint

GGUF_TYPES = {"gguf-f32": "F32", "gguf-q8_0": "Q8_0", "gguf-q4_1": "Q4_1"}
IR_PRECISIONS = {"openvino-fp32": "fp32", "openvino-int8": "int8"}


class Handover:
    """Files by kind: "hf", "gguf-f32", "gguf-q8_0", "gguf-q4_1", "openvino-fp32", "openvino-int8",
    and "own-fp32", the float32 one of the checkpoint's own format."""

    def __init__(self, model: str, peers: Path) -> None:
        self._source = open_checkpoint(hub.resolve(model))
        self._peers = peers
        self._folder = peers / "models" / self._source.fingerprint()[:16]

    def path(self, kind: str) -> Path:
        """The file or folder, made now if it is not there yet. Raises ValueError where it cannot be made."""
        if kind == "own-fp32":
            return self.path("gguf-f32" if self._source.kind == "gguf" else "hf")
        if kind == "hf":
            return self._made("hf", self._write_folder)
        if kind in IR_PRECISIONS:
            folder, precision = self.path("hf"), IR_PRECISIONS[kind]
            return self._made(kind, lambda target: self._export(folder, target, precision))
        ggml_type = GGUF_TYPES[kind]
        if not isinstance(self._source.source, GGUFFile):
            raise ValueError("a GGUF file can be written only from a GGUF file, and the model is a folder")
        if matrix_type(self._source.source) == ggml_type:
            return self._source.path
        return self._made(
            f"{ggml_type}.gguf", lambda target: write_gguf(self._source.path, target, ggml_type)
        )

    def _made(self, name: str, write: Callable[[Path], None]) -> Path:
        target = self._folder / name
        if not target.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".making-", dir=self._folder) as work:
                write(Path(work) / name)
                os.replace(Path(work) / name, target)
        return target

    def _write_folder(self, target: Path) -> None:
        transformers_model(self._source).save_pretrained(target)
        # No engine is sent text; some want to see a tokenizer all the same.
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if self._source.kind == "hf" and (self._source.path / name).exists():
                shutil.copy(self._source.path / name, target / name)

    def _export(self, folder: Path, target: Path, precision: str) -> None:
        script = Path(__file__).parent / "export_ir.py"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [python_of("openvino", self._peers), "-P", script, folder, target, precision],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            check=False,
        )
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise ValueError(f"the export to OpenVINO failed: {lines[-1] if lines else 'nothing was said'}")


def matrix_type(file: GGUFFile) -> str:
    """The type that most of the file's matrices are stored in."""
    counts = Counter(tensor.ggml_type for tensor in file.tensors.values() if len(tensor.shape) > 1)
    return counts.most_common(1)[0][0]


def write_gguf(source: Path, target: Path, ggml_type: str) -> None:
    """A copy of a GGUF file with every matrix in ``ggml_type``, from the values that it stands for.

    Vectors (norms, biases) become float32, as llama.cpp's own quantiser leaves them. Metadata is copied,
    but for the file's type.
    """
    import gguf
    from gguf import GGUFReader, GGUFWriter, LlamaFileType
    from gguf.constants import GGMLQuantizationType

    wanted = GGMLQuantizationType[ggml_type]
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture, use_temp_file=True)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # the writer's own
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(LlamaFileType[f"{'ALL' if ggml_type == 'F32' else 'MOSTLY'}_{ggml_type}"])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
        if values.ndim > 1 and wanted != GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def transformers_model(checkpoint: Checkpoint) -> Any:
    """The checkpoint in transformers, float32: the same weights, not a second conversion.

    Raises ValueError for a GGUF file of another architecture than Llama, and when transformers wants
    tensors that the checkpoint lacks.
    """
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    peer = factory.from_config(_config(checkpoint), dtype=torch.float32)
    tensors = {name: tensor.to(torch.float32) for name, tensor in checkpoint.tensors()}
    missing, unexpected = peer.load_state_dict(tensors, strict=False, assign=True)
    peer.tie_weights()
    tied = {"lm_head.weight"} if peer.config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"transformers misses {sorted(set(missing) - tied)} and does not know {unexpected}")
    return peer.eval()


def _config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig, LlamaConfig

    if checkpoint.kind == "hf":
        return AutoConfig.for_model(**checkpoint.metadata)
    config = read_config(checkpoint)
    if checkpoint.metadata["general.architecture"] != "llama" or config.rope.scaling != "none":
        raise ValueError(
            "only a Llama GGUF without rope scaling can be handed to the peers; give a folder of safetensors"
        )
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings="lm_head.weight" not in checkpoint.names,
    )
