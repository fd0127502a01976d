"""Weights re-ordered once for oneDNN, which torch ships: half of MKL's time at the rows of serving.

MKL, behind ``F.linear``, reads a float32 weight in its plain order. ``docs/decisions.md`` has the numbers.
"""

from __future__ import annotations

import torch

#: The row count that the layout is chosen for; it serves every other within a few percent.
ROWS_HINT = 32


def can_pack(weight: torch.Tensor) -> bool:
    """True where this torch has oneDNN and the weight is of the kind that it packs."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch has no type here
    return available and weight.device.type == "cpu" and weight.dtype == torch.float32


class PackedWeight:
    """A ``[outputs, inputs]`` float32 weight in oneDNN's own order; a copy, and not readable."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``x`` ``[rows, inputs]``."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return out
