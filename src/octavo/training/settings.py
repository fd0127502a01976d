"""What a run is told, checked once. Free of torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

ATTENTION = ("mha", "linformer", "c2psa")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """Which attention the encoder trains with; None where the checkpoint decides.

    ``compress_rate`` and ``topk`` are of "c2psa", ``projected_len`` of "linformer".
    """

    kind: str | None = None
    compress_rate: int | None = None
    topk: int | None = None
    projected_len: int | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, got {self.kind!r:.100}")
        for name in ("compress_rate", "topk", "projected_len"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How long and how fast; ``max_steps`` ends a run before its epochs do, and the decay with it.

    ``warmup`` is the share of the steps in which the learning rate rises from 0 to ``lr``; it then falls to
    0, both along straight lines. ``dropout`` replaces the checkpoint's three shares. ``checkpoint_attention``
    computes attention again in the backward pass instead of keeping it. ``save_every`` is in steps.
    """

    epochs: int = 3
    batch_size: int = 32
    lr: float = 5e-5
    warmup: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    dropout: float | None = None
    seed: int = 0
    max_tokens: int | None = 128
    max_steps: int | None = None
    checkpoint_attention: bool = True
    save_every: int = 200
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "save_every"):
            _whole(name, getattr(self, name))
        for name in ("max_tokens", "max_steps"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise ValueError(f"device must be cpu, cuda or cuda:N, got {self.device!r:.100}")
        _between("lr", self.lr, 0.0, 1.0, open_low=True)
        _between("warmup", self.warmup, 0.0, 1.0)
        _between("weight_decay", self.weight_decay, 0.0, 1.0)
        _between("max_grad_norm", self.max_grad_norm, 0.0, math.inf, open_low=True)
        if self.dropout is not None and not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {self.dropout}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, got {self.seed!r:.100}")


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r:.100}")


def _between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not low <= value <= high or (open_low and value == low):
        above = "more than" if open_low else "at least"
        most = "finite" if high == math.inf else f"at most {high:g}"
        raise ValueError(f"{name} must be {above} {low:g} and {most}, got {value}")
    if math.isinf(value):
        raise ValueError(f"{name} must be finite, got {value}")
