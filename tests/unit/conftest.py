"""Small tokenizers, made here from a few sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import settings
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from octavo.tokenizer import Tokenizer

# A busy machine is no reason to fail.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

SENTENCES = [
    "the cat sat on the mat and the dog ran to the hat 1234567890",
    "hello world, hello there! what's this? it's the end of the turn",
    "im_start im_end user assistant system <| |> < > | café déjà vu <|a <|b <|c x<|d y<|e z<|f",
    "x = 5; for i in range(10): print(i)  # indent    and spaces",
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: byte-level BPE, ids 0..2 are control tokens, 3.. are bytes and merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=CONTROL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    folder = tmp_path_factory.mktemp("byte_level")
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": CONTROL[0],
        "eos_token": CONTROL[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_hf(byte_level_folder)


@pytest.fixture(scope="session")
def bos_folder(byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a post-processor that puts BOS before every text, and end tokens 0 and 2."""
    folder = tmp_path_factory.mktemp("bos")
    backend = tokenizers.Tokenizer.from_file(str(byte_level_folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{CONTROL[0]} $A", special_tokens=[(CONTROL[0], 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text((byte_level_folder / "tokenizer_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    """GGUF metadata of a SentencePiece vocabulary: control, user-defined, byte and scored tokens."""
    tokens = ["<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "  "]
    types = [2, 3, 3, 3, 3, 4, 4, 4]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [6] * 256
    words = " ".join(SENTENCES).replace(" ", "▁")
    pieces = {words[i : i + n] for n in (2, 3, 4, 5) for i in range(0, len(words) - n, 3)}
    pieces |= {"th", "he", "▁t", "▁th", "▁the", "the", "en", "end", "<e", "_of", "turn", "aa", "aaa", "▁▁"}
    pieces |= set(words) | set(">") | {"<end", "<end_of", "<end_of_turn"}  # nearly a control token
    pieces -= set(tokens)
    ordered = sorted(pieces, key=lambda piece: (-len(piece) % 3, piece))
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(ordered))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens + ordered,
        "tokenizer.ggml.token_type": types + [1] * len(ordered),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    """Like Gemma: no space before the first word."""
    return Tokenizer.from_gguf(sentencepiece_metadata)


@pytest.fixture(scope="session")
def sentencepiece_prefixed(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    """Like Llama 2: a space before every word, the first one too; no user-defined tokens."""
    types = [5 if kind == 4 else kind for kind in sentencepiece_metadata["tokenizer.ggml.token_type"]]
    changes = {"tokenizer.ggml.add_space_prefix": True, "tokenizer.ggml.token_type": types}
    return Tokenizer.from_gguf({**sentencepiece_metadata, **changes})
