"""What training starts from: heads kept or new, attention in another's place, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_encoder
import torch
from safetensors.torch import load_file, save_file

from octavo.models.encoder import Encoder
from octavo.nn import C2PSA, LinformerAttention, MultiHeadAttention
from octavo.tokenizer.encoder import EncoderTokenizer
from octavo.training.loop import predict
from octavo.training.settings import AttentionChoice, TrainSettings
from octavo.training.start import start_from
from octavo.weights.load import open_checkpoint

LABELS = ("down", "up")
HEAD = {
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "down", "1": "up"},
}
family = pytest.mark.parametrize("family", list(tiny_encoder.CONFIGS))


def start(folder: Path, labels: tuple[str, ...] = LABELS, seed: int = 0, **choice: Any) -> Any:
    told = TrainSettings(seed=seed)
    return start_from(open_checkpoint(folder), labels, AttentionChoice(**choice), told)


def logits(folder: Path, encoder: Encoder) -> torch.Tensor:
    tokenizer = EncoderTokenizer(folder)
    texts = [example.text for example in tiny_encoder.examples(20)]
    encoded = [tokenizer.encode(text, max_tokens=24, truncate=False) for text in texts]
    return predict(encoder, encoded, "cpu")


@family
def test_one_head_a_group_and_every_key_is_the_model_itself(tmp_path: Path, family: str) -> None:
    folder = tiny_encoder.write_encoder(tmp_path, family)
    want = logits(folder, start(folder).encoder)
    got = start(folder, kind="c2psa", compress_rate=1, topk=24)
    assert all(isinstance(layer.attention, C2PSA) for layer in got.encoder.layers)
    torch.testing.assert_close(logits(folder, got.encoder), want, atol=1e-5, rtol=1e-5)


@family
@pytest.mark.parametrize("rate", [2, 4])
def test_equal_heads_of_a_group_are_pooled_without_loss(tmp_path: Path, family: str, rate: int) -> None:
    """Heads that agree already share a projection, whatever the output projection does with each."""
    folder = tiny_encoder.write_encoder(tmp_path, family)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if any(part in name for part in (".query.", ".key.", ".value.", ".q_lin.", ".k_lin.", ".v_lin.")):
            heads = tensor.view(4 // rate, rate, 8, *tensor.shape[1:])
            tensors[name] = heads[:, :1].expand_as(heads).reshape(tensor.shape).contiguous()
    save_file(tensors, file)
    want = logits(folder, start(folder).encoder)
    got = start(folder, kind="c2psa", compress_rate=rate, topk=24)
    assert got.encoder.layers[0].attention.q_proj.weight.shape == (32 // rate, 32)
    torch.testing.assert_close(logits(folder, got.encoder), want, atol=1e-5, rtol=1e-5)


@family
def test_turned_copies_of_a_head_are_found_wherever_they_stand(tmp_path: Path, family: str) -> None:
    """Heads 0 and 2 are one head in other coordinates, and so are 1 and 3: fewer heads lose nothing."""
    folder = tiny_encoder.write_encoder(tmp_path, family)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    turn = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
    for name, tensor in tensors.items():
        if any(part in name for part in (".query.", ".key.", ".value.", ".q_lin.", ".k_lin.", ".v_lin.")):
            heads = tensor.view(4, 8, -1)
            tensors[name] = torch.cat([heads[:2], turn @ heads[:2]]).reshape(tensor.shape).contiguous()
    save_file(tensors, file)
    want = logits(folder, start(folder).encoder)
    got = start(folder, kind="c2psa", compress_rate=2, topk=24)
    torch.testing.assert_close(logits(folder, got.encoder), want, atol=1e-4, rtol=1e-4)


def test_the_attention_that_is_asked_for(tmp_path: Path) -> None:
    folder = tiny_encoder.write_encoder(tmp_path)
    kinds = {
        MultiHeadAttention: {},
        C2PSA: {"kind": "c2psa"},
        LinformerAttention: {"kind": "linformer"},
    }
    for kind, choice in kinds.items():
        assert type(start(folder, **choice).encoder.layers[0].attention) is kind
    c2psa = start(folder, kind="c2psa").encoder.layers[0].attention
    assert (c2psa.compress_rate, c2psa.topk) == (2, 64)
    linformer = start(folder, kind="linformer", projected_len=5).encoder.layers[1].attention
    assert linformer.key_mix.shape == (5, 24)


def test_a_head_for_the_same_labels_is_kept_and_another_is_new(tmp_path: Path) -> None:
    folder = tiny_encoder.write_encoder(tmp_path, **HEAD)
    stored = load_file(folder / "model.safetensors")["classifier.weight"]
    kept = start(folder)
    assert torch.equal(kept.encoder.head.out.weight, stored)
    assert kept.notes == ()
    new = start(folder, labels=("a", "b"))
    assert new.notes == ("a new head for a, b",)
    assert not torch.equal(new.encoder.head.out.weight, stored)
    assert torch.equal(new.encoder.head.out.weight, start(folder, labels=("a", "b")).encoder.head.out.weight)
    # BERT's dense layer is the pooler that its pretraining made.
    assert torch.equal(new.encoder.head.dense.weight, kept.encoder.head.dense.weight)
    again = start(folder, labels=("a", "b"), seed=1).encoder.head.out.weight
    assert not torch.equal(new.encoder.head.out.weight, again)


def test_a_converted_checkpoint_stays_what_it_is(tmp_path: Path) -> None:
    folder = tiny_encoder.write_encoder(tmp_path, c2psa={"compress_rate": 2, "topk": 3})
    for choice in ({}, {"kind": "c2psa"}, {"kind": "c2psa", "compress_rate": 2}):
        found = start(folder, **choice)
        assert found.metadata["c2psa"] == {"compress_rate": 2, "topk": 3}
        assert torch.equal(
            found.encoder.layers[1].attention.k_proj.weight,
            load_file(folder / "model.safetensors")["bert.encoder.layer.1.attention.self.key.weight"],
        )
    assert start(folder, kind="c2psa", topk=5).metadata["c2psa"] == {"compress_rate": 2, "topk": 5}


@pytest.mark.parametrize(
    ("changes", "choice", "reason"),
    [
        ({}, {"kind": "c2psa", "compress_rate": 3}, r"divide num_heads=4 \(1, 2, 4\), got 3"),
        ({}, {"compress_rate": 2}, "belong to c2psa, the attention is mha"),
        ({}, {"kind": "linformer", "topk": 2}, "belong to c2psa, the attention is linformer"),
        ({}, {"kind": "c2psa", "projected_len": 2}, "belongs to linformer, the attention is c2psa"),
        ({}, {"kind": "linformer", "projected_len": 25}, "at most the model's 24 tokens, got 25"),
        (
            {"c2psa": {"compress_rate": 2, "topk": 3}},
            {"kind": "mha"},
            "has c2psa attention, which cannot become mha",
        ),
        (
            {"c2psa": {"compress_rate": 2, "topk": 3}},
            {"compress_rate": 4},
            "has compress_rate 2 already, got 4",
        ),
        (
            {"linformer": {"projected_len": 3, "max_len": 9}},
            {"projected_len": 4},
            "has projected_len 3, got 4",
        ),
    ],
)
def test_attention_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], choice: dict[str, Any], reason: str
) -> None:
    folder = tiny_encoder.write_encoder(tmp_path, **changes)
    with pytest.raises(ValueError, match=reason):
        start(folder, **choice)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            lambda: AttentionChoice(kind="flash"),
            "attention must be one of mha, linformer, c2psa, got 'flash'",
        ),
        (lambda: AttentionChoice(topk=0), "topk must be a whole number of at least 1, got 0"),
        (lambda: TrainSettings(epochs=0), "epochs must be a whole number of at least 1"),
        (lambda: TrainSettings(lr=0.0), "lr must be more than 0 and at most 1, got 0.0"),
        (lambda: TrainSettings(lr=float("nan")), "lr must be"),
        (lambda: TrainSettings(warmup=1.5), "warmup must be at least 0 and at most 1"),
        (lambda: TrainSettings(max_grad_norm=float("inf")), "max_grad_norm must be finite"),
        (lambda: TrainSettings(dropout=1.0), "dropout must be at least 0 and less than 1"),
        (lambda: TrainSettings(device="tpu"), "device must be cpu, cuda or cuda:N, got 'tpu'"),
        (lambda: TrainSettings(seed=-1), "seed must be a whole number from 0"),
    ],
)
def test_settings_out_of_range_are_refused(made: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        made()
