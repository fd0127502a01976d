"""Small random checkpoints of every family, written by transformers, with tokenizers of letters."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "fast", ".", "?", "why", "who"]
TEXTS = ["the cat sat", "who ran ?", "why", "a dog sat on the mat . the cat ran fast .", "the dog sat"]

_BERT = {"vocab_size": 40, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
_BERT |= {"intermediate_size": 64, "max_position_embeddings": 24}
_DISTIL = {"vocab_size": 40, "dim": 48, "n_layers": 2, "n_heads": 6, "hidden_dim": 64}
_LLAMA = {"vocab_size": 260, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
_LLAMA |= {"num_attention_heads": 6, "head_dim": 32, "max_position_embeddings": 64, "bos_token_id": None}
_LLAMA |= {"eos_token_id": 256, "initializer_range": 0.2}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _BERT),
    "roberta": ("Roberta", _BERT | {"max_position_embeddings": 26, "type_vocab_size": 1, "pad_token_id": 1}),
    "distilbert": ("DistilBert", _DISTIL | {"max_position_embeddings": 24}),
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", _LLAMA | {"num_key_value_heads": 6}),
    "llama-gqa": ("Llama", _LLAMA | {"num_key_value_heads": 3}),
    "llama-biases": ("Llama", _LLAMA | {"num_key_value_heads": 2, "attention_bias": True}),
    "mistral": ("Mistral", _LLAMA | {"num_key_value_heads": 6, "sliding_window": 5}),
    "qwen2": ("Qwen2", _LLAMA | {"num_key_value_heads": 2}),
}


def write_encoder(folder: Path, name: str, **changes: Any) -> None:
    family, fields = ENCODERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(
        getattr(transformers, f"{family}Config")(**fields | changes)
    )
    _wild(model, 0.15)
    model.save_pretrained(folder)
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


def write_decoder(folder: Path, name: str, **changes: Any) -> None:
    family, fields = DECODERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**copy.deepcopy(fields) | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    _wild(model, 0.05)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def decoder_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """transformers' own logits of a folder, ``[len(ids), vocab]``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(torch.tensor([ids])).logits[0]
    return logits


def _wild(model: Any, scale: float) -> None:
    """The default initialisation leaves biases 0 and everything small, and hides what is left out."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
