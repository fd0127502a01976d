"""The folder that a run writes: config.json, safetensors and the tokenizer, as any checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from octavo.models.encoder import Encoder, checkpoint_name
from octavo.weights.hf import SINGLE

REPORT = "training.json"
# What a tokenizer is read from, and what sentence-transformers says about lengths and pooling.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "modules.json",
    "sentence_bert_config.json",
)


def write_model(
    source: Path, folder: Path, encoder: Encoder, metadata: dict[str, Any], report: dict[str, Any]
) -> None:
    """Write the checkpoint; the weights come last and appear whole, so a folder with them is complete."""
    from safetensors.torch import save_file

    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / "modules.json").is_file():
        for path in source.glob("*_Pooling/config.json"):
            (folder / path.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(path, folder / path.parent.name / path.name)
    _write_json(folder / "config.json", metadata)
    _write_json(folder / REPORT, report)
    tensors = {
        checkpoint_name(encoder.config, name): parameter.detach().cpu().contiguous()
        for name, parameter in encoder.named_parameters()
    }
    new = folder / f"{SINGLE}.new"
    save_file(tensors, new, metadata={"format": "pt"})
    # safetensors writes for its owner alone, whatever the umask.
    new.chmod((folder / "config.json").stat().st_mode & 0o777)
    new.replace(folder / SINGLE)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
