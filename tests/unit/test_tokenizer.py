"""Encoding: user text never becomes a control token, one BOS, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers

from octavo.tokenizer import Tokenizer, TokenizerError

FRAGMENTS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<end_of_turn>",
    "<|im_",
    "end|>",
    "<",
    ">",
    "|",
    " the ",
]
MIXED = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8).map("".join)


@pytest.fixture(params=["byte_level", "sentencepiece", "sentencepiece_prefixed"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@given(text=MIXED)
def test_t07_plain_text_never_becomes_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("▁", "_")  # SentencePiece's own sign for a space
    ids = tokenizer.encode(text, add_bos=False)
    assert tokenizer.special_token_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text


@given(text=MIXED)
def test_t07_plain_text_is_what_it_would_be_without_control_tokens(
    byte_level: Tokenizer, byte_level_folder: Path, text: str
) -> None:
    state = json.loads((byte_level_folder / "tokenizer.json").read_text())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
    without = tokenizers.Tokenizer.from_str(json.dumps(state))
    assert byte_level.encode(text) == without.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def byte_level_reference(byte_level_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(byte_level_folder)


@given(text=MIXED)
def test_allowed_control_tokens_are_where_the_library_finds_them(
    byte_level: Tokenizer, byte_level_reference: Any, text: str
) -> None:
    text += "<tool>"  # an added token that is not special: literal in any text
    assert byte_level.encode(text, allow_special=True) == byte_level_reference.encode(
        text, add_special_tokens=False
    )
    assert byte_level.encode(text)[-1] == byte_level.vocab_size - 1


def test_control_tokens_that_swallow_white_space(tmp_path: Path) -> None:
    """Flags of added tokens, against the library: lstrip, rstrip, single_word, the longest of several."""
    backend = tokenizers.Tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.model = models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(
        [
            AddedToken("<r>", rstrip=True, normalized=False),
            AddedToken("<l>", lstrip=True, normalized=False),
            AddedToken("word", single_word=True, normalized=False),
            AddedToken("<r>>", normalized=False),
        ]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    mine = Tokenizer.from_hf(tmp_path)
    pieces = st.sampled_from(["<r>", "<l>", "word", "<r>>", " ", "\n", "a", "_", "<"])

    @settings(max_examples=300)
    @given(text=st.lists(pieces, max_size=8).map("".join))
    def check(text: str) -> None:
        assert mine.encode(text, allow_special=True) == backend.encode(text, add_special_tokens=False).ids

    check()


def test_a_space_before_the_first_word_only(tmp_path: Path) -> None:
    """Text behind a control token is not the first, though it is encoded by itself."""
    pieces = ["<unk>", "<s>", "▁", "a", "▁a"]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("<unk>", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    mine = Tokenizer.from_hf(tmp_path)
    for text in ("a<s>a", "<s>a", "a", "a a<s> a<s>", "<s><s>a", ""):
        assert mine.encode(text, allow_special=True) == backend.encode(text, add_special_tokens=False).ids


def test_t07_a_vocabulary_of_whole_words_is_kept_from_its_control_tokens(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((char, -5.0) for char in "</s>ab")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.add_special_tokens([AddedToken("</s>", normalized=False), AddedToken("<unk>", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>"}))
    tokenizer = Tokenizer.from_hf(tmp_path)
    assert tokenizer.encode("a</s></s>b") == [6, 2, 3, 4, 5, 2, 3, 4, 5, 7]
    assert tokenizer.encode("aé") == [6, 0]  # an unknown character is the unknown token, as ever
    assert tokenizer.encode("a</s>", allow_special=True) == [6, 1]


def test_t05_one_bos(bos_folder: Path, byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_hf(bos_folder)
    plain = tokenizer.encode("hello", add_bos=False)
    assert 0 not in plain
    assert tokenizer.encode("hello") == [0, *plain]
    assert tokenizer.encode("<|endoftext|>hello", allow_special=True) == [0, *plain]
    # A text that only looks like it starts with BOS does not.
    assert tokenizer.encode("<|endoftext|>hello").count(0) == 1
    assert tokenizer.decode(tokenizer.encode("<|endoftext|>hello")) == "<|endoftext|>hello"
    assert byte_level.encode("hello") == plain
    assert byte_level.encode("hello", add_bos=True) == [0, *plain]


@pytest.mark.parametrize(("flag", "expected"), [(True, True), (False, False), (None, True)])
def test_t05_the_config_has_the_last_word_on_bos(
    bos_folder: Path, tmp_path: Path, flag: Any, expected: bool
) -> None:
    (tmp_path / "tokenizer.json").write_text((bos_folder / "tokenizer.json").read_text())
    config = {"bos_token": {"content": "<|endoftext|>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config if flag is None else {**config, "add_bos_token": flag})
    )
    assert Tokenizer.from_hf(tmp_path).add_bos is expected


def test_t05_bos_that_a_model_lacks_is_an_error(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf({**sentencepiece_metadata, "tokenizer.ggml.bos_token_id": None})
    assert not tokenizer.add_bos
    with pytest.raises(TokenizerError, match="has no BOS token"):
        tokenizer.encode("the", add_bos=True)


def test_s01_an_empty_prompt(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert byte_level.encode("") == []
    assert byte_level.decode([]) == ""
    assert sentencepiece.encode("") == [sentencepiece.bos_token_id]
    assert "the prompt is empty" in Tokenizer.EMPTY_PROMPT


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "😊\udc00"])
def test_t09_a_lone_surrogate_is_an_error(byte_level: Tokenizer, text: str) -> None:
    with pytest.raises(
        ValueError, match=r"the prompt contains a lone surrogate \(U\+D[0-9A-F]{3}\) at character"
    ):
        byte_level.encode(text)


@pytest.mark.parametrize("text", [None, b"bytes", 3, ["a"]])
def test_a_prompt_that_is_no_string_is_an_error(byte_level: Tokenizer, text: Any) -> None:
    with pytest.raises(ValueError, match="the prompt must be a string"):
        byte_level.encode(text)


def test_a06_vocab_size_is_the_tokenizer_s_own(byte_level: Tokenizer, byte_level_folder: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(byte_level_folder / "tokenizer.json"))
    assert byte_level.vocab_size == library.get_vocab_size() == max(library.get_vocab().values()) + 1
    assert library.id_to_token(byte_level.vocab_size) is None
    assert byte_level.id_to_text(byte_level.vocab_size - 1) == "<tool>"


def test_a08_several_end_tokens_and_id_0(bos_folder: Path, byte_level: Tokenizer) -> None:
    assert Tokenizer.from_hf(bos_folder).eos_token_ids == (2, 0)
    assert byte_level.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("generation_config.json", {"eos_token_id": 0}, (2, 0)),
        ("generation_config.json", {"eos_token_id": None}, (2,)),
        ("config.json", {"eos_token_id": [5, 2]}, (2, 5)),
    ],
)
def test_a08_end_tokens_of_the_configs(
    byte_level_folder: Path, tmp_path: Path, name: str, value: Any, expected: tuple[int, ...]
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text((byte_level_folder / file).read_text())
    (tmp_path / name).write_text(json.dumps(value))
    assert Tokenizer.from_hf(tmp_path).eos_token_ids == expected


def test_special_ids(byte_level: Tokenizer) -> None:
    assert byte_level.special_token_ids == {0, 1, 2}
    ids = [1, *byte_level.encode("hi"), 2, byte_level.vocab_size - 1]
    assert byte_level.decode(ids) == "hi<tool>"
    assert byte_level.decode(ids, False) == "<|im_start|>hi<|im_end|><tool>"


def test_added_tokens_that_only_the_config_knows(byte_level_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((byte_level_folder / "tokenizer.json").read_text())
    config = json.loads((byte_level_folder / "tokenizer_config.json").read_text())
    size = Tokenizer.from_hf(byte_level_folder).vocab_size
    config["added_tokens_decoder"] = {str(size): {"content": "<late>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_hf(tmp_path)
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.encode("<late>", allow_special=True) == [size]
    assert size not in tokenizer.encode("<late>")
    config["added_tokens_decoder"] = {str(size + 5): {"content": "<late>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=f"gives '<late>' the id {size + 5}"):
        Tokenizer.from_hf(tmp_path)


def test_a_folder_without_a_tokenizer_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json, which is needed"):
        Tokenizer.from_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json of .* cannot be read"):
        Tokenizer.from_hf(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[1]", "must hold a JSON object")]
)
def test_a_broken_config_is_one_sentence(
    byte_level_folder: Path, tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / "tokenizer.json").write_text((byte_level_folder / "tokenizer.json").read_text())
    (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=f"{name} of .* {message}"):
        Tokenizer.from_hf(tmp_path)


def test_transformers_is_not_imported() -> None:
    code = "import sys, octavo.tokenizer; assert not {'transformers', 'gguf', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"a": ' + b"9" * 10_000 + b"}"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", b'{"additional_special_tokens": 5}'),
        ("tokenizer_config.json", b'{"extra_special_tokens": "x"}'),
        ("special_tokens_map.json", b'{"a":' * 100_000),
        ("generation_config.json", b"\xff\xfe"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_a_damaged_file_beside_the_tokenizer_is_one_sentence(byte_level_folder, tmp_path, file, content):
    (tmp_path / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_hf(tmp_path)
    assert "\n" not in str(error.value)
