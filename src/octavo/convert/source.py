"""The checkpoint that is converted: what it is, and the heads of its layers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.config import ModelConfig
from octavo.convert.align import Family
from octavo.convert.heads import HeadCounts, LayerHeads
from octavo.encoder_config import EncoderConfig
from octavo.engine.build import read_config
from octavo.engine.encoder import is_encoder, read_encoder_config
from octavo.models import encoder as encoders
from octavo.models import registry
from octavo.weights.load import Checkpoint
from octavo.weights.stored import float32

#: Decoders whose heads may be turned: the others norm q and k head by head, or have their own names and
#: layout.
DECODERS = ("llama", "mistral", "qwen2")

_ATTENTION = re.compile(
    r"(?:model\.)?layers\.(\d+)\.(?:self_attn|attention)\.(q|k|v|o|out)_proj\.(weight|bias)"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that can be converted. ``config`` tells which kind of model it is."""

    checkpoint: Checkpoint
    config: ModelConfig | EncoderConfig

    @property
    def is_decoder(self) -> bool:
        return isinstance(self.config, ModelConfig)

    @property
    def counts(self) -> HeadCounts:
        config = self.config
        return HeadCounts(
            config.num_heads, config.num_kv_heads if isinstance(config, ModelConfig) else config.num_heads
        )

    @property
    def family(self) -> Family:
        """What may turn q and k."""
        return "phases" if isinstance(self.config, ModelConfig) else "orthogonal"

    def attention_part(self, name: str) -> tuple[int, str] | None:
        """Layer and part, as ``LayerHeads.cut`` calls it, of an attention weight; None for any other.

        For these families the engine's name for a weight follows from its name alone.
        """
        config = self.config
        if isinstance(config, ModelConfig):
            named = list(registry.canonical(config.architecture, name, torch.empty(0)))
        else:
            named = list(encoders.canonical(config, name, torch.empty(0)))
        match = _ATTENTION.fullmatch(named[0][0]) if named else None
        if match is None:
            return None
        return int(match[1]), f"{match[2].removesuffix('ut')}.{match[3]}"

    def heads(self) -> list[LayerHeads]:
        """The heads of every layer, float32, in memory of their own. Raises ValueError where one lacks."""
        layers: list[dict[str, Tensor]] = [{} for _ in range(self.config.num_layers)]
        for name, weight in self.checkpoint.weights():
            place = self.attention_part(name)
            if place is not None and place[0] < len(layers):
                layers[place[0]][place[1]] = float32(weight).clone()
        for i, layer in enumerate(layers):
            for role in "qkvo":
                if f"{role}.weight" not in layer:
                    raise ValueError(f"layer {i} of {self.checkpoint.path.name} lacks its {role}_proj weight")
        return [LayerHeads.cut(layer, self.config.head_dim) for layer in layers]


def read_source(checkpoint: Checkpoint) -> Source:
    """Raises ValueError, in one sentence, for a model that cannot be converted."""
    name = checkpoint.path.name
    if checkpoint.kind == "hf" and checkpoint.metadata.get("c2psa") is not None:
        raise ValueError(
            f"{name} is converted already (config.json has the key 'c2psa'): convert its original"
        )
    if is_encoder(checkpoint):
        return Source(checkpoint, read_encoder_config(checkpoint))
    config = read_config(checkpoint)
    if config.architecture not in DECODERS:
        raise ValueError(
            f"{name} is a {config.architecture} model; what can be converted are "
            f"{', '.join(DECODERS)}, bert, roberta and distilbert"
        )
    if config.rope.scaling == "factors":
        raise ValueError(
            f"{name} brings rope factors of its own, which config.json cannot state: convert the safetensors"
        )
    return Source(checkpoint, config)
