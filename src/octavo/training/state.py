"""What an interrupted run goes on from: one file, which appears whole or not at all.

A safetensors file with the weights, AdamW's two moments of each, and in its header what the run is and how
far it got. Nothing else has a state: the order of the examples and every random number follow from the seed,
the epoch and the step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = "training.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Write the state beside the old one, then put it in its place."""
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach().cpu().contiguous()
        for moment in MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].cpu().contiguous()
    new = folder / f"{FILE}.new"
    save_file(tensors, new, metadata={"progress": json.dumps(progress)})
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(folder / FILE)


def read_progress(folder: Path) -> dict[str, Any] | None:
    """What ``save`` was told, or None where there is nothing to go on from."""
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            progress = json.loads((file.metadata() or {})["progress"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name} in {folder.name} is damaged: {error}") from None
    if not isinstance(progress, dict):
        raise ValueError(f"{path.name} in {folder.name} is damaged: it says not how far it got")
    return progress


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Weights and moments as they were after ``step`` steps. Raises ValueError for what does not fit."""
    from safetensors.torch import load_file

    tensors = load_file(folder / FILE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = {}
            for kind in ("weight", *MOMENTS):
                tensor = tensors.get(f"{kind}.{name}")
                if tensor is None or tensor.shape != parameter.shape:
                    raise ValueError(f"{FILE} in {folder.name} does not fit the model: {kind} of {name}")
                found[kind] = tensor
            parameter.copy_(found["weight"])
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                **{moment: found[moment].to(parameter.device) for moment in MOMENTS},
            }


def remove(folder: Path) -> None:
    """Nothing to go on from any more."""
    for name in (FILE, f"{FILE}.new"):
        (folder / name).unlink(missing_ok=True)
