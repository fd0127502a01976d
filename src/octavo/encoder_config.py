"""What an encoder is: the families of BERT, from a checkpoint's own files. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.metadata_kinds import (
    MAX_LAYERS,
    UnsupportedModelError,
    c2psa_fields,
    check_kinds,
    check_number,
    size_of,
)

MODEL_TYPES = ("bert", "roberta", "distilbert")
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """``first_position`` is the position of a text's first token; ``max_tokens`` the longest text.

    ``num_heads`` counts the heads before ``compress_rate`` of them share their projections.
    ``labels`` are the classes of the head, in order, or empty without one; one label is a regression.
    ``compress_rate`` and ``topk`` are set where the attention is C2PSA, ``projected_len`` and
    ``projected_max`` (the longest text) where it is Linformer's. ``pooling`` ("mean" or "cls") and
    ``normalize`` say what an embedding is. The dropouts matter in training alone.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    norm_eps: float
    activation: str
    first_position: int
    max_tokens: int
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    compress_rate: int | None = None
    topk: int | None = None
    projected_len: int | None = None
    projected_max: int | None = None
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    head_dropout: float = 0.0
    pooling: str = "mean"
    normalize: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], sentence: SentenceFiles | None = None) -> EncoderConfig:
        """Translate a ``config.json`` and the files beside it that make embeddings of a model's output.

        Raises UnsupportedModelError, in one sentence, for what is missing, senseless or not supported.
        """
        family = config.get("model_type")
        if family not in MODEL_TYPES:
            raise UnsupportedModelError(
                f"model_type must be one of {', '.join(MODEL_TYPES)}, got {family!r:.100}"
            )
        where = "config.json"
        check_kinds(config, _KINDS)
        names = _DISTILBERT if family == "distilbert" else _BERT
        sizes = {field: size_of(config, key, where) for field, key in names.items()}
        if sizes["num_layers"] > MAX_LAYERS:
            raise UnsupportedModelError(
                f"num_hidden_layers must be at most {MAX_LAYERS}, got {sizes['num_layers']}"
            )
        activation = config.get("activation" if family == "distilbert" else "hidden_act", "gelu")
        if activation not in ACTIVATIONS:
            allowed = ", ".join(ACTIVATIONS)
            raise UnsupportedModelError(f"the activation must be one of {allowed}, got {activation!r:.100}")
        positions = config.get("position_embedding_type") or "absolute"
        if positions != "absolute":
            raise UnsupportedModelError(f"position_embedding_type must be 'absolute', got {positions!r:.100}")
        attention = _attention(config)
        sizes["num_heads"] = _heads_before_sharing(config, sizes, attention.get("compress_rate", 1))
        # RoBERTa counts positions from behind its padding token's.
        first = int(config.get("pad_token_id") or 0) + 1 if family == "roberta" else 0
        sentence = SentenceFiles() if sentence is None else sentence
        most = sizes["max_position_embeddings"] - first
        if most < 1:
            raise UnsupportedModelError(
                f"max_position_embeddings ({most + first}) leaves none after pad_token_id {first - 1}"
            )
        return cls(
            family=family,
            **sizes,
            type_vocab_size=0 if family == "distilbert" else size_of(config, "type_vocab_size", where),
            norm_eps=check_number(config.get("layer_norm_eps", 1e-12), "layer_norm_eps"),
            activation=ACTIVATIONS[activation],
            first_position=first,
            max_tokens=min(most, sentence.max_tokens or most, attention.get("projected_max", most)),
            labels=_labels(config),
            multi_label=config.get("problem_type") == "multi_label_classification",
            pooling=sentence.pooling,
            normalize=sentence.normalize,
            **attention,
            **_dropouts(config, family),
        )


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """What sentence-transformers' files beside a checkpoint say about its embeddings."""

    pooling: str = "mean"
    normalize: bool = False
    max_tokens: int | None = None

    @classmethod
    def read(
        cls, modules: list[Mapping[str, Any]], pooling: Mapping[str, Any], bert: Mapping[str, Any]
    ) -> SentenceFiles:
        """From ``modules.json``, the pooling module's ``config.json`` and ``sentence_bert_config.json``."""
        kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
        known = {"Transformer", "Pooling", "Normalize"}
        if unknown := [kind for kind in kinds if kind not in known]:
            raise UnsupportedModelError(
                f"modules.json names {unknown[0]!r:.60}, supported are {', '.join(known)}"
            )
        modes = [mode for mode, on in pooling.items() if mode.startswith("pooling_mode") and on]
        if len(modes) > 1 or any(mode not in POOLINGS for mode in modes):
            raise UnsupportedModelError(
                f"pooling must be mean or cls alone, the checkpoint has {', '.join(modes)}"
            )
        limit = bert.get("max_seq_length")
        return cls(
            pooling=POOLINGS[modes[0]] if modes else "mean",
            normalize="Normalize" in kinds,
            max_tokens=None
            if limit is None
            else size_of(bert, "max_seq_length", "sentence_bert_config.json"),
        )


_KINDS: dict[str, type | tuple[type, ...]] = {
    "activation": str,
    "architectures": list,
    "hidden_act": str,
    "id2label": dict,
    "linformer": dict,
    "pad_token_id": int,
}
_BERT = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}
_DISTILBERT = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_layers": "n_layers",
    "num_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "max_position_embeddings": "max_position_embeddings",
}


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    architectures = config.get("architectures") or [""]
    if not str(architectures[0]).endswith("ForSequenceClassification"):
        return ()
    labels = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    names = [labels.get(str(i)) for i in range(len(labels))]
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise UnsupportedModelError(f"id2label must number distinct labels from 0, got {labels!r:.100}")
    return tuple(str(name) for name in names)


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in the place of standard attention.

    ``"c2psa": {"compress_rate": r, "topk": k}``, or ``"linformer": {"projected_len": p, "max_len": n}``.
    """
    c2psa, linformer = c2psa_fields(config), config.get("linformer")
    if c2psa and linformer is not None:
        raise UnsupportedModelError("config.json may have c2psa or linformer, not both")
    if linformer is not None:
        where = "linformer of config.json"
        sizes = {name: size_of(linformer, key, where) for name, key in _LINFORMER.items()}
        if sizes["projected_len"] > sizes["projected_max"]:
            raise UnsupportedModelError(f"projected_len may not be above max_len in {where}")
        return sizes
    return dict(c2psa)


_LINFORMER = {"projected_len": "projected_len", "projected_max": "max_len"}


def _dropouts(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The shares that training drops, under each family's names; the defaults are transformers' own."""
    attention, hidden, head = _DROPOUTS[family]
    shares = {"attention_dropout": _share(config, attention, 0.1)}
    shares["hidden_dropout"] = _share(config, hidden, 0.1)
    shares["head_dropout"] = _share(config, head, 0.2 if family == "distilbert" else shares["hidden_dropout"])
    return shares


_DROPOUTS = {
    "bert": ("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout"),
    "roberta": ("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout"),
    "distilbert": ("attention_dropout", "dropout", "seq_classif_dropout"),
}


def _share(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise UnsupportedModelError(f"{key} must be at least 0 and less than 1, got {value!r:.100}")
    return float(value)


def _heads_before_sharing(config: Mapping[str, Any], sizes: Mapping[str, int], rate: int) -> int:
    """Where ``head_dim`` is stated, the heads are those that are computed: each stands for ``rate``.

    Without it, as in every plain checkpoint, they are the heads before any share their projections.
    """
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if config.get("head_dim") is None:
        if hidden % heads:
            raise UnsupportedModelError(f"hidden_size ({hidden}) must be a multiple of the heads ({heads})")
        return heads
    head_dim = size_of(config, "head_dim", "config.json")
    if heads * rate * head_dim != hidden:
        raise UnsupportedModelError(
            f"hidden_size ({hidden}) must be the heads ({heads}) times compress_rate ({rate}) "
            f"times head_dim ({head_dim})"
        )
    return heads * rate
