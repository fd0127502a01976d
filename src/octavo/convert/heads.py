"""The attention of a layer as stacks of heads, and how many heads a conversion leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.nn.c2psa import resolve_compress_rate


class HeadCounts(NamedTuple):
    """``num_kv_heads`` divides ``num_heads``: query head i reads K and V head i // repeats."""

    num_heads: int
    num_kv_heads: int

    @property
    def repeats(self) -> int:
        """Query heads to a K and V head."""
        return self.num_heads // self.num_kv_heads

    def pooled(self, compress_rate: int) -> HeadCounts:
        """What is left when every ``compress_rate`` query heads become one.

        ``g = num_heads / compress_rate`` heads must be a multiple of the K and V heads that are left, and
        those must come out of whole old ones, so ``gcd(g, num_kv_heads)`` are left: all of them wherever that
        is possible. 9 heads over 3 at rate 3: 3 over 3. 14 over 2 at rate 2: 7 over 1; at rate 7: 2 over 2.
        Raises ValueError, with the divisors, for a rate that does not divide ``num_heads``.
        """
        groups = self.num_heads // resolve_compress_rate(self.num_heads, compress_rate)
        return HeadCounts(groups, math.gcd(groups, self.num_kv_heads))


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """Projections cut into heads.

    ``q`` is ``[num_heads, head_dim, inputs + 1]``, ``k`` and ``v`` are ``[num_kv_heads, head_dim, inputs +
    1]``: the last column is the bias, 0 unless ``biased``. ``o`` is ``[num_heads, hidden, head_dim]``: the
    output is the sum over heads of ``o`` times what the head read, plus ``o_bias`` ``[hidden]`` where there
    is one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    o_bias: Tensor | None
    biased: bool

    @property
    def counts(self) -> HeadCounts:
        return HeadCounts(self.q.shape[0], self.k.shape[0])

    @property
    def head_dim(self) -> int:
        return self.q.shape[1]

    @classmethod
    def cut(cls, tensors: Mapping[str, Tensor], head_dim: int) -> LayerHeads:
        """From ``q.weight``, ``q.bias``, ... ``o.bias`` in torch's layout; biases may be absent."""

        def stack(role: str) -> Tensor:
            weight = tensors[f"{role}.weight"]
            bias = tensors.get(f"{role}.bias")
            column = weight.new_zeros(weight.shape[0], 1) if bias is None else bias[:, None]
            return torch.cat((weight, column), 1).view(-1, head_dim, weight.shape[1] + 1)

        o = tensors["o.weight"]
        return cls(
            q=stack("q"),
            k=stack("k"),
            v=stack("v"),
            o=o.view(o.shape[0], -1, head_dim).transpose(0, 1),
            o_bias=tensors.get("o.bias"),
            biased="q.bias" in tensors,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The reverse of ``cut``, each in memory of its own."""
        found = {"o.weight": self.o.transpose(0, 1).flatten(1)}
        for role, stack in (("q", self.q), ("k", self.k), ("v", self.v)):
            found[f"{role}.weight"] = stack[..., :-1].flatten(0, 1)
            if self.biased:
                found[f"{role}.bias"] = stack[..., -1].flatten()
        if self.o_bias is not None:
            found["o.bias"] = self.o_bias
        return {name: tensor.contiguous().clone() for name, tensor in found.items()}

    def map(self, change: Callable[[Tensor], Tensor]) -> LayerHeads:
        """``change`` applied to every tensor."""
        bias = None if self.o_bias is None else change(self.o_bias)
        return LayerHeads(change(self.q), change(self.k), change(self.v), change(self.o), bias, self.biased)
