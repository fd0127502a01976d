"""Incremental decoding: the text of an output while it grows, and stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from octavo.tokenizer import IncrementalDetokenizer, Tokenizer
from octavo.tokenizer.gguf import parts_from_gguf

KINDS = ["byte_level", "sentencepiece", "sentencepiece_prefixed"]


@pytest.fixture(params=KINDS, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def ids_of(vocab_size: int = 300) -> st.SearchStrategy[list[int]]:
    # Every fixture has at least 300 ids: control tokens, all bytes, some words.
    return st.lists(st.integers(0, vocab_size - 1), max_size=30)


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> str:
    pieces = [detokenizer.push(token_id) for token_id in ids]
    text = "".join([*pieces, detokenizer.flush()])
    assert text == detokenizer.text
    return text


@given(ids=ids_of(), skip=st.booleans())
def test_pieces_joined_equal_the_whole(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert stream(detokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=ids_of())
def test_byte_level_text_equals_the_library(
    byte_level_folder: Path, byte_level: Tokenizer, ids: list[int]
) -> None:
    library = tokenizers.Tokenizer.from_file(str(byte_level_folder / "tokenizer.json"))
    assert byte_level.decode(ids, True) == library.decode(ids, skip_special_tokens=True)
    assert byte_level.decode(ids, False) == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_text_equals_the_library(sentencepiece_metadata: dict[str, Any], prefix: bool) -> None:
    parts = parts_from_gguf({**sentencepiece_metadata, "tokenizer.ggml.add_space_prefix": prefix})
    tokenizer = Tokenizer(parts)
    types = sentencepiece_metadata["tokenizer.ggml.token_type"]
    spaced = [i for i, kind in enumerate(types) if kind == 1 and tokenizer.id_to_text(i)[0] == " "]
    # Byte tokens that are not UTF-8 are the one difference: the library then gives up a whole run of them.
    ascii_bytes = [i for i, kind in enumerate(types) if kind == 6][:128]
    ordinary = [i for i, kind in enumerate(types) if kind == 1]

    @given(ids=st.lists(st.sampled_from(spaced) | st.sampled_from(ordinary) | st.sampled_from(ascii_bytes)))
    def check(ids: list[int]) -> None:
        expected = parts.backend.decode(ids)
        assert tokenizer.decode(ids) == expected
        assert stream(IncrementalDetokenizer(tokenizer), ids) == expected

    check()


@given(text=st.text(max_size=30))
def test_text_survives_streaming(tokenizer: Tokenizer, text: str) -> None:
    """T01: whatever the text, no U+FFFD that is not in it, in any piece."""
    text = text.replace("▁", "_")
    ids = tokenizer.encode(text, add_bos=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert detokenizer.flush() == ""
    assert "".join(pieces) == text


@pytest.mark.parametrize("text", ["😊", "漢字", "👩‍👩‍👧", "ñ", "a😊b"])
def test_t01_a_character_split_over_tokens_comes_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = [*tokenizer.encode(text, add_bos=False)]
    assert len(ids) > len(text)  # it is really split
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert all("�" not in piece for piece in pieces)
    assert "" in pieces
    assert "".join(pieces) == text


def test_t01_what_is_left_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 😊", add_bos=False)[:-1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) == "ok "
    assert detokenizer.flush() == "�"
    assert detokenizer.text == tokenizer.decode(ids) == "ok �"
    assert detokenizer.flush() == ""


@given(prompt=ids_of(), ids=ids_of())
def test_an_output_goes_on_where_its_prompt_ends(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    whole = tokenizer.decode(prompt + ids)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
    text = stream(detokenizer, ids)
    assert text == tokenizer.decode(ids, prompt_ids=prompt)
    # A character that the prompt left unfinished is finished by the output. Until then some tokenizers show
    # one U+FFFD for it and others one for each of its bytes, which may be three.
    assert whole.endswith(text)
    shown = whole[: len(whole) - len(text)]
    assert tokenizer.decode(prompt) in [shown + "�" * unfinished for unfinished in range(4)]


def test_the_space_before_a_first_word(sentencepiece_prefixed: Tokenizer) -> None:
    ids = sentencepiece_prefixed.encode("the the", add_bos=False)
    assert sentencepiece_prefixed.id_to_text(ids[0]).startswith(" ")
    assert stream(IncrementalDetokenizer(sentencepiece_prefixed), ids) == "the the"
    bos = sentencepiece_prefixed.bos_token_id
    assert bos is not None
    assert stream(IncrementalDetokenizer(sentencepiece_prefixed, prompt_ids=[bos]), ids) == "the the"
    assert stream(IncrementalDetokenizer(sentencepiece_prefixed, prompt_ids=[bos, *ids]), ids) == " the the"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_metaspace_text_equals_the_library(tmp_path: Path, scheme: str) -> None:
    pieces = ["<s>", "▁", "▁a", "a", "▁▁", "b▁c"]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken("<s>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_hf(tmp_path)
    for ids in ([2, 2], [1, 2], [4, 2], [0, 2, 5], [3, 1, 1], [5, 4], []):
        for skip in (True, False):
            expected = backend.decode(ids, skip_special_tokens=skip)
            assert stream(IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), ids) == expected


def test_a_decoder_that_is_not_known_is_named(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_hf(tmp_path)
    with pytest.raises(ValueError, match="decoder 'WordPiece' is not supported"):
        tokenizer.decode([0])


# Stop strings. Few letters, so that overlaps and repeats are common.
LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def cut_at_first_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The law: the text ends before the stop that is complete first; the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(words=st.lists(LETTERS, max_size=8), stops=STOPS, include=st.booleans())
@settings(max_examples=300)
def test_t02_stop_strings(byte_level: Tokenizer, words: list[str], stops: list[str], include: bool) -> None:
    """T02: over any cut into tokens, and with only what could become a stop held back."""
    ids = [token_id for word in words for token_id in byte_level.encode(word)]
    detokenizer = IncrementalDetokenizer(byte_level, stop=stops, include_stop_str_in_output=include)
    expected, stop = cut_at_first_stop("".join(words), stops, include)
    given_out, so_far = "", ""
    for token_id in ids:
        so_far += byte_level.id_to_text(token_id)
        given_out += detokenizer.push(token_id)
        if detokenizer.stop_hit is None:
            held = so_far[len(given_out) :]
            assert so_far.startswith(given_out)
            assert held == "" or any(s.startswith(held) and s != held for s in stops)
            # Nothing that could still become a stop was given out.
            tails = [so_far[i:] for i in range(len(so_far)) if any(s.startswith(so_far[i:]) for s in stops)]
            assert held == max(tails, key=len, default="")
    given_out += detokenizer.flush()
    assert (given_out, detokenizer.stop_hit) == (expected, stop)
    assert detokenizer.text == given_out
    if not include:
        assert not any(s in given_out for s in stops)


def test_t02_a_stop_string_that_spans_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat\nUser: the hat", add_bos=False)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("\nUser:",))
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) == "the cat"
    assert detokenizer.stop_hit == "\nUser:"
    assert detokenizer.flush() == ""


def test_t02_a_tail_that_was_no_stop_comes_back(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, stop=("STOP",))
    pieces = [detokenizer.push(token_id) for char in "xSTOR" for token_id in byte_level.encode(char)]
    assert pieces == ["x", "", "", "", "STOR"]
    assert [detokenizer.push(byte_level.encode("S")[0]), detokenizer.flush()] == ["", "S"]


def test_min_tokens_a_stop_that_is_complete_too_early_is_text(byte_level: Tokenizer) -> None:
    one = {char: byte_level.encode(char)[0] for char in "ab"}
    detokenizer = IncrementalDetokenizer(byte_level, stop=("ab",))
    pieces = [detokenizer.push(one[char], check_stop=False) for char in "ab"]
    assert (pieces, detokenizer.stop_hit) == (["", "ab"], None)
    # One that begins before min_tokens and ends after it counts.
    assert detokenizer.push(one["a"], check_stop=False) == ""
    assert detokenizer.push(one["b"]) == ""
    assert (detokenizer.text, detokenizer.stop_hit) == ("ab", "ab")


def test_stop_strings_repeat_themselves(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, stop=("aab",))
    ids = [token_id for char in "aaaab" for token_id in byte_level.encode(char)]
    assert stream(detokenizer, ids) == "aa"


def test_special_tokens_do_not_break_a_stop_or_a_character(byte_level: Tokenizer) -> None:
    first, second, *rest = byte_level.encode("😊")
    detokenizer = IncrementalDetokenizer(byte_level, stop=("ab",))
    a, b = byte_level.encode("a")[0], byte_level.encode("b")[0]
    assert "".join(map(detokenizer.push, [first, 1, second, *rest])) == "😊"
    assert [detokenizer.push(token_id) for token_id in (a, 1, b)] == ["", "", ""]
    assert detokenizer.stop_hit == "ab"


@pytest.mark.parametrize("stop", [("",), ("a", ""), "ab", (1,)])
def test_t03_an_empty_stop_string_is_an_error(byte_level: Tokenizer, stop: object) -> None:
    with pytest.raises(ValueError, match="none of them empty"):
        IncrementalDetokenizer(byte_level, stop=stop)  # type: ignore[arg-type]


def test_an_id_out_of_the_vocabulary_is_an_error(byte_level: Tokenizer) -> None:
    """A06: ids past the tokenizer have no text."""
    for wrong in (-1, byte_level.vocab_size):
        with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary"):
            byte_level.decode([wrong])
        with pytest.raises(ValueError, match=f"ids are 0 to {byte_level.vocab_size - 1}"):
            IncrementalDetokenizer(byte_level).push(wrong)


def test_a_token_costs_the_same_however_long_the_text_is(byte_level: Tokenizer) -> None:
    """Counted, not timed: each token's bytes are decoded once."""
    seen: list[int] = []
    vocabulary = byte_level.vocabulary
    original = vocabulary.bytes_of

    def counting(token_id: int, *, first: bool = False) -> bytes:
        seen.append(token_id)
        return original(token_id, first=first)

    vocabulary.bytes_of = counting  # type: ignore[method-assign]
    try:
        ids = byte_level.encode("hello world 😊 " * 50)
        detokenizer = IncrementalDetokenizer(byte_level, stop=("never",))
        longest = max(len(detokenizer.push(token_id)) for token_id in ids)
    finally:
        del vocabulary.bytes_of
    assert seen == ids
    assert longest < 20
