"""The folder that a conversion leaves: config.json, safetensors, and the tokenizer's files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.config import ModelConfig, RopeConfig
from octavo.convert.heads import HeadCounts, LayerHeads
from octavo.convert.source import Source
from octavo.encoder_config import EncoderConfig
from octavo.model_metadata import ARCHITECTURES
from octavo.tokenizer.gguf import parts_from_gguf
from octavo.tokenizer.write import write_hf
from octavo.weights.stored import BlockTensor, float32

#: Beside config.json and the weights, whatever of these the original has.
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja", "vocab.txt", "vocab.json", "merges.txt",
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
)  # fmt: skip


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that becomes ``out`` at the end; an error leaves nothing behind.

    Raises ValueError where ``out`` exists and is no empty folder.
    """
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield made
        made.chmod(0o777 & ~_umask())
        check_free(out)
        made.replace(out)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raises ValueError where ``out`` exists and is no empty folder."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; the result is a folder: name one that is not there yet")
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name a folder that is empty or not there yet")


def write_model(source: Source, heads: Sequence[LayerHeads], rate: int, topk: int, folder: Path) -> None:
    """Write the model with ``heads`` in place of its own, every tensor in the float type that it had.

    GGUF's blocks become float32. Raises ValueError for a model that config.json cannot describe.
    """
    config = config_of(source, heads[0].counts, rate, topk)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(dict(_tensors(source, heads)), folder / "model.safetensors", metadata={"format": "pt"})
    if source.checkpoint.kind == "gguf":
        write_hf(parts_from_gguf(source.checkpoint.metadata), folder)
        return
    original = source.checkpoint.path
    for name in (*_COPIED, *_pooling_configs(original)):
        if (original / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(original / name, folder / name)


def config_of(source: Source, left: HeadCounts, rate: int, topk: int) -> dict[str, Any]:
    """config.json: the original's with fewer heads, an explicit head_dim and the key "c2psa".

    Raises ValueError for a GGUF model that it cannot describe.
    """
    config = source.config
    c2psa = {"compress_rate": rate, "topk": topk}
    if isinstance(config, EncoderConfig):
        heads = "n_heads" if config.family == "distilbert" else "num_attention_heads"
        new = {heads: left.num_heads, "head_dim": config.head_dim, "c2psa": c2psa}
        return source.checkpoint.metadata | new
    is_gguf = source.checkpoint.kind == "gguf"
    written = _from_gguf(config) if is_gguf else dict(source.checkpoint.metadata)
    written |= {
        "num_attention_heads": left.num_heads,
        "num_key_value_heads": left.num_kv_heads,
        "head_dim": config.head_dim,
        "c2psa": c2psa,
    }
    _check_reads_back(written, replace(config, num_heads=left.num_heads, num_kv_heads=left.num_kv_heads))
    return written


def _tensors(source: Source, heads: Sequence[LayerHeads]) -> Iterator[tuple[str, Tensor]]:
    parts = [layer.tensors() for layer in heads]
    for name, weight in source.checkpoint.weights():
        place = source.attention_part(name)
        if place is not None:
            dtype = torch.float32 if isinstance(weight, BlockTensor) else weight.dtype
            yield name, parts[place[0]].pop(place[1]).to(dtype)
        elif isinstance(weight, BlockTensor):
            yield name, float32(weight)
        else:
            yield name, weight.clone()


def _pooling_configs(folder: Path) -> list[str]:
    """Where sentence-transformers keeps how vectors are pooled."""
    if not (folder / "modules.json").is_file():
        return []
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    # That these paths are names of folders within the original was checked when it was opened.
    paths = [module.get("path") for module in modules if str(module.get("type")).endswith(".Pooling")]
    return [f"{path}/config.json" for path in paths if path]


def _from_gguf(config: ModelConfig) -> dict[str, Any]:
    # A "llama" file with a window is a Mistral: the format has no name of its own for it.
    name = "mistral" if config.architecture == "llama" and config.sliding_layers else config.architecture
    (row,) = (row for row in ARCHITECTURES if row.name == name)
    written: dict[str, Any] = {
        "architectures": [row.hf_class],
        "model_type": row.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": "float32",
    }
    if config.sliding_layers:
        written |= {"sliding_window": config.sliding_window, "use_sliding_window": True}
        written["max_window_layers"] = min(config.sliding_layers)
    return written


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    skipped = ("theta", "scaling")
    stated = {k: v for k, v in asdict(rope).items() if v is not None and k not in skipped}
    return {"rope_type": rope.scaling, **stated}


def _check_reads_back(written: dict[str, Any], wanted: ModelConfig) -> None:
    found = ModelConfig.from_hf(written)
    ours, theirs = asdict(found), asdict(wanted)
    free = {"dtype", "architecture"}
    differ = [name for name, value in theirs.items() if name not in free and ours[name] != value]
    if differ:
        raise ValueError(f"config.json cannot describe this model's {', '.join(differ)}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
