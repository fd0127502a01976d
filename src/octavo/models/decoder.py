"""The decoder in plain torch: the reference, and the path for other devices and attention backends.

``ModelConfig`` makes it a Llama, Mistral, Qwen2, Qwen3, Gemma 3 or GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.cache.kv_cache import KVCache
from octavo.config import ModelConfig
from octavo.models import parts
from octavo.models.layers import DecoderLayer, Norm, Slot, Step, parameter
from octavo.models.rope import RopeTable


class Decoder(nn.Module):
    """A decoder with uninitialised float32 parameters, to be filled by ``load_weight``.

    ``forward`` gives the hidden states *before* the final norm; ``logits`` applies it, to the rows
    whose logits are wanted and no others.
    """

    def __init__(self, config: ModelConfig, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embed_tokens = parameter(config.vocab_size, hidden, device=device)
        learned, rotary = config.positions == "learned", config.positions == "rope"
        rows = config.max_position_embeddings
        self.embed_positions = parameter(rows, hidden, device=device) if learned else None
        self.layers = nn.ModuleList(DecoderLayer(config, i, device=device) for i in range(config.num_layers))
        self.norm = Norm(config, parts.FINAL_NORM, device=device)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else parameter(config.vocab_size, hidden, device=device)
        has_factors = rotary and config.rope.scaling == "factors"
        self.rope_factors = parameter(config.head_dim // 2, device=device) if has_factors else None
        ropes = [config.layer_rope(i) if rotary else None for i in range(config.num_layers)]
        self._ropes = ropes
        self._tables = {
            rope: RopeTable(rope, config.head_dim, device, self.rope_factors)
            for rope in dict.fromkeys(ropes)
            if rope is not None
        }

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """Compute one step: K and V of its tokens go to the cache, the result is ``[num_tokens, hidden]``.

        Every position must be below ``config.max_position_embeddings``.
        """
        turns = [
            self._tables[rope].turns() if rope is not None and batch.turns_keys else None
            for rope in self._ropes
        ]
        step = Step(batch, kv_cache, attention, attention.plan(batch), turns)
        x = F.embedding(batch.token_ids, self.embed_tokens)
        if self.config.embedding_scale != 1.0:
            x *= self.config.embedding_scale
        if self.embed_positions is not None:
            x += F.embedding(batch.positions, self.embed_positions)
        rotations = {rope: table.at(batch.positions) for rope, table in self._tables.items()}
        for layer, rope in zip(self.layers, self._ropes, strict=True):
            x = layer(x, step, None if rope is None else rotations[rope])
        return x

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Final norm and vocabulary, ``[m, vocab]`` float32, for ``rows`` ``[m]`` of ``forward``."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(self.norm(hidden[rows]), head).float()

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor that a checkpoint must bring, each exactly once."""
        shapes = {name: slot.shape for name, slot in self._root_slots()}
        for i in range(self.config.num_layers):
            shapes |= {f"model.layers.{i}.{name}": slot.shape for name, slot in self._layer_slots(i)}
        return shapes

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` (any float dtype) into the parameter, or part of one, called ``name``.

        Raises ValueError for a name that this model does not have or a wrong shape.
        """
        slot = self._slot(name)
        if slot is None:
            raise ValueError(f"this {self.config.architecture} model has no weight called {name!r}")
        if tuple(tensor.shape) != slot.shape:
            raise ValueError(f"{name} must have shape {slot.shape}, the checkpoint has {tuple(tensor.shape)}")
        slot.load(tensor)

    def _slot(self, name: str) -> Slot | None:
        index, rest = parts.split_name(name)
        if index is None:
            return dict(self._root_slots()).get(rest)
        return dict(self._layer_slots(index)).get(rest) if index < self.config.num_layers else None

    def _layer_slots(self, index: int) -> Iterator[tuple[str, Slot]]:
        return cast(DecoderLayer, self.layers[index]).slots()

    def _root_slots(self) -> Iterator[tuple[str, Slot]]:
        tensors = {
            parts.EMBEDDING: self.embed_tokens,
            parts.PLACES: self.embed_positions,
            parts.HEAD: self.lm_head,
            parts.ROPE_FACTORS: self.rope_factors,
        }
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, Slot(tensor, tuple(tensor.shape))
        yield from self.norm.slots()
