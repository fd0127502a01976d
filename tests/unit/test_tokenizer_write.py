"""A tokenizer written as Hugging Face files and read again is the same one, wherever it came from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.tokenizer import Tokenizer
from octavo.tokenizer.core import Tokenizer as Core
from octavo.tokenizer.gguf import parts_from_gguf
from octavo.tokenizer.hf import parts_from_hf
from octavo.tokenizer.parts import TokenizerParts
from octavo.tokenizer.write import write_hf

TEXTS = [
    "the cat sat on the mat",
    " leading and trailing ",
    "café déjà vu 😊\n\n\tx =  5",
    "<|im_end|> typed by a user <end_of_turn>",
    "<s>",
    "",
]
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def same(parts: TokenizerParts, folder: Path) -> None:
    folder.mkdir()
    write_hf(parts, folder)
    one, two = Core(parts), Tokenizer.from_hf(folder)
    for name in ("vocab_size", "bos_token_id", "eos_token_ids", "special_token_ids", "add_bos"):
        assert getattr(one, name) == getattr(two, name), name
    for text in TEXTS:
        for allow_special in (False, True):
            ids = one.encode(text, allow_special=allow_special)
            assert two.encode(text, allow_special=allow_special) == ids
            for skip in (False, True):
                assert two.decode(ids, skip) == one.decode(ids, skip)
    assert two.has_chat_template is one.has_chat_template
    if one.has_chat_template:
        messages = [{"role": "user", "content": "hi <|im_end|> there"}]
        assert two.apply_chat_template(messages) == one.apply_chat_template(messages)


def test_of_a_folder(byte_level_folder: Path, bos_folder: Path, tmp_path: Path) -> None:
    same(parts_from_hf(byte_level_folder), tmp_path / "plain")
    same(parts_from_hf(bos_folder), tmp_path / "bos")


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("add_bos", [False, True])
def test_of_a_sentencepiece_gguf(
    sentencepiece_metadata: dict[str, Any], tmp_path: Path, prefix: bool, add_bos: bool
) -> None:
    types = sentencepiece_metadata["tokenizer.ggml.token_type"]
    changes = {
        # Literal tokens and a space before the first word do not go together in a real model.
        "tokenizer.ggml.token_type": [5 if kind == 4 else kind for kind in types] if prefix else types,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.chat_template": CHATML,
    }
    same(parts_from_gguf(sentencepiece_metadata | changes), tmp_path / "out")


def test_of_named_chat_templates(byte_level_folder: Path, tmp_path: Path) -> None:
    templates = {"default": CHATML, "tool_use": CHATML + "tools"}
    same(replace(parts_from_hf(byte_level_folder), chat_templates=templates), tmp_path / "out")
    assert parts_from_hf(tmp_path / "out").chat_templates == templates


@pytest.mark.real_model
def test_of_the_default_model(smollm2_path: Path, tmp_path: Path) -> None:
    from octavo.weights.gguf import read_header

    same(parts_from_gguf(read_header(smollm2_path).metadata), tmp_path / "out")
