"""What the values of a checkpoint's metadata must be, checked before anything is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Positions and shapes are int32 in places.
MAX_SIZE = 2**31 - 1
#: What float32 holds: everything is computed in it.
MAX_NUMBER = 3e38
#: Lists of layers are made before a model's size can be checked against its files.
MAX_LAYERS = 10_000

_KIND_WORDS = {dict: "an object", int: "a whole number below 2^31", list: "a list", str: "text"}
#: Keys whose values are read in part, or compared, before a ModelConfig checks them: key -> kind.
HF_KINDS: dict[str, type | tuple[type, ...]] = {
    "architectures": list,
    "layer_types": list,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "full_attention": dict,
    "sliding_attention": dict,
    "hidden_act": str,
    "hidden_activation": str,
    "activation_function": str,
    "head_dim": int,
    "n_inner": int,
    "max_window_layers": int,
    "sliding_window_pattern": int,
    "_sliding_window_pattern": int,
}
GGUF_KINDS: dict[str, type | tuple[type, ...]] = {
    "attention.key_length": int,
    "attention.sliding_window_pattern": (int, list),
    "rope.scaling.type": str,
}
GGUF_TOKENIZER_KINDS: dict[str, type | tuple[type, ...]] = {
    "tokens": list,
    "bos_token_id": int,
    "eos_token_id": int,
    "eot_token_id": int,
}


class UnsupportedModelError(ValueError):
    """The metadata asks for something that this decoder does not do, or lacks what it needs."""


def check_kinds(
    mapping: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]], prefix: str = ""
) -> None:
    """Each key is absent, null, or of its kind; a number is from 0 to MAX_SIZE."""
    for suffix, kind in kinds.items():
        key, value = prefix + suffix, mapping.get(prefix + suffix)
        if value is None:
            continue
        allowed = kind if isinstance(kind, tuple) else (kind,)
        # bool is an int in Python, hence type() and not isinstance().
        if type(value) not in allowed or (type(value) is int and not 0 <= value <= MAX_SIZE):
            words = " or ".join(_KIND_WORDS[item] for item in allowed)
            raise UnsupportedModelError(f"{key} must be {words}, got {value!r:.100}")


def need(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    value = mapping.get(key)
    if value is None:
        raise UnsupportedModelError(f"{where} lacks {key!r}")
    return value


def size_of(mapping: Mapping[str, Any], key: str, where: str, most: int = MAX_SIZE) -> int:
    """The positive integer under ``key``, at most ``most``."""
    value = need(mapping, key, where)
    check_size(key, value, most)
    return int(value)


def check_size(name: str, value: Any, most: int = MAX_SIZE) -> None:
    """Refuse what is no integer from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UnsupportedModelError(
            f"{name} must be a positive integer, got {value!r:.100} (the most is {most})"
        )


def check_number(value: Any, name: str) -> float:
    """``value`` as a float; UnsupportedModelError where it is not a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
        raise UnsupportedModelError(f"{name} must be a positive number, got {value!r:.100}")
    return float(value)


def c2psa_fields(config: Mapping[str, Any]) -> dict[str, int]:
    """The key "c2psa" of a converted checkpoint, {"compress_rate": r, "topk": k}, or nothing without it."""
    check_kinds(config, {"c2psa": dict})
    found = config.get("c2psa")
    if found is None:
        return {}
    return {key: size_of(found, key, "c2psa of config.json") for key in ("compress_rate", "topk")}
