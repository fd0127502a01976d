"""Which heads become one, how they are turned first, and the heads that come out.

What is averaged are the rows of W_Q, W_K and W_V (with their biases), what is summed are the columns of W_O:
heads with the same q, k and v read the same, so that is exact for them. ``mean`` takes heads that lie side by
side and averages them as they are (arXiv 2305.13245); ``aligned`` chooses groups whose heads can be turned
towards each other, and turns them (arXiv 2412.20677).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo.convert.align import Family, distances, turns
from octavo.convert.heads import LayerHeads

Method = Literal["mean", "aligned"]
METHODS: tuple[Method, ...] = ("mean", "aligned")

Groups = list[list[int]]

#: Of averaging and turning to the average; the last ones change little. Every start gets the first ones.
_ROUNDS = 60
_FIRST_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """How a layer is pooled.

    ``kv_groups`` lists the old K and V heads of each new one, ``q_groups`` the old query heads of each new
    one, in the order of the new heads. ``qk`` and ``vo`` ``[num_kv_heads, head_dim, head_dim]`` turn a K head
    with its query heads, and a V head with their output projections. ``error`` is the share of the heads'
    energy that averaging loses: half of it Q's and K's, half of it V's.
    """

    kv_groups: Groups
    q_groups: Groups
    qk: Tensor
    vo: Tensor
    error: float


def plan(
    heads: LayerHeads, compress_rate: int, method: Method, family: Family, root: Tensor | None = None
) -> Plan:
    """Choose groups and turns. The error of "aligned" is never above that of "mean".

    ``root`` ``[inputs + 1, inputs + 1]`` is a square root of the second moment of the layer's inputs (with a
    1 behind each for the bias), so that what is compared are the heads' numbers on such inputs; None: their
    weights. Everything is computed in float64. Raises ValueError for a rate that does not divide the heads.
    """
    layer = _Layer(heads, compress_rate, family, root)
    plain = _consecutive(heads.counts.num_kv_heads, layer.kv_size)
    if method == "mean":
        return layer.plan([layer.as_is(members) for members in plain])
    beside = layer.plan([layer.turned(members) for members in plain])
    chosen = layer.plan([layer.turned(members) for members in layer.nearest()])
    return min(chosen, beside, key=lambda found: found.error)


def turn(heads: LayerHeads, made: Plan) -> LayerHeads:
    """The same layer in turned coordinates: it computes what it computed."""
    repeats = heads.counts.repeats
    qk, vo = made.qk.to(heads.q.dtype), made.vo.to(heads.q.dtype)
    return LayerHeads(
        q=qk.repeat_interleave(repeats, 0) @ heads.q,
        k=qk @ heads.k,
        v=vo @ heads.v,
        o=heads.o @ vo.repeat_interleave(repeats, 0).mT,
        o_bias=heads.o_bias,
        biased=heads.biased,
    )


def pool(heads: LayerHeads, made: Plan) -> LayerHeads:
    """Turn the heads, then average Q, K and V and sum O over each group."""
    turned = turn(heads, made)
    return LayerHeads(
        q=torch.stack([turned.q[group].mean(0) for group in made.q_groups]),
        k=torch.stack([turned.k[group].mean(0) for group in made.kv_groups]),
        v=torch.stack([turned.v[group].mean(0) for group in made.kv_groups]),
        o=torch.stack([turned.o[group].sum(0) for group in made.q_groups]),
        o_bias=turned.o_bias,
        biased=turned.biased,
    )


def partition(distance: Tensor, size: int) -> Groups:
    """Cut ``0 .. n - 1`` into groups of ``size`` with small distances ``[n, n]`` within them.

    Exchanges of two members from groups side by side, and from groups of near neighbours, until none helps;
    the better result of the two. Members and groups are in ascending order.
    """
    n = distance.shape[0]
    found = [_exchange(distance, start) for start in (_consecutive(n, size), _greedy(distance, size))]
    best = min(found, key=lambda groups: _within(distance, groups))
    return sorted(sorted(group) for group in best)


@dataclass(frozen=True, slots=True)
class _Group:
    """One new K and V head with its new query heads; turns are ``[members, head_dim, head_dim]``."""

    members: list[int]
    q_groups: Groups
    qk: Tensor
    vo: Tensor
    error: float


class _Layer:
    """The heads' numbers: ``q``, ``k`` and ``v`` as in LayerHeads, times ``root``, in float64."""

    def __init__(self, heads: LayerHeads, compress_rate: int, family: Family, root: Tensor | None) -> None:
        self.counts, self.family = heads.counts, family
        left = self.counts.pooled(compress_rate)
        self.rate = self.counts.num_heads // left.num_heads
        self.kv_size = self.counts.num_kv_heads // left.num_kv_heads
        stacks = (
            x.double() if root is None else x.double() @ root.double() for x in (heads.q, heads.k, heads.v)
        )
        self.q, self.k, self.v = stacks
        # A head of zeros has nothing to lose.
        tiny = torch.finfo(torch.float64).tiny
        self.qk_energy = float(self.q.square().sum() + self.k.square().sum()) + tiny
        self.v_energy = float(self.v.square().sum()) + tiny

    def nearest(self) -> Groups:
        """K and V heads that can be turned to lie near each other; a K head's only query head counts too."""
        seen = self.k if self.counts.repeats > 1 else torch.cat((self.k, self.q), -1)
        energy = float(seen.square().sum()) or 1.0
        distance = distances(seen, self.family) / energy
        distance += distances(self.v, "orthogonal") / self.v_energy
        return partition(distance, self.kv_size)

    def plan(self, groups: Sequence[_Group]) -> Plan:
        head_dim = self.q.shape[1]
        qk = torch.empty(self.counts.num_kv_heads, head_dim, head_dim, dtype=torch.float64)
        vo = torch.empty_like(qk)
        for found in groups:
            qk[found.members], vo[found.members] = found.qk, found.vo
        return Plan(
            kv_groups=[found.members for found in groups],
            q_groups=[q_group for found in groups for q_group in found.q_groups],
            qk=qk,
            vo=vo,
            error=sum(found.error for found in groups),
        )

    def as_is(self, members: list[int]) -> _Group:
        """Nothing is turned, and query heads that lie side by side become one."""
        same = torch.eye(self.q.shape[1], dtype=torch.float64).expand(len(members), -1, -1)
        queries = self._queries(members)
        places = [queries[i : i + self.rate] for i in range(0, len(queries), self.rate)]
        return self._group(members, places, same, same)

    def turned(self, members: list[int]) -> _Group:
        """The best of several starts: as it is, and each member as what the others are turned to."""
        plain = self.as_is(members)
        if len(members) == 1:
            # Heads of one K and V are turned together, so only the choice of query heads is left.
            return min(plain, self._requery(plain), key=lambda found: found.error)
        starts = [plain, *(self._towards(members, reference) for reference in members)]
        settled = (self._settle(start, _FIRST_ROUNDS) for start in starts)
        return self._settle(min(settled, key=lambda found: found.error), _ROUNDS)

    def _queries(self, members: list[int]) -> list[int]:
        repeats = self.counts.repeats
        return [c * repeats + i for c in members for i in range(repeats)]

    def _towards(self, members: list[int], reference: int) -> _Group:
        seen = self.k if self.counts.repeats > 1 else torch.cat((self.k, self.q), -1)
        qk = turns(seen[members], seen[reference].expand(len(members), -1, -1), self.family)
        vo = turns(self.v[members], self.v[reference].expand(len(members), -1, -1), "orthogonal")
        start = self.as_is(members)
        return self._requery(_Group(members, start.q_groups, qk, vo, start.error))

    def _requery(self, found: _Group) -> _Group:
        """Choose the query heads that become one, as K's turns leave them."""
        queries = self._queries(found.members)
        q = found.qk.repeat_interleave(self.counts.repeats, 0) @ self.q[queries]
        flat = q.flatten(1)
        groups = partition(torch.cdist(flat, flat).square(), self.rate)
        named = [[queries[i] for i in group] for group in groups]
        return self._group(found.members, named, found.qk, found.vo)

    def _settle(self, found: _Group, rounds: int) -> _Group:
        """Average and turn to the average, in turns, until it no longer helps (generalised Procrustes)."""
        for _ in range(rounds):
            qk = turns(*self._qk_targets(found), self.family)
            mean = (found.vo @ self.v[found.members]).mean(0)
            vo = turns(self.v[found.members], mean.expand(len(found.members), -1, -1), "orthogonal")
            better = self._group(found.members, found.q_groups, qk, vo)
            if better.error >= found.error * (1 - 1e-5):
                return min(found, better, key=lambda group: group.error)
            found = better
        return found

    def _qk_targets(self, found: _Group) -> tuple[Tensor, Tensor]:
        """Of each member K and its query heads side by side, and the averages that they should meet."""
        repeats, queries = self.counts.repeats, self._queries(found.members)
        place = {head: i for i, head in enumerate(queries)}
        k, q = self.k[found.members], self.q[queries]
        q_mean, turned = torch.empty_like(q), found.qk.repeat_interleave(repeats, 0) @ q
        for group in found.q_groups:
            rows = [place[head] for head in group]
            q_mean[rows] = turned[rows].mean(0)
        k_mean = (found.qk @ k).mean(0).expand_as(k)

        def beside(k: Tensor, q: Tensor) -> Tensor:
            per_member = q.view(len(found.members), repeats, *q.shape[1:]).transpose(1, 2).flatten(2)
            return torch.cat((k, per_member), -1)

        return beside(k, q), beside(k_mean, q_mean)

    def _group(self, members: list[int], q_groups: Groups, qk: Tensor, vo: Tensor) -> _Group:
        spread = _spread(qk @ self.k[members])
        q = dict(zip(self._queries(members), qk.repeat_interleave(self.counts.repeats, 0), strict=True))
        for group in q_groups:
            spread += _spread(torch.stack([q[head] @ self.q[head] for head in group]))
        error = spread / self.qk_energy / 2 + _spread(vo @ self.v[members]) / self.v_energy / 2
        return _Group(members, q_groups, qk, vo, error)


def _spread(heads: Tensor) -> float:
    """The squared distances of heads ``[n, ...]`` from their average."""
    return float((heads - heads.mean(0)).square().sum())


def _consecutive(n: int, size: int) -> Groups:
    return [list(range(i, i + size)) for i in range(0, n, size)]


def _greedy(distance: Tensor, size: int) -> Groups:
    """Start each group at the first that is left and add who is nearest to the group."""
    left = list(range(distance.shape[0]))
    groups = []
    while left:
        group = [left.pop(0)]
        while len(group) < size:
            near = distance[left][:, group].sum(1)
            group.append(left.pop(int(near.argmin())))
        groups.append(group)
    return groups


def _within(distance: Tensor, groups: Groups) -> float:
    return sum(float(distance[group][:, group].sum()) for group in groups)


def _exchange(distance: Tensor, groups: Groups) -> Groups:
    """Exchange the two members that help most, until none do."""
    groups = [list(group) for group in groups]
    n = distance.shape[0]
    smallest = -1e-9 * float(distance.abs().max())
    for _ in range(n * n):
        home = torch.empty(n, dtype=torch.long)
        for g, group in enumerate(groups):
            home[group] = g
        to_group = torch.stack([distance[:, group].sum(1) for group in groups], 1)
        here, there = to_group.gather(1, home[:, None]), to_group[:, home]
        change = there - here + there.mT - here.mT - 2 * distance
        change[home[:, None] == home[None, :]] = 0.0
        best = int(change.argmin())
        i, j = best // n, best % n
        if change[i, j] >= smallest:
            break
        a, b = groups[home[i]], groups[home[j]]
        a[a.index(i)], b[b.index(j)] = j, i
    return groups
