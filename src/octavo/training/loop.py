"""The loop: epochs of batches, AdamW, and a state after every so many steps."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from octavo.encoder_config import EncoderConfig
from octavo.engine.encoder import in_batches, pack
from octavo.models.encoder import Encoder
from octavo.tokenizer.encoder import Encoded
from octavo.training.metrics import measure
from octavo.training.settings import TrainSettings

#: Batches whose texts are sorted by length together: alike lengths share attention calls.
POOL = 16


class Item(NamedTuple):
    """An encoded example; ``target`` is the number of its class, or the value of a regression."""

    encoded: Encoded
    target: float


@dataclass(slots=True)
class History:
    """``losses`` has each step's, ``measured`` each epoch's metrics by set and name."""

    losses: list[float] = field(default_factory=list)
    measured: list[dict[str, dict[str, float]]] = field(default_factory=list)


def epoch_batches(items: Sequence[Item], settings: TrainSettings, epoch: int) -> list[list[Item]]:
    """An epoch's batches, a function of the seed and the epoch alone; each example once.

    Examples are shuffled, pools of a few batches sorted by length and cut, and the batches shuffled.
    """
    draw = random.Random(f"{settings.seed} order {epoch}")
    order = list(items)
    draw.shuffle(order)
    size = settings.batch_size
    batches = []
    for start in range(0, len(order), size * POOL):
        pool = sorted(order[start : start + size * POOL], key=lambda item: len(item.encoded.ids))
        batches += [pool[at : at + size] for at in range(0, len(pool), size)]
    draw.shuffle(batches)
    return batches


def steps_of(num_items: int, settings: TrainSettings) -> int:
    """Steps of the whole run."""
    total = settings.epochs * math.ceil(num_items / settings.batch_size)
    return total if settings.max_steps is None else min(total, settings.max_steps)


def lr_share(step: int, total: int, warmup: float) -> float:
    """The share of the full learning rate in step ``step`` (from 0) of ``total``: up along a line, then down.

    Never 0, so that no step is lost: the first of w warm-up steps has 1 / w, the last step 1 / (total - w).
    """
    rising = math.ceil(total * warmup)
    if step < rising:
        return (step + 1) / rising
    return (total - step) / (total - rising)


def make_optimizer(encoder: Encoder, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW; vectors (biases and norms) do not decay."""
    matrices = [p for p in encoder.parameters() if p.dim() > 1]
    vectors = [p for p in encoder.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, fused=True)


class Trainer:
    """Runs steps; one depends on the weights, the moments, the seed and its own number alone."""

    def __init__(self, encoder: Encoder, items: Sequence[Item], settings: TrainSettings) -> None:
        self.encoder, self.items, self.settings = encoder, items, settings
        self.optimizer = make_optimizer(encoder, settings)
        self.total = steps_of(len(items), settings)
        self.steps_per_epoch = math.ceil(len(items) / settings.batch_size)

    def steps(self, first: int) -> Iterator[tuple[int, float]]:
        """Train from step ``first`` on; yields each step's number, from 1, and its loss, when it is done.

        Raises ValueError where the loss is no finite number.
        """
        for step in range(first, self.total):
            epoch, at = divmod(step, self.steps_per_epoch)
            if at == 0 or step == first:
                batches = epoch_batches(self.items, self.settings, epoch)
            yield step + 1, self._step(step, batches[at])

    def _step(self, step: int, batch: list[Item]) -> float:
        # torch's generator is the process's own: it is put back as it was.
        devices = [] if self.settings.device == "cpu" else [self.settings.device]
        with torch.random.fork_rng(devices):
            torch.manual_seed(_step_seed(self.settings.seed, step))
            loss = self._loss(batch)
            torch.autograd.backward(loss)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ValueError(
                f"the loss of step {step + 1} is {value}: the run has diverged, try a lower learning rate"
            )
        torch.nn.utils.clip_grad_norm_(self.encoder.parameters(), self.settings.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * lr_share(step, self.total, self.settings.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def _loss(self, batch: list[Item]) -> torch.Tensor:
        config, device = self.encoder.config, self.settings.device
        logits = self.encoder.classify(pack([item.encoded for item in batch], config, device))
        targets = torch.tensor([item.target for item in batch], device=device)
        if len(config.labels) == 1:
            return F.mse_loss(logits[:, 0], targets)
        return F.cross_entropy(logits, targets.long())


def evaluate(
    encoder: Encoder, items: Sequence[Item], metrics: Sequence[str], device: str
) -> dict[str, float]:
    """Each metric on ``items``, without dropout; the encoder is left as it was."""
    logits = predict(encoder, [item.encoded for item in items], device)
    found = logits[:, 0] if len(encoder.config.labels) == 1 else logits.argmax(-1)
    return measure(metrics, found.tolist(), [item.target for item in items])


def predict(encoder: Encoder, encoded: Sequence[Encoded], device: str) -> torch.Tensor:
    """Logits ``[len(encoded), labels]`` without dropout; the encoder is left as it was."""
    was_training = encoder.training
    encoder.eval()
    try:
        with torch.inference_mode():
            return in_batches(encoded, encoder.config, encoder.classify, len(encoder.config.labels), device)
    finally:
        encoder.train(was_training)


def targets_of(config: EncoderConfig, labels: Sequence[str | float]) -> list[float]:
    """Labels as the numbers that the loss takes."""
    if len(config.labels) == 1:
        return [float(label) for label in labels]
    numbers = {label: i for i, label in enumerate(config.labels)}
    return [numbers[str(label)] for label in labels]


def _step_seed(seed: int, step: int) -> int:
    return random.Random(f"{seed} step {step}").getrandbits(63)


def progress_of(step: int, history: History) -> dict[str, Any]:
    """What goes into a state beside weights and moments."""
    return {"step": step, "losses": history.losses, "measured": history.measured}
