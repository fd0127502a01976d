"""The loop's laws: order, learning rate, dropout, checkpointing, and that encoders do learn."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_encoder
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.models.encoder import Encoder
from octavo.nn.attention import Attention
from octavo.tokenizer.encoder import Encoded, EncoderTokenizer
from octavo.training.loop import (
    Item,
    Trainer,
    epoch_batches,
    evaluate,
    lr_share,
    predict,
    steps_of,
    targets_of,
)
from octavo.training.settings import AttentionChoice, TrainSettings
from octavo.training.start import start_from
from octavo.weights.load import open_checkpoint

CHOICES = {
    "mha": AttentionChoice(kind="mha"),
    "linformer": AttentionChoice(kind="linformer", projected_len=6),
    "c2psa": AttentionChoice(kind="c2psa", compress_rate=2, topk=3),
}
each = pytest.mark.parametrize("name", list(CHOICES))


def encode(folder: Path, encoder: Encoder, examples: tuple) -> list[Item]:
    tokenizer = EncoderTokenizer(folder)
    encoded = [tokenizer.encode(e.text, max_tokens=24, truncate=False) for e in examples]
    targets = targets_of(encoder.config, [e.label for e in examples])
    return [Item(*pair) for pair in zip(encoded, targets, strict=True)]


def trainer(folder: Path, name: str, told: TrainSettings, count: int = 64) -> Trainer:
    data = tiny_encoder.labelled(count)
    start = start_from(open_checkpoint(folder), data.labels, CHOICES[name], told)
    return Trainer(start.encoder, encode(folder, start.encoder, data.train), told)


def weights(encoder: Encoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in encoder.named_parameters()}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=80), st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_has_every_example_once(lengths, size, epoch):
    items = [Item(Encoded([i] * n, [0] * n), float(i)) for i, n in enumerate(lengths)]
    told = TrainSettings(batch_size=size, seed=3)
    batches = epoch_batches(items, told, epoch)
    assert sorted(item.target for batch in batches for item in batch) == list(range(len(items)))
    assert len(batches) * told.epochs == steps_of(len(items), told)
    assert all(len(batch) <= size for batch in batches)
    assert batches == epoch_batches(items, told, epoch)
    for batch in batches:  # one length, one run
        assert [len(item.encoded.ids) for item in batch] == sorted(len(item.encoded.ids) for item in batch)


def test_seeds_and_epochs_change_the_order():
    items = [Item(Encoded([i], [0]), float(i)) for i in range(40)]
    orders = [
        [item.target for batch in epoch_batches(items, TrainSettings(seed=seed), epoch) for item in batch]
        for seed in range(2)
        for epoch in range(2)
    ]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.floats(0.0, 1.0))
def test_the_rate_rises_and_falls_along_lines(total, warmup):
    shares = [lr_share(step, total, warmup) for step in range(total)]
    assert all(0 < share <= 1 for share in shares)
    top = shares.index(max(shares))
    changes = [b - a for a, b in pairwise(shares)]
    assert all(change > 0 for change in changes[:top])
    assert all(change <= 0 for change in changes[top:])
    for part in (changes[:top], changes[top + 1 :]):
        assert max(part, default=0) - min(part, default=0) < 1e-9


@pytest.mark.parametrize(
    "name",
    ["c2psa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linformer", "mha"))],
)
def test_it_learns(tmp_path: Path, name: str) -> None:
    """From random weights, with dropout, to rows that it has not seen."""
    folder = tiny_encoder.write_encoder(tmp_path)
    told = TrainSettings(epochs=15, batch_size=16, lr=3e-3, dropout=0.05)
    run = trainer(folder, name, told, 160)
    held_out = encode(folder, run.encoder, tiny_encoder.examples(64, seed=9))
    before = evaluate(run.encoder, held_out, ("accuracy",), "cpu")["accuracy"]
    losses = [loss for _, loss in run.steps(0)]
    after = evaluate(run.encoder, held_out, ("accuracy",), "cpu")["accuracy"]
    assert before < 0.65
    # Linformer mixes positions before it looks, so that it has to learn a word at every place.
    assert after > (0.7 if name == "linformer" else 0.95)
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])


@each
def test_checkpointing_changes_no_bit(tmp_path: Path, name: str) -> None:
    folder = tiny_encoder.write_encoder(tmp_path)
    made = []
    for checkpoint in (True, False):
        run = trainer(folder, name, TrainSettings(batch_size=8, dropout=0.3, checkpoint_attention=checkpoint))
        modules = [module for module in run.encoder.modules() if isinstance(module, Attention)]
        assert all(module.checkpoint == checkpoint for module in modules)
        for step, _ in run.steps(0):
            if step == 3:
                break
        made.append(weights(run.encoder))
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])


@each
def test_dropout_is_for_training_alone(tmp_path: Path, name: str) -> None:
    folder = tiny_encoder.write_encoder(tmp_path)
    run = trainer(folder, name, TrainSettings(dropout=0.5))
    encoded = [item.encoded for item in run.items]
    first = predict(run.encoder, encoded, "cpu")
    assert torch.equal(first, predict(run.encoder, encoded, "cpu"))
    assert run.encoder.training
    # Each kind of dropout alone changes what training sees.
    for kind in ("attention", "hidden", "head"):
        model = copy.deepcopy(run.encoder)
        for module in model.modules():
            if isinstance(module, Attention) and kind != "attention":
                module.dropout = 0.0
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5 if kind == ("head" if module is model.head.dropout else "hidden") else 0.0
        losses = {
            float(Trainer(model, run.items, run.settings)._loss(list(run.items)).detach()) for _ in range(3)
        }
        assert len(losses) == 3, kind


def test_seeds_decide_everything_and_the_callers_numbers_are_left_alone(tmp_path: Path) -> None:
    folder = tiny_encoder.write_encoder(tmp_path)
    made = []
    for seed, others in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(others)
        want = torch.rand(1)
        torch.manual_seed(others)
        run = trainer(folder, "c2psa", TrainSettings(seed=seed, batch_size=16, epochs=1))
        list(run.steps(0))
        assert torch.equal(torch.rand(1), want)
        made.append(weights(run.encoder))
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])
    assert not torch.equal(made[0]["head.out.weight"], made[2]["head.out.weight"])


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    run = trainer(tiny_encoder.write_encoder(tmp_path), "mha", TrainSettings())
    with torch.no_grad():
        run.encoder.head.out.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="the loss of step 1 is nan: the run has diverged"):
        list(run.steps(0))
