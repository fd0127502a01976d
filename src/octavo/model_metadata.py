"""HF and GGUF metadata, checked and translated into the fields of a ``ModelConfig``: the one place for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.metadata_kinds import (
    GGUF_KINDS,
    GGUF_TOKENIZER_KINDS,
    HF_KINDS,
    MAX_LAYERS,
    UnsupportedModelError,
    check_kinds,
    check_number,
    check_size,
    need,
    size_of,
)

ROPE_SCALINGS = ("none", "linear", "llama3", "yarn")

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


_ROPE_NUMBERS = (
    "theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions of one kind of layer.

    ``scaling`` is "none", "linear", "llama3", "yarn", or "factors": the checkpoint itself brings the
    divisor of every frequency, as the tensor ``rope_freqs.weight`` ``[head_dim / 2]``.
    """

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.original_max_position_embeddings is not None:
            check_size("original_max_position_embeddings", self.original_max_position_embeddings)
        for name in _ROPE_NUMBERS:
            if getattr(self, name) is not None:
                check_number(getattr(self, name), f"rope's {name}")
        for name in ("mscale", "mscale_all_dim"):  # 0 means that it is not used
            check_number(getattr(self, name) or 1.0, f"rope's {name}")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table of models: the names by which checkpoints call it.

    ``gguf`` is the value of ``general.architecture``; Mistral has none of its own, its files say
    "llama".
    """

    name: str
    hf_class: str
    model_type: str
    gguf: str | None


ARCHITECTURES = (
    Architecture("llama", "LlamaForCausalLM", "llama", "llama"),
    Architecture("mistral", "MistralForCausalLM", "mistral", None),
    Architecture("qwen2", "Qwen2ForCausalLM", "qwen2", "qwen2"),
    Architecture("qwen3", "Qwen3ForCausalLM", "qwen3", "qwen3"),
    Architecture("gemma3", "Gemma3ForCausalLM", "gemma3_text", "gemma3"),
    Architecture("gpt2", "GPT2LMHeadModel", "gpt2", "gpt2"),
)


def _hf_architecture(config: Mapping[str, Any]) -> str:
    classes = config.get("architectures") or []
    model_type = config.get("model_type")
    if "Gemma3ForConditionalGeneration" in classes or model_type == "gemma3":
        raise UnsupportedModelError(
            "a Gemma 3 checkpoint with images (Gemma3ForConditionalGeneration) is not supported; "
            "use a text-only one (Gemma3ForCausalLM)"
        )
    for row in ARCHITECTURES:
        if row.hf_class in classes or (not classes and row.model_type == model_type):
            return row.name
    named = ", ".join(map(str, classes)) or repr(model_type)
    raise UnsupportedModelError(
        f"architecture {named} is not supported; supported: {', '.join(r.hf_class for r in ARCHITECTURES)}"
    )


def _activation(name: Any) -> str:
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name!r} is not supported; supported: {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and value else value


def _refuse(config: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        if config.get(key) not in values:
            raise UnsupportedModelError(f"{key}={config[key]!r} is not supported")


def _scaled_length(stated: int, rope: RopeConfig) -> int:
    """The context after scaling. llama3 and most other checkpoints state it with the scaling applied;
    where the length before scaling is known (always for yarn) the product is what the table covers."""
    original = rope.original_max_position_embeddings
    if rope.scaling not in ("linear", "yarn") or original is None:
        return stated
    return max(stated, round(original * rope.factor))


def _hf_rope_parameters(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """``rope_parameters`` is flat, or keyed by the kind of layer (always so for Gemma 3)."""
    given: Mapping[str, Any] = config.get("rope_parameters") or {}
    kinds = [given[k] for k in ("full_attention", "sliding_attention") if k in given]
    if _hf_architecture(config) == "gemma3":
        if given and not kinds:
            raise UnsupportedModelError(
                "gemma3 needs rope_parameters keyed by 'full_attention' and 'sliding_attention'"
            )
        return given.get(kind) or {}
    if not kinds:
        return given
    if kinds[0] is None or any(k != kinds[0] for k in kinds):
        raise UnsupportedModelError(
            "rope_parameters that differ between kinds of layers are supported for gemma3 only"
        )
    first: Mapping[str, Any] = kinds[0]
    return first


def _hf_rope(config: Mapping[str, Any], kind: str, theta: float, scaling: Mapping[str, Any]) -> RopeConfig:
    """The rope of one kind of layer; ``theta`` and ``scaling`` are what the flat old keys say of it."""
    parameters = {**_hf_rope_parameters(config, kind), **scaling}
    scaling_type = parameters.get("rope_type", parameters.get("type", "default"))
    if scaling_type == "default":
        scaling_type = "none"
    if scaling_type not in ROPE_SCALINGS:
        raise UnsupportedModelError(
            f"rope scaling {scaling_type!r} is not supported; supported: {', '.join(ROPE_SCALINGS)}"
        )
    for source in (config, parameters):
        _refuse(source, partial_rotary_factor=(None, 1, 1.0))
    theta = check_number(parameters.get("rope_theta") or theta, "rope_theta")
    if scaling_type == "none":
        return RopeConfig(theta=theta)

    stated = size_of(config, "max_position_embeddings", "config.json")
    original = config.get("original_max_position_embeddings") or parameters.get(
        "original_max_position_embeddings"
    )
    factor = parameters.get("factor")
    if scaling_type != "linear":
        original = original or stated
    if factor is None and scaling_type == "yarn":
        factor = stated / check_number(original, "original_max_position_embeddings")
    needed = {"factor": factor}
    if scaling_type == "llama3":
        needed |= {key: parameters.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    for key, value in needed.items():
        if value is None:
            raise UnsupportedModelError(
                f"rope scaling {scaling_type!r} needs {key!r}, which config.json lacks"
            )
    numbers = {key: check_number(value, f"rope scaling's {key}") for key, value in needed.items()}
    return RopeConfig(
        theta=theta,
        scaling=scaling_type,
        original_max_position_embeddings=original,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        attention_factor=parameters.get("attention_factor"),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=parameters.get("truncate", True),
        **numbers,
    )


def _hf_sliding_layers(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int, ...]:
    """Which layers use the window, by the rule of each architecture when ``layer_types`` is not given."""
    if architecture == "mistral":
        return tuple(range(num_layers))
    types = config.get("layer_types")
    if types is not None:
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
        if unknown or len(types) != num_layers:
            raise UnsupportedModelError(
                f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers, "
                f"got {', '.join(map(str, types))}"
            )
        return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if architecture == "gemma3":
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        return tuple(i for i in range(num_layers) if (i + 1) % pattern)
    return tuple(range(config.get("max_window_layers", num_layers), num_layers))


def _hf_common(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "vocab_size": size_of(config, "vocab_size", "config.json"),
        "bos_token_id": _first(config.get("bos_token_id")),
        "eos_token_ids": _ids(config.get("eos_token_id")),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", architecture in ("gemma3", "gpt2"))),
    }


def _hf_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(
        config,
        scale_attn_weights=(None, True),
        scale_attn_by_inverse_layer_idx=(None, False),
        add_cross_attention=(None, False),
    )
    hidden, heads = (size_of(config, key, "config.json") for key in ("n_embd", "n_head"))
    return dict(
        **_hf_common(config, "gpt2"),
        **_gpt2_shape(hidden, heads),
        intermediate_size=config.get("n_inner") or 4 * hidden,
        num_layers=size_of(config, "n_layer", "config.json"),
        max_position_embeddings=size_of(config, "n_positions", "config.json"),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation=_activation(config.get("activation_function", "gelu_new")),
    )


def _gpt2_shape(hidden: int, heads: int) -> dict[str, Any]:
    if hidden % heads:
        raise UnsupportedModelError(f"the hidden size ({hidden}) must be a multiple of the heads ({heads})")
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "norm": "layer",
        "gated_mlp": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "positions": "learned",
    }


def hf_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    check_kinds(config, HF_KINDS)
    check_kinds(config.get("rope_parameters") or {}, HF_KINDS)
    architecture = _hf_architecture(config)
    if config.get("quantization_config"):
        raise UnsupportedModelError(
            "a quantised Hugging Face checkpoint (quantization_config) is not supported; "
            "use float weights or a GGUF file"
        )
    if architecture == "gpt2":
        return _hf_gpt2(config)
    _refuse(
        config,
        attn_logit_softcapping=(None,),
        final_logit_softcapping=(None,),
        use_bidirectional_attention=(None, False),
    )
    hidden, heads, stated = (
        size_of(config, key, "config.json")
        for key in ("hidden_size", "num_attention_heads", "max_position_embeddings")
    )
    layers = size_of(config, "num_hidden_layers", "config.json", MAX_LAYERS)
    gemma, attention_bias = architecture == "gemma3", bool(config.get("attention_bias", False))
    head_dim = config.get("head_dim") or {"gemma3": 256, "qwen3": 128}.get(architecture) or hidden // heads
    window = config.get("sliding_window") if architecture in ("mistral", "gemma3") else None
    if architecture in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        window = config.get("sliding_window")
    scaling = config.get("rope_scaling") or {}
    rope = _hf_rope(config, "full_attention", config.get("rope_theta") or (1e6 if gemma else 1e4), scaling)
    specific: dict[str, Any] = {}
    if gemma:
        specific = {
            "norm_weight_offset": 1.0,
            "post_norms": True,
            "embedding_scale": hidden**0.5,
            "attention_scale": check_number(config.get("query_pre_attn_scalar", 256), "query_pre_attn_scalar")
            ** -0.5,
            "rope_local": _hf_rope(
                config, "sliding_attention", config.get("rope_local_base_freq") or 1e4, {}
            ),
        }
    return dict(
        **_hf_common(config, architecture),
        **specific,
        hidden_size=hidden,
        intermediate_size=size_of(config, "intermediate_size", "config.json"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=_scaled_length(stated, rope),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation=_activation(
            config.get("hidden_activation")
            or config.get("hidden_act")
            or ("gelu_pytorch_tanh" if gemma else "silu")
        ),
        qkv_bias=attention_bias if architecture != "qwen2" else True,
        output_bias=attention_bias if architecture != "qwen2" else False,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture in ("qwen3", "gemma3"),
        rope=rope,
        sliding_window=window,
        sliding_layers=_hf_sliding_layers(config, architecture, layers) if window is not None else (),
    )


def _gguf_rope(metadata: Mapping[str, Any], name: str, theta: float, has_factors: bool) -> RopeConfig:
    def key(suffix: str) -> Any:
        return metadata.get(f"{name}.rope.{suffix}")

    theta = check_number(key("freq_base") or theta, f"{name}.rope.freq_base")
    scaling = key("scaling.type") or "none"
    if scaling not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"rope scaling {scaling!r} is not supported in a GGUF file; supported: none, linear, yarn"
        )
    for suffix, neutral in (("attn_factor", 1), ("yarn_attn_factor", 1), ("yarn_log_multiplier", 0)):
        if (key(f"scaling.{suffix}") or neutral) != neutral:
            raise UnsupportedModelError(f"{name}.rope.scaling.{suffix} is not supported")
    if has_factors:
        if scaling != "none":
            raise UnsupportedModelError(
                f"rope_freqs.weight together with {scaling} rope scaling is not supported"
            )
        return RopeConfig(theta=theta, scaling="factors")
    if scaling == "none":
        return RopeConfig(theta=theta)
    factor_key = f"{name}.rope.scaling.factor"
    original = key("scaling.original_context_length")
    if scaling == "yarn":
        original = original or size_of(metadata, f"{name}.context_length", "the GGUF file")
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        factor=check_number(need(metadata, factor_key, "the GGUF file"), factor_key),
        original_max_position_embeddings=original,
        beta_fast=key("scaling.yarn_beta_fast") or 32.0,
        beta_slow=key("scaling.yarn_beta_slow") or 1.0,
    )


def _gguf_gemma3(
    metadata: Mapping[str, Any], hidden: int, heads: int, layers: int, head_dim: int
) -> dict[str, Any]:
    # The format has no key for the score scale and, before freq_base_swa, none for the local base or
    # the pattern; these are the constants of the released models. 27B (62 layers) alone divides by
    # sqrt(hidden / heads).
    pattern = metadata.get("gemma3.attention.sliding_window_pattern") or 6
    sliding = pattern if isinstance(pattern, list) else [(i + 1) % pattern for i in range(layers)]
    if len(sliding) != layers:
        raise UnsupportedModelError(
            f"gemma3.attention.sliding_window_pattern has {len(sliding)} entries for {layers} layers"
        )
    return {
        "norm_weight_offset": 1.0,
        "post_norms": True,
        "embedding_scale": hidden**0.5,
        "attention_scale": metadata.get("gemma3.attention.scale")
        or (hidden / heads if layers == 62 else head_dim) ** -0.5,
        "rope_local": RopeConfig(theta=metadata.get("gemma3.rope.freq_base_swa") or 1e4),
        "sliding_window": size_of(metadata, "gemma3.attention.sliding_window", "the GGUF file"),
        "sliding_layers": tuple(i for i, slides in enumerate(sliding) if slides),
    }


def _gguf_common(
    metadata: Mapping[str, Any], name: str, tensor_names: Collection[str] | None
) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab_key = f"{name}.vocab_size"
    vocab_size = len(tokens) if tokens is not None else size_of(metadata, vocab_key, "the GGUF file")
    ends = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    return {
        "architecture": name,
        "vocab_size": metadata.get(vocab_key) or vocab_size,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(i for i in ends if i is not None)),
        "tie_word_embeddings": not {"output.weight", "lm_head.weight"}.intersection(tensor_names or ()),
    }


def gguf_fields(metadata: Mapping[str, Any], tensor_names: Collection[str] | None) -> dict[str, Any]:
    name = metadata.get("general.architecture")
    supported = [row.gguf for row in ARCHITECTURES if row.gguf]
    if name not in supported:
        raise UnsupportedModelError(
            f"GGUF architecture {name!r} is not supported; supported: {', '.join(supported)}"
        )

    check_kinds(metadata, GGUF_KINDS, f"{name}.")
    check_kinds(metadata, GGUF_TOKENIZER_KINDS, "tokenizer.ggml.")

    def size(key: str) -> int:
        return size_of(metadata, f"{name}.{key}", "the GGUF file")

    hidden, heads = size("embedding_length"), size("attention.head_count")
    layers = size_of(metadata, f"{name}.block_count", "the GGUF file", MAX_LAYERS)
    common = _gguf_common(metadata, name, tensor_names)
    common |= {
        "intermediate_size": size("feed_forward_length"),
        "num_layers": layers,
    }
    if name == "gpt2":
        return dict(
            **common,
            **_gpt2_shape(hidden, heads),
            max_position_embeddings=size("context_length"),
            norm_eps=metadata.get("gpt2.attention.layer_norm_epsilon", 1e-5),
            activation="gelu_tanh",
        )
    head_dim = metadata.get(f"{name}.attention.key_length") or hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.get(f"{name}.{key}", head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{name}.{key} ({metadata[f'{name}.{key}']}) must equal the head_dim ({head_dim})"
            )
    has_factors = tensor_names is not None and "rope_freqs.weight" in tensor_names
    rope = _gguf_rope(metadata, name, 1e6 if name == "gemma3" else 1e4, has_factors)
    window = metadata.get(f"{name}.attention.sliding_window")
    common |= {"sliding_window": window, "sliding_layers": tuple(range(layers)) if window else ()}
    if name == "gemma3":
        common |= _gguf_gemma3(metadata, hidden, heads, layers, head_dim)
    return dict(
        **common,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=metadata.get(f"{name}.attention.head_count_kv") or heads,
        head_dim=head_dim,
        max_position_embeddings=_scaled_length(size("context_length"), rope),
        norm_eps=check_number(
            need(metadata, f"{name}.attention.layer_norm_rms_epsilon", "the GGUF file"), "the norm's epsilon"
        ),
        activation="gelu_tanh" if name == "gemma3" else "silu",
        qkv_bias=name == "qwen2",
        qk_norm=name in ("qwen3", "gemma3"),
        rope=rope,
    )
