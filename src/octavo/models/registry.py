"""The table of models: by which names checkpoints know an architecture, and how their tensors map.

The canonical names are those of Hugging Face's Llama: ``model.embed_tokens.weight``,
``model.layers.N.self_attn.q_proj.weight``, ``model.norm.weight``, ``lm_head.weight`` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.model_metadata import ARCHITECTURES


class Weight(Protocol):
    """What is asked of a weight here, be it a tensor or a matrix in its stored bits."""

    @property
    def shape(self) -> Any: ...

    def dim(self) -> int: ...

    def t(self) -> Any: ...

    def chunk(self, chunks: int, /) -> Any: ...


Named = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """One row: ``hf_class`` (``architectures`` in config.json), ``model_type``, ``gguf`` (its
    ``general.architecture``, or None where it has none of its own), and ``canonical``, which turns one
    tensor of a Hugging Face checkpoint into canonical ones (none for a buffer that is not a weight)."""

    hf_class: str
    model_type: str
    gguf: str | None
    canonical: Callable[[str, Weight], Iterable[Named]]


def _llama_like(name: str, tensor: Weight) -> Iterator[Named]:
    if not name.endswith("rotary_emb.inv_freq"):  # a constant that old checkpoints carry along
        yield name, tensor


_GPT2_TOP = {
    "wte.weight": "model.embed_tokens.weight",
    "wpe.weight": "model.embed_positions.weight",
    "ln_f.weight": "model.norm.weight",
    "ln_f.bias": "model.norm.bias",
    "lm_head.weight": "lm_head.weight",
}
_GPT2_LAYER = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attn.{}_proj",
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_GPT2_NAME = re.compile(r"h\.(\d+)\.(.+)\.(weight|bias)")
_GPT2_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def _gpt2(name: str, tensor: Weight) -> Iterator[Named]:
    """GPT-2 stores its matrices ``[in, out]``, and q, k and v as one."""
    short = name.removeprefix("transformer.")
    match = _GPT2_NAME.fullmatch(short)
    if short in _GPT2_TOP:
        yield _GPT2_TOP[short], tensor
    elif match is not None and match[2] in _GPT2_LAYER:
        target = f"model.layers.{match[1]}.{_GPT2_LAYER[match[2]]}.{match[3]}"
        tensor = tensor.t() if tensor.dim() == 2 else tensor
        if "{}" not in target:
            yield target, tensor
        elif tensor.shape[0] % 3:
            raise ValueError(f"{name} must hold q, k and v, but its {tensor.shape[0]} columns are not 3 x n")
        else:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                yield target.format(part), piece
    elif _GPT2_BUFFER.fullmatch(short) is None:  # the causal mask is no weight
        yield name, tensor


_CANONICAL = {"gpt2": _gpt2}

MODELS = {
    row.name: Model(row.hf_class, row.model_type, row.gguf, _CANONICAL.get(row.name, _llama_like))
    for row in ARCHITECTURES
}


def canonical(architecture: str, name: str, tensor: Weight) -> Iterable[Named]:
    """The canonical (name, tensor) pairs of one tensor of a Hugging Face checkpoint.

    A name that the architecture does not know is passed on, for the loader to report. Views are
    returned where they do; nothing is copied.
    """
    return MODELS[architecture].canonical(name, tensor)
