"""Small random encoders on disk, as transformers and sentence-transformers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_encoder import write_tokenizer

from octavo.engine.encoder import EncoderEngine, load_encoder
from octavo.weights.load import open_checkpoint

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "fast", ".", "?", "why", "who"]
TEXTS = ["the cat sat", "who ran ?", "why", "a dog sat on the mat . the cat ran fast .", "", "the dog sat"]
SMALL = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 24}
DISTIL = {"vocab_size": 40, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
DISTIL |= {"max_position_embeddings": 24}
ROBERTA = SMALL | {"max_position_embeddings": 26, "type_vocab_size": 1, "pad_token_id": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SMALL),
    "bert-gelu-new": ("Bert", SMALL | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "roberta": ("Roberta", ROBERTA),
    "distilbert": ("DistilBert", DISTIL),
    "distilbert-relu": ("DistilBert", DISTIL | {"activation": "relu"}),
}


def checkpoint(folder: Path, name: str, kind: str = "Model", **changes: Any) -> Any:
    """A random model of a family in ``folder``, written by transformers, which is returned."""
    family, fields = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields | changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    with torch.no_grad():  # the default initialisation leaves biases 0 and everything small
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    write_tokenizer(folder, WORDS)
    return model


def write_sentence_files(folder: Path, pooling: str, normalize: bool, limit: int | None = None) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"type": f"sentence_transformers.models.{k}", "path": "1_Pooling" if k == "Pooling" else ""}
        for k in kinds
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    if limit is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))


def load(folder: Path) -> EncoderEngine:
    return load_encoder(open_checkpoint(folder))
