"""One encoder for the families of BERT, on packed tokens: nothing is padded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from octavo.encoder_config import EncoderConfig
from octavo.nn import C2PSA, LinformerAttention, MultiHeadAttention
from octavo.nn.attention import Attention

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class EncoderBatch(NamedTuple):
    """Texts one behind the other, the same lengths side by side.

    ``token_ids``, ``positions`` and ``segments`` are ``[num_tokens]`` int64; ``runs`` lists
    (texts, tokens of each). Two texts of 3 tokens and one of 5: runs ((2, 3), (1, 5)), 11 tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    runs: tuple[tuple[int, int], ...]


class Embeddings(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.segment = (
            nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, batch: EncoderBatch) -> torch.Tensor:
        x: torch.Tensor = self.word(batch.token_ids) + self.position(batch.positions)
        if self.segment is not None:
            x = x + self.segment(batch.segments)
        normed: torch.Tensor = self.dropout(self.norm(x))
        return normed


class EncoderLayer(nn.Module):
    """Attention and MLP, each added to what it read and then normed."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = make_attention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: torch.Tensor, runs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        x = self.attention_norm(x + self.dropout(self.attention.packed(x, runs)))
        change = self.down_proj(self.activation(self.up_proj(x)))
        out: torch.Tensor = self.mlp_norm(x + self.dropout(change))
        return out


class Head(nn.Module):
    """Classes from the first token's vector: a dense layer, tanh or relu, and the output layer.

    In training a share of what the output layer reads is dropped, and in RoBERTa of what the dense one reads.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.out = nn.Linear(config.hidden_size, len(config.labels))
        self.activation = F.relu if config.family == "distilbert" else torch.tanh
        self.dropout = nn.Dropout(config.head_dropout)
        self.drops_first = config.family == "roberta"

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        first = self.dropout(first) if self.drops_first else first
        logits: torch.Tensor = self.out(self.dropout(self.activation(self.dense(first))))
        return logits


class Encoder(nn.Module):
    """Packed tokens to vectors. A ``weights.load.Target``: its canonical names are its own parameters'."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.head = Head(config) if config.labels else None

    def forward(self, batch: EncoderBatch) -> torch.Tensor:
        """``[num_tokens, hidden]``, the last layer's output."""
        x: torch.Tensor = self.embeddings(batch)
        for layer in self.layers:
            x = layer(x, batch.runs)
        return x

    def embed(self, batch: EncoderBatch) -> torch.Tensor:
        """One vector a text, ``[num_texts, hidden]``, pooled and normalised as the checkpoint says."""
        return torch.cat([self.pool(x) for x in _texts(self(batch), batch.runs)])

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        """The vectors of texts of one length, ``[texts, hidden]``, from ``[texts, tokens, hidden]``."""
        pooled = x.mean(1) if self.config.pooling == "mean" else x[:, 0]
        return F.normalize(pooled, dim=-1) if self.config.normalize else pooled

    def classify(self, batch: EncoderBatch) -> torch.Tensor:
        """Logits ``[num_texts, num_labels]``. Raises ValueError for a checkpoint without a head."""
        if self.head is None:
            raise ValueError("this checkpoint has no classification head: only embed() works")
        hidden = self(batch)
        logits: torch.Tensor = self.head(torch.cat([x[:, 0] for x in _texts(hidden, batch.runs)]))
        return logits

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """See ``octavo.weights.load.Target``."""
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        """See ``octavo.weights.load.Target``."""
        self.get_parameter(name).copy_(tensor)


def make_attention(config: EncoderConfig) -> Attention:
    """The attention that the checkpoint was made with."""
    sizes = (config.hidden_size, config.num_heads)
    dropout = config.attention_dropout
    if config.compress_rate is not None and config.topk is not None:
        return C2PSA(*sizes, config.compress_rate, config.topk, dropout=dropout)
    if config.projected_len is not None and config.projected_max is not None:
        return LinformerAttention(*sizes, config.projected_len, config.projected_max, dropout=dropout)
    return MultiHeadAttention(*sizes, dropout=dropout)


def _texts(x: torch.Tensor, runs: tuple[tuple[int, int], ...]) -> Iterator[torch.Tensor]:
    """Each run as ``[texts, tokens, hidden]``, a view."""
    parts = torch.split(x, [count * length for count, length in runs])
    for part, (count, length) in zip(parts, runs, strict=True):
        yield part.view(count, length, -1)


_EMBEDDINGS = {
    "word_embeddings": "word",
    "position_embeddings": "position",
    "token_type_embeddings": "segment",
    "LayerNorm": "norm",
}
_LAYER = {
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.output.dense": "attention.out_proj",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up_proj",
    "output.dense": "down_proj",
    "output.LayerNorm": "mlp_norm",
}
_DISTILBERT_LAYER = {
    "attention.q_lin": "attention.q_proj",
    "attention.k_lin": "attention.k_proj",
    "attention.v_lin": "attention.v_proj",
    "attention.out_lin": "attention.out_proj",
    "sa_layer_norm": "attention_norm",
    "ffn.lin1": "up_proj",
    "ffn.lin2": "down_proj",
    "output_layer_norm": "mlp_norm",
}
_LAYER_NAMES = _LAYER | _DISTILBERT_LAYER
# No published checkpoint has these: Linformer's projections along the sequence.
_PROJECTIONS = ("attention.self.key_mix", "attention.self.value_mix")
_HEAD = {
    "bert": {"pooler.dense": "head.dense", "classifier": "head.out"},
    "roberta": {"classifier.dense": "head.dense", "classifier.out_proj": "head.out"},
    "distilbert": {"pre_classifier": "head.dense", "classifier": "head.out"},
}
_LAYER_NAME = re.compile(r"(?:encoder|transformer)\.layer\.(\d+)\.(.+)")
# Heads for other purposes, which checkpoints bring along, and a table that is no weight.
_NOT_NEEDED = re.compile(r"(cls|lm_head|vocab_\w+|pooler)\..*|embeddings\.position_ids")


def canonical(config: EncoderConfig, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The encoder's name for a checkpoint's tensor; a name that is not known is passed on, to be reported."""
    short = name.removeprefix(f"{config.family}.")
    match = _LAYER_NAME.fullmatch(short)
    if match is not None and match[2] in _PROJECTIONS:
        yield f"layers.{match[1]}.{match[2].replace('self.', '')}", tensor
        return
    stem, _, kind = short.rpartition(".")
    kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)
    match = _LAYER_NAME.fullmatch(stem)
    head = _HEAD[config.family] if config.labels else {}
    if match is not None and match[2] in _LAYER_NAMES:
        yield f"layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}", tensor
    elif stem.startswith("embeddings.") and stem.removeprefix("embeddings.") in _EMBEDDINGS:
        yield f"embeddings.{_EMBEDDINGS[stem.removeprefix('embeddings.')]}.{kind}", tensor
    elif stem in head:
        yield f"{head[stem]}.{kind}", tensor
    elif _NOT_NEEDED.fullmatch(short) is None:
        yield name, tensor


def checkpoint_name(config: EncoderConfig, name: str) -> str:
    """The inverse of ``canonical``: a parameter's name in a checkpoint of its family with classes."""
    stem, _, kind = name.rpartition(".")
    room, _, rest = stem.partition(".")
    if room == "head":
        names = {ours: theirs for theirs, ours in _HEAD[config.family].items()}
        theirs = f"{names[stem]}.{kind}"
        return f"bert.{theirs}" if theirs.startswith("pooler.") else theirs
    if room == "embeddings":
        names = {ours: theirs for theirs, ours in _EMBEDDINGS.items()}
        return f"{config.family}.embeddings.{names[rest]}.{kind}"
    number, _, part = rest.partition(".")
    distil = config.family == "distilbert"
    tower, parts = ("transformer", _DISTILBERT_LAYER) if distil else ("encoder", _LAYER)
    start = f"{config.family}.{tower}.layer.{number}"
    if part == "attention":
        return f"{start}.attention.self.{kind}"
    names = {ours: theirs for theirs, ours in parts.items()}
    return f"{start}.{names[part]}.{kind}"
