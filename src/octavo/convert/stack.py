"""A model as a stack of layers whose attention can be exchanged, for many windows of one length at a time.

The layers' norms and MLPs are the engine's own modules, the attention is ``layer.attention`` with any heads.
A window starts at position 0 and sees no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.config import ModelConfig
from octavo.convert.heads import LayerHeads
from octavo.convert.layer import Attend, attention
from octavo.encoder_config import EncoderConfig
from octavo.models import encoder as encoders
from octavo.models import registry
from octavo.models.decoder import Decoder
from octavo.models.encoder import Encoder, EncoderBatch, EncoderLayer
from octavo.models.layers import DecoderLayer
from octavo.models.rope import RopeTable
from octavo.weights.load import Checkpoint, load_model

#: Tokens that an MLP sees at once.
CHUNK = 4096
#: Windows that attention sees at once where nothing is differentiated.
WINDOWS = 16


class Stack(Protocol):
    """``x`` is ``[windows, length, hidden]`` everywhere."""

    num_layers: int

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[windows, length]`` to the first layer's input."""
        ...

    def attends(self, layer: int, length: int, topk: int | None) -> Attend:
        """How a layer attends over windows of ``length``."""
        ...

    def attention_input(self, layer: int, x: Tensor) -> Tensor:
        """What the attention of a layer is given of the layer's input ``x``."""
        ...

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, from its input and its attention's output."""
        ...

    def outcome(self, x: Tensor) -> Tensor:
        """Of the last layer's output: what a user gets, logits or one vector a window."""
        ...


def run(stack: Stack, heads: Sequence[LayerHeads], ids: Tensor, topk: int | None = None) -> Tensor:
    """The last layer's output with these heads in place of the model's own."""
    x = stack.embed(ids)
    for i, layer_heads in enumerate(heads):
        how = stack.attends(i, ids.shape[1], topk)
        x = stack.finish(i, x, attention(layer_heads, stack.attention_input(i, x), how))
    return x


class DecoderStack:
    """See Stack. For ``source.DECODERS`` alone: no norm of heads, none after attention."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.config = decoder.config
        self.num_layers = self.config.num_layers

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._decoder.embed_tokens)

    def attends(self, layer: int, length: int, topk: int | None) -> Attend:
        config = self.config
        table = RopeTable(config.layer_rope(layer), config.head_dim, "cpu", self._decoder.rope_factors)
        rotation = table.at(torch.arange(length))
        return Attend(config.softmax_scale, True, rotation, config.window(layer), topk)

    def attention_input(self, layer: int, x: Tensor) -> Tensor:
        normed: Tensor = self._layer(layer).input_norm(x)
        return normed

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        own = self._layer(layer)
        x = x + attended
        return x + _in_chunks(lambda part: own.mlp(own.mlp_norm(part)), x)

    def outcome(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0] * x.shape[1])
        return self._decoder.logits(x.flatten(0, 1), rows).view(*x.shape[:2], -1)

    def _layer(self, index: int) -> DecoderLayer:
        return cast(DecoderLayer, self._decoder.layers[index])


class EncoderStack:
    """See Stack."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.config = encoder.config
        self.num_layers = self.config.num_layers

    def embed(self, ids: Tensor) -> Tensor:
        windows, length = ids.shape
        first = self.config.first_position
        positions = torch.arange(first, first + length).repeat(windows)
        flat = ids.flatten()
        batch = EncoderBatch(flat, positions, torch.zeros_like(flat), ((windows, length),))
        x: Tensor = self._encoder.embeddings(batch)
        return x.view(windows, length, -1)

    def attends(self, layer: int, length: int, topk: int | None) -> Attend:
        return Attend(self.config.head_dim**-0.5, causal=False, topk=topk)

    def attention_input(self, layer: int, x: Tensor) -> Tensor:
        return x

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        own = cast(EncoderLayer, self._encoder.layers[layer])
        x = own.attention_norm(x + attended)

        def mlp(part: Tensor) -> Tensor:
            out: Tensor = own.mlp_norm(part + own.down_proj(own.activation(own.up_proj(part))))
            return out

        return _in_chunks(mlp, x)

    def outcome(self, x: Tensor) -> Tensor:
        return self._encoder.pool(x)


def load_stack(checkpoint: Checkpoint, config: ModelConfig | EncoderConfig) -> DecoderStack | EncoderStack:
    """Load a checkpoint's own weights in float32."""
    if isinstance(config, ModelConfig):
        decoder = Decoder(config)
        canonical = partial(registry.canonical, config.architecture)
        load_model(decoder, checkpoint, tied=config.tie_word_embeddings, canonical=canonical)
        return DecoderStack(decoder)
    encoder = Encoder(config).requires_grad_(False).eval()
    load_model(encoder, checkpoint, tied=False, canonical=partial(encoders.canonical, config))
    return EncoderStack(encoder)


def _in_chunks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([function(part) for part in torch.split(x.flatten(0, 1), CHUNK)]).view(x.shape)
