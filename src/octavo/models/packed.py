"""Weights re-ordered once for oneDNN, which torch ships: half of MKL's time at the rows of serving.

MKL, behind ``F.linear``, reads a float32 weight in its plain order. ``docs/decisions.md`` has the numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: The row count that the layout is chosen for; it serves every other within a few percent.
ROWS_HINT = 32
#: More rows than this are computed in pieces.
MOST_ROWS = 512


def can_pack(weight: torch.Tensor) -> bool:
    """True where this torch has oneDNN and the weight is of the kind that it packs."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch has no type here
    return available and weight.device.type == "cpu" and weight.dtype == torch.float32


def padded_rows(rows: int) -> int:
    """The row count, at least ``rows``, with which 1 to ``MOST_ROWS`` rows are computed: one of 29.

    oneDNN keeps a compiled kernel and its scratch memory, about 1 MiB, for every row count of every
    shape. A server sees all counts sooner or later; were each kept, they would hold gigabytes.
    """
    if rows <= 8:
        return rows
    step = 8 if rows <= 64 else 32
    return -(-rows // step) * step


class PackedWeight:
    """A ``[outputs, inputs]`` float32 weight in oneDNN's own order; a copy, and not readable."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``x`` ``[rows, inputs]``."""
        if x.shape[0] > MOST_ROWS:
            return torch.cat([self.linear(piece, bias) for piece in torch.split(x, MOST_ROWS)])
        rows = x.shape[0]
        padding = padded_rows(rows) - rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return out[:rows] if padding else out
