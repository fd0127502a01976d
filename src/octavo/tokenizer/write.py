"""Writing a tokenizer as the files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.tokenizer.parts import TokenizerParts


def write_hf(parts: TokenizerParts, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    ``parts_from_hf`` reads a tokenizer with the same ids and templates from them.
    """
    backend = tokenizers.Tokenizer.from_str(parts.backend.to_str())
    # They are in the vocabulary already and keep their ids.
    backend.add_special_tokens(
        [
            AddedToken(
                token.text,
                special=True,
                normalized=False,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
            )
            for token in parts.control
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    templates = parts.chat_templates
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": parts.add_bos,
        "clean_up_tokenization_spaces": False,
        **parts.named_tokens,
    }
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": k, "template": v} for k, v in templates.items()]
    _write(folder / "tokenizer_config.json", config)
    _write(
        folder / "generation_config.json",
        {"bos_token_id": parts.bos_token_id, "eos_token_id": list(parts.eos_token_ids)},
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
