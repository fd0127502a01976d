"""What training starts from: a checkpoint's weights, with the attention and the head that are asked for."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from octavo.convert.heads import LayerHeads
from octavo.convert.pool import plan, pool
from octavo.encoder_config import EncoderConfig
from octavo.engine.encoder import is_encoder, load_weights, sentence_files
from octavo.models.encoder import Encoder
from octavo.nn.attention import Attention
from octavo.nn.c2psa import resolve_compress_rate
from octavo.training.settings import AttentionChoice, TrainSettings
from octavo.weights.load import Checkpoint

_CLASSES = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
}
TOPK = 64
PROJECTED_LEN = 64
#: The width of the random numbers that a new head starts from, as in BERT.
HEAD_STD = 0.02


@dataclass(frozen=True, slots=True)
class Start:
    """An encoder in training mode, the config.json that describes it, and in words what is new in it."""

    encoder: Encoder
    config: EncoderConfig
    metadata: dict[str, Any]
    notes: tuple[str, ...]


def start_from(
    checkpoint: Checkpoint, labels: tuple[str, ...], choice: AttentionChoice, settings: TrainSettings
) -> Start:
    """The checkpoint's encoder, with ``labels`` for its head and ``choice`` for its attention.

    A head for the same labels is kept, another is replaced by a random one; of it BERT's dense layer is the
    checkpoint's pooler, if there is one. Where C2PSA takes the place of standard attention, it starts from
    heads that ``octavo.convert`` aligned and pooled. What is random follows from the seed.
    Raises ValueError for a checkpoint that is no encoder, and for attention that does not fit it.
    """
    if not is_encoder(checkpoint):
        raise ValueError(
            f"{checkpoint.path.name} is no encoder of the families BERT, RoBERTa and DistilBERT in a folder "
            "of safetensors: only those are trained"
        )
    if settings.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"the device {settings.device} is not there, or this torch was built without it")
    sentence = sentence_files(checkpoint.path)
    stored = EncoderConfig.from_hf(checkpoint.metadata, sentence)
    notes = []
    keeps_head = stored.labels == labels and not stored.multi_label
    if not keeps_head:
        notes.append(
            f"a new head for {', '.join(labels)}"
            if len(labels) < 9
            else f"a new head for {len(labels)} labels"
        )
    metadata = _metadata(checkpoint.metadata, labels, _attention_keys(stored, choice), settings)
    config = EncoderConfig.from_hf(metadata, sentence)
    # Modules draw numbers for weights that are replaced here: the caller's generator must not notice.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        given = load_weights(stored, checkpoint)
        encoder = Encoder(config)
        fitted = _fitted(given, config, keeps_head)
        if not keeps_head and config.family == "bert":
            fitted |= _pooler(checkpoint)
        generator = torch.Generator().manual_seed(settings.seed)
        for name, parameter in encoder.named_parameters():
            if name in fitted:
                parameter.copy_(fitted[name])
            else:
                _fill(name, parameter, generator)
    if config.compress_rate is not None and config.compress_rate != stored.compress_rate:
        notes.append(f"C2PSA: {config.compress_rate} heads share one projection, {config.topk} keys a query")
    if config.projected_len is not None and stored.projected_len is None:
        notes.append(
            f"Linformer: random projections of {config.projected_max} positions to {config.projected_len}"
        )
    for module in encoder.modules():
        if isinstance(module, Attention):
            module.checkpoint = settings.checkpoint_attention
    return Start(encoder.to(settings.device).train(), config, metadata, tuple(notes))


def _attention_keys(stored: EncoderConfig, choice: AttentionChoice) -> dict[str, Any]:
    """The key of config.json that says which attention it is, or none for standard attention."""
    has = "c2psa" if stored.compress_rate else "linformer" if stored.projected_len else "mha"
    kind = has if choice.kind is None else choice.kind
    if kind != "c2psa" and (choice.compress_rate is not None or choice.topk is not None):
        raise ValueError(f"compress_rate and topk belong to c2psa, the attention is {kind}")
    if kind != "linformer" and choice.projected_len is not None:
        raise ValueError(f"projected_len belongs to linformer, the attention is {kind}")
    if kind != has and has != "mha":
        raise ValueError(f"the checkpoint has {has} attention, which cannot become {kind}")
    if kind == "c2psa":
        rate = choice.compress_rate
        if stored.compress_rate is not None:
            if rate not in (None, stored.compress_rate):
                raise ValueError(
                    f"the checkpoint has compress_rate {stored.compress_rate} already, got {rate}"
                )
            rate = stored.compress_rate
        rate = resolve_compress_rate(stored.num_heads, "auto" if rate is None else rate)
        return {"c2psa": {"compress_rate": rate, "topk": choice.topk or stored.topk or TOPK}}
    if kind == "linformer":
        if stored.projected_len is not None:
            if choice.projected_len not in (None, stored.projected_len):
                raise ValueError(
                    f"the checkpoint has projected_len {stored.projected_len}, got {choice.projected_len}"
                )
            return {"linformer": {"projected_len": stored.projected_len, "max_len": stored.projected_max}}
        length = (
            min(PROJECTED_LEN, stored.max_tokens) if choice.projected_len is None else choice.projected_len
        )
        if length > stored.max_tokens:
            raise ValueError(
                f"projected_len must be at most the model's {stored.max_tokens} tokens, got {length}"
            )
        return {"linformer": {"projected_len": length, "max_len": stored.max_tokens}}
    return {}


def _metadata(
    given: dict[str, Any], labels: tuple[str, ...], attention: dict[str, Any], settings: TrainSettings
) -> dict[str, Any]:
    """The config.json of what is trained."""
    made = copy.deepcopy(given)
    for key in ("c2psa", "linformer", "dtype", "torch_dtype", "num_labels", "_name_or_path"):
        made.pop(key, None)
    family = str(given["model_type"])
    made |= {
        "architectures": [_CLASSES[family]],
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": "regression" if len(labels) == 1 else "single_label_classification",
        "dtype": "float32",
    }
    if settings.dropout is not None:
        names = ("attention_dropout", "dropout", "seq_classif_dropout")
        if family != "distilbert":
            names = ("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout")
        made |= dict.fromkeys(names, settings.dropout)
    return made | attention


def _fitted(given: Encoder, config: EncoderConfig, keeps_head: bool) -> dict[str, torch.Tensor]:
    """The given weights in the shapes of ``config``."""
    weights: dict[str, torch.Tensor] = {
        name: parameter
        for name, parameter in given.named_parameters()
        if keeps_head or not name.startswith("head.")
    }
    rate = config.compress_rate or 1
    if rate > 1 and given.config.compress_rate is None:
        weights |= _aligned(given, rate)
    return weights


def _pooler(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """BERT's pooler, which its pretraining has taught what the first token stands for."""
    found = {}
    for name, tensor in checkpoint.tensors():
        short = name.removeprefix("bert.")
        if short.startswith("pooler.dense."):
            width = checkpoint.metadata["hidden_size"]
            if tuple(tensor.shape) != ((width, width) if tensor.dim() == 2 else (width,)):
                raise ValueError(f"tensor {name!r} has shape {list(tensor.shape)}, the model is {width} wide")
            found[f"head.{short.removeprefix('pooler.')}"] = tensor.clone()
    return found


def _aligned(given: Encoder, rate: int) -> dict[str, torch.Tensor]:
    """The attention of every layer with its heads turned, grouped and pooled, as ``octavo convert`` does."""
    weights = {}
    for i, layer in enumerate(given.layers):
        attention = layer.attention
        tensors = {
            f"{role[0]}.{kind}": parameter
            for role in ("q_proj", "k_proj", "v_proj", "out_proj")
            for kind, parameter in getattr(attention, role).named_parameters()
        }
        heads = LayerHeads.cut(tensors, given.config.head_dim)
        pooled = pool(heads, plan(heads, rate, "aligned", "orthogonal"))
        for name, tensor in pooled.tensors().items():
            role, _, kind = name.partition(".")
            weights[f"layers.{i}.attention.{'out' if role == 'o' else role}_proj.{kind}"] = tensor
    return weights


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """New weights: a head, or Linformer's projections of variance 1 / projected_len (arXiv 2006.04768)."""
    if name.endswith(".bias"):
        parameter.zero_()
    elif name.startswith("head."):
        parameter.normal_(0.0, HEAD_STD, generator=generator)
    elif name.endswith(("key_mix", "value_mix")):
        parameter.normal_(0.0, parameter.shape[0] ** -0.5, generator=generator)
    else:
        raise AssertionError(f"{name} is in no checkpoint and is nothing new")
