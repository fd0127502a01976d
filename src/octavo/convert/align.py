"""Turning heads so that they can be averaged: orthogonal Procrustes problems.

A head computes the same when q and k are turned by one orthogonal matrix R, since (R q) . (R k) = q . k, and
when v is turned by U and the output projection by its transpose, since (W_O U^T)(U v) = W_O v. So the heads
of a group may be turned towards each other before they are averaged (arXiv 2412.20677), and nothing that the
model computes changes until they are.

With rotary positions R must commute with the rotation of every position. That rotates each pair of dimensions
(j, j + head_dim / 2) by an angle of its own frequency; what commutes with all of them is a turn of each pair,
that is a phase for each frequency when the pair is read as one complex number.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

#: What may turn q and k: any orthogonal matrix, or a phase for each rotary frequency.
Family = Literal["orthogonal", "phases"]


def turns(own: Tensor, target: Tensor, family: Family) -> Tensor:
    """The turn of each head that brings it nearest to its target: argmin over R of ``|R own - target|``.

    ``own`` and ``target`` are ``[..., head_dim, columns]``, the result is ``[..., head_dim, head_dim]``.
    Orthogonal: U V^T of the singular value decomposition of ``target own^T`` (Schönemann 1966). Phases: of
    each pair, the argument of ``sum(target conj(own))``, 0 where that sum is 0.
    """
    if family == "orthogonal":
        u, _, vh = torch.linalg.svd(target @ own.mT)
        turned: Tensor = u @ vh
        return turned
    phase = _pair_products(own, target)
    length = phase.abs()
    phase = torch.where(length > 0, phase / length.where(length > 0, 1.0), 1.0)
    cos, sin = torch.diag_embed(phase.real), torch.diag_embed(phase.imag)
    return torch.cat((torch.cat((cos, -sin), -1), torch.cat((sin, cos), -1)), -2)


def distances(heads: Tensor, family: Family) -> Tensor:
    """``[n, n]``: the least ``|R a - b|^2`` between heads of ``[n, head_dim, columns]``, over all turns R."""
    energy = heads.square().sum((-2, -1))
    one, other = heads[:, None], heads[None, :]
    if family == "orthogonal":
        common = torch.linalg.svdvals(one @ other.mT).sum(-1)
    else:
        common = _pair_products(other, one).abs().sum(-1)
    squared: Tensor = energy[:, None] + energy[None, :] - 2 * common
    return squared.clamp(min=0)


def _pair_products(own: Tensor, target: Tensor) -> Tensor:
    """``sum(target conj(own))`` over the columns, complex, for each rotary pair: ``[..., head_dim / 2]``."""
    (a, b), (c, d) = own.chunk(2, -2), target.chunk(2, -2)
    return torch.complex((c * a + d * b).sum(-1), (d * a - c * b).sum(-1))
