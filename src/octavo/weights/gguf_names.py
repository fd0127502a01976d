"""GGUF's tensor names and layouts in Hugging Face's terms: one table for each architecture.

Three layouts differ and are undone here. Architecture "llama" (and only it) stores the rows of each Q and K
head as interleaved rotary pairs (0, d/2, 1, d/2+1, ...), where HF has the two halves one after the other.
"gemma3" stores norm weights as 1 + w. "gpt2" stores linear weights [out, in], where HF has [in, out].
The first moves whole rows and the last only says so: both leave the stored bits as they are.
"""

from __future__ import annotations

import re
from dataclasses import replace

from torch import Tensor

from octavo.weights.errors import WeightsError
from octavo.weights.gguf import GGUFFile
from octavo.weights.stored import BlockTensor, Weight

# HF computes these factors from its config; in a GGUF they are data. The name stays GGUF's.
ROPE_FACTORS = "rope_freqs.weight"

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3 = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_OUTSIDE = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

# architecture -> (prefix of a layer, names in a layer, names outside)
_TABLES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "llama": ("model.layers", _LAYER, _OUTSIDE),
    "qwen2": ("model.layers", _LAYER, _OUTSIDE),
    "qwen3": ("model.layers", _LAYER | _QK_NORM, _OUTSIDE),
    "gemma3": ("model.layers", _LAYER | _QK_NORM | _GEMMA3, _OUTSIDE),
    "gpt2": ("transformer.h", _GPT2_LAYER, _GPT2_OUTSIDE),
}
ARCHITECTURES = tuple(_TABLES)

_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
_OUTSIDE_LAYERS = re.compile(r"([a-z_]+)\.(weight|bias)")
_ROTARY = re.compile(r"model\.layers\.([0-9]+)\.self_attn\.([qk])_proj\.(?:weight|bias)")


def architecture(file: GGUFFile) -> str:
    """The file's architecture, checked to be one that has a table, in a file that is whole."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _TABLES:
        raise WeightsError(
            f"{file.path.name} has the architecture {name!r}, supported are {', '.join(ARCHITECTURES)}"
        )
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise WeightsError(
            f"{file.path.name} is one of {parts} parts of a model: merge them into one file first"
        )
    return name


def hf_name(file: GGUFFile, name: str) -> str:
    """The HF name of a GGUF tensor; WeightsError for one that the architecture's table does not know."""
    arch = architecture(file)
    prefix, layer, outside = _TABLES[arch]
    if name == ROPE_FACTORS:
        return name
    if match := _IN_LAYER.fullmatch(name):
        number, part, kind = match.groups()
        if part in layer:
            return f"{prefix}.{number}.{layer[part]}.{kind}"
    elif (match := _OUTSIDE_LAYERS.fullmatch(name)) and match[1] in outside:
        return f"{outside[match[1]]}.{match[2]}"
    raise WeightsError(
        f"{file.path.name} has a tensor {name[:200]!r} that the architecture {arch} does not know"
    )


def hf_layout(file: GGUFFile, hf_name: str, weight: Weight) -> Weight:
    """A GGUF tensor in HF's layout, in its own storage type."""
    arch = architecture(file)
    if arch == "llama" and (match := _ROTARY.fullmatch(hf_name)):
        heads = _head_count(file, "head_count" if match[2] == "q" else "head_count_kv", int(match[1]))
        if isinstance(weight, BlockTensor):
            return replace(weight, rows=unpermute(weight.rows, heads, hf_name))
        return unpermute(weight, heads, hf_name)
    if arch == "gemma3" and hf_name.endswith("norm.weight") and isinstance(weight, Tensor):
        return weight.float() - 1
    if arch == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight$", hf_name):
        return weight.t()
    return weight


def unpermute(rows: Tensor, num_heads: int, name: str) -> Tensor:
    """Rows of each head from interleaved rotary pairs to two halves. rows [num_heads * head_dim, ...].

    With head_dim 4, rows stored as 0 2 1 3 come back as 0 1 2 3.
    """
    count = rows.shape[0]
    if num_heads < 1 or count % (2 * num_heads):
        raise WeightsError(
            f"tensor {name!r} has {count} rows, which do not make {num_heads} heads of an even size"
        )
    pairs = rows.reshape(num_heads, count // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _head_count(file: GGUFFile, what: str, layer: int) -> int:
    key = f"llama.attention.{what}"
    count = file.metadata.get(key)
    if count is None and what == "head_count_kv":
        return _head_count(file, "head_count", layer)
    if isinstance(count, list) and layer < len(count):  # one for each layer
        count = count[layer]
    if type(count) is not int:
        raise WeightsError(f"{file.path.name} has no usable {key}: {str(count)[:100]}")
    return count
