"""Fitting the pooled heads, layer by layer, to what the original's layers compute on a text.

Each layer's attention is given what the original's is given, and shall give what that gives. First the output
projection is solved for (linear least squares), then a few steps of Adam change all of the attention's
weights, then the output projection is solved for again; what has the least error of these is kept. Only
attention changes, and nothing is trained through more than one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.convert.heads import LayerHeads
from octavo.convert.layer import Attend, attention, context
from octavo.convert.stack import WINDOWS, Stack


@dataclass(frozen=True, slots=True)
class Recovery:
    """``steps`` of Adam a layer, of ``batch`` tokens each, ``learning_rate`` falling to 0 by half a cosine.

    ``ridge`` is added to the least squares' diagonal, relative to its mean.
    """

    steps: int = 60
    batch: int = 1024
    learning_rate: float = 1e-3
    ridge: float = 1e-4
    seed: int = 0


class Fitted(NamedTuple):
    """The heads of every layer, and each layer's relative squared error on its target before and after."""

    heads: list[LayerHeads]
    before: list[float]
    after: list[float]


def recover(
    stack: Stack,
    original: Sequence[LayerHeads],
    pooled: Sequence[LayerHeads],
    ids: Tensor,
    topk: int | None,
    how: Recovery,
    step_done: Callable[[], None] = lambda: None,
) -> Fitted:
    """Fit ``pooled`` to ``original`` on token ids ``[windows, length]``.

    ``step_done`` is called ``how.steps + 1`` times a layer. The same seed gives the same heads on the same
    machine and number of threads.
    """
    generator = torch.Generator().manual_seed(how.seed)
    fitted = Fitted([], [], [])
    with torch.no_grad():
        x = stack.embed(ids)
    for i, (before, start) in enumerate(zip(original, pooled, strict=True)):
        with torch.no_grad():
            inputs = stack.attention_input(i, x)
            wanted = run_attention(before, inputs, stack.attends(i, ids.shape[1], None))
            task = _Task(inputs, wanted, stack.attends(i, ids.shape[1], topk))
            heads = task.solve_output(start, how.ridge)
        heads = task.descend(heads, how, generator, step_done)
        with torch.no_grad():
            found = [start, heads, task.solve_output(heads, how.ridge)]
            errors = [task.error(each) for each in found]
            fitted.before.append(errors[0])
            fitted.after.append(min(errors))
            fitted.heads.append(found[errors.index(min(errors))])
            x = stack.finish(i, x, wanted)
        step_done()
    return fitted


def run_attention(heads: LayerHeads, x: Tensor, how: Attend) -> Tensor:
    """``layer.attention`` on a few windows at a time."""
    return torch.cat([attention(heads, part, how) for part in torch.split(x, WINDOWS)])


@dataclass(frozen=True, slots=True)
class _Task:
    """Inputs and targets of one layer's attention, each ``[windows, length, hidden]``."""

    x: Tensor
    target: Tensor
    how: Attend

    def error(self, heads: LayerHeads) -> float:
        missed = (run_attention(heads, self.x, self.how) - self.target).square().sum()
        return float(missed / self.target.square().sum())

    def solve_output(self, heads: LayerHeads, ridge: float) -> LayerHeads:
        """The output projection (and its bias) with the least squared error for what these heads read."""
        size = heads.o.shape[0] * heads.o.shape[2]
        width = size + (heads.o_bias is not None)
        moment = torch.zeros(width, width, dtype=torch.float64)
        product = torch.zeros(width, heads.o.shape[1], dtype=torch.float64)
        for x, target in zip(*(torch.split(t, WINDOWS) for t in (self.x, self.target)), strict=True):
            read = context(heads, x, self.how).flatten(0, 1)
            if width > size:
                read = torch.cat((read, read.new_ones(len(read), 1)), 1)
            moment += read.T @ read
            product += read.T @ target.flatten(0, 1)
        moment += ridge * moment.diagonal().mean().clamp(min=1e-30) * torch.eye(width, dtype=torch.float64)
        solved = torch.linalg.solve(moment, product).float()
        o = solved[:size].T.reshape(-1, heads.o.shape[0], heads.head_dim).transpose(0, 1)
        return replace(heads, o=o, o_bias=None if width == size else solved[size])

    def descend(
        self, heads: LayerHeads, how: Recovery, generator: torch.Generator, step_done: Callable[[], None]
    ) -> LayerHeads:
        """Adam (arXiv 1412.6980) on every weight."""
        heads = heads.map(lambda tensor: tensor.detach().clone().requires_grad_())
        trained = [heads.q, heads.k, heads.v, heads.o] + ([] if heads.o_bias is None else [heads.o_bias])
        adam = torch.optim.Adam(trained, lr=how.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(1, how.steps))
        scale = self.target.square().mean()
        windows = max(1, how.batch // self.x.shape[1])
        for _ in range(how.steps):
            rows = torch.randperm(len(self.x), generator=generator)[:windows]
            loss = (attention(heads, self.x[rows], self.how) - self.target[rows]).square().mean() / scale
            adam.zero_grad()
            torch.autograd.backward(loss)
            if not heads.biased:
                for stack in (heads.q, heads.k, heads.v):
                    assert stack.grad is not None
                    stack.grad[..., -1] = 0.0
            adam.step()
            schedule.step()
            step_done()
        return heads.map(lambda tensor: tensor.detach())
