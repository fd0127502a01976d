"""A tiny random encoder in a folder, and labelled texts that one can be trained on, without transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from octavo.encoder_config import EncoderConfig
from octavo.models.encoder import Encoder, checkpoint_name
from octavo.training.data import Example, LabelledData

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "fast", "good", "bad", "why", "who"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
_DISTIL = {"vocab_size": 40, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "type_vocab_size": 2, "pad_token_id": 0} | _SIZES,
    "roberta": {"model_type": "roberta", "type_vocab_size": 1, "pad_token_id": 1}
    | _SIZES
    | {"max_position_embeddings": 26},
    "distilbert": {"model_type": "distilbert", "max_position_embeddings": 24} | _DISTIL,
}


def write_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> None:
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    # As published checkpoints have them; neither may reach a text.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


def write_encoder(folder: Path, family: str = "bert", **changes: Any) -> Path:
    """A random checkpoint; ``changes`` go into its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = CONFIGS[family] | changes
    config = EncoderConfig.from_hf(metadata)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = Encoder(config)
    tensors = {checkpoint_name(config, name): p.detach().clone() for name, p in encoder.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(metadata))
    write_tokenizer(folder)
    return folder


def examples(count: int, seed: int = 0, pairs: bool = False) -> tuple[Example, ...]:
    """Texts of 3 to 14 words, "up" where they hold "good" and "down" where they hold "bad"."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        word, label = draw.choice([("good", "up"), ("bad", "down")])
        words = draw.choices([w for w in WORDS if w not in ("good", "bad")], k=draw.randint(2, 13))
        words.insert(draw.randint(0, len(words)), word)
        text = " ".join(words)
        made.append(Example((text, "the cat sat") if pairs else text, label))
    return tuple(made)


def labelled(count: int = 64, *, seed: int = 0, pairs: bool = False) -> LabelledData:
    train, held_out = examples(count, seed, pairs), examples(32, seed + 1, pairs)
    return LabelledData("words", train, {"held out": held_out}, ("down", "up"), ("accuracy", "f1_macro"))
