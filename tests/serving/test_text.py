"""Rows of the cases that need a tokenizer or a model of their own, over HTTP: T05, T08, A07."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from http_server import CHAT, COMPLETE, Running, Script, engine_fixtures, events, of
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from octavo.serving.server import ServerOptions
from octavo.tokenizer import Tokenizer, TokenizerError

TEXTS = ["Hello world! Café déjà vu — 123 😊", "x =  5", "he hello\n\n  hello ", ""]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'critic' %}{{ raise_exception('a critic has no place here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with merges, whose prompts begin with <s>."""
    path = tmp_path_factory.mktemp("merged")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "Ġhe", "llo"]
    merges = [("h", "e"), ("l", "l"), ("Ġ", "he"), ("ll", "o")]
    hf = HFTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(["<s>", "</s>"])
    bos = hf.token_to_id("<s>")
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    hf.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def merged(folder: Path) -> Iterator[Running]:
    parts = engine_fixtures.Tiny(Tokenizer.from_hf(folder))
    running = Running(parts, ServerOptions(models=("tiny",)))
    yield running
    running.close()


@pytest.mark.parametrize("text", TEXTS)
def test_t08_ids_are_those_of_the_model_s_own_tokenizer(merged, folder, text):
    own = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    assert merged.post("/tokenize", {"prompt": text}).json()["tokens"] == own.encode(text).ids
    if "hello" in text:
        assert len(own.encode(text).ids) < len(text), "the merges were not used"
    bare = {"prompt": text, "add_special_tokens": False}
    ids = merged.post("/tokenize", bare).json()["tokens"]
    assert ids == own.encode(text, add_special_tokens=False).ids
    assert merged.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}


def test_t08_a_pre_tokenizer_that_is_not_known_is_refused(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["pre_tokenizer"] = {"type": "Fortune", "seed": 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="tokenizer"):
        Tokenizer.from_hf(tmp_path)


def test_t05_a_template_that_begins_with_bos_gives_one(merged, folder):
    bos = HFTokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<s>")
    ids = merged.post("/tokenize", {"messages": of("hello")}).json()["tokens"]
    assert ids[0] == bos
    assert ids.count(bos) == 1
    # Its text in a message, or in a prompt, is text.
    for body in ({"messages": of("<s>hello")}, {"prompt": "<s>hello"}):
        assert merged.post("/tokenize", body).json()["tokens"].count(bos) == 1
    used = merged.post(CHAT, {"messages": of("hello"), "max_tokens": 1}).json()["usage"]
    assert used["prompt_tokens"] == len(ids)


def test_t06_a_role_that_the_template_refuses_gets_the_template_s_reason(merged):
    messages = [*of("hello"), {"role": "critic", "content": "boo"}]
    error = merged.refused(CHAT, {"messages": messages}, 400, "a critic has no place here")
    assert error["param"] == "messages"
    assert merged.post(CHAT, {"messages": of("hello"), "max_tokens": 1}).status_code == 200


class Gated(Script):
    """Puts out a text, and stands before the token at ``place`` of it until ``gate`` opens."""

    def __init__(self, text: str, prompt_length: int, place: int) -> None:
        super().__init__(text, prompt_length)
        self.last, self.gate = prompt_length + place - 1, threading.Event()

    def forward(self, batch, kv_cache, attention):
        if int(batch.positions.max()) == self.last:
            assert self.gate.wait(20)
        return super().forward(batch, kv_cache, attention)


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one two STO? three", "STOP", "one two "),  # the tail could still become the stop string
        ("one two STO? three", "XTOP", "one two STO"),  # it could not
    ],
)
def test_t02_only_what_could_become_a_stop_is_held_back(make_server, text, stop, shown):
    model = Gated(text, 5, text.index("?"))
    server = make_server(model=model, num_blocks=64)
    body = {"prompt": "hello", "stop": stop, "stream": True}
    with server.http.stream("POST", COMPLETE, json=body) as response:
        chunks, got = events(response), ""
        while len(got) < len(shown):
            got += json.loads(next(chunks))["choices"][0]["text"]
        assert got == shown
        model.gate.set()
        rest = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks if chunk != "[DONE]"]
    assert got + "".join(rest) == text


class TwoFavourites(engine_fixtures.TinyModel):
    """Likes ``first`` best, then ``second``, whatever came before."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.first, self.second = first, second

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(rows), engine_fixtures.HEAD_WIDTH), -10.0)
        out[:, self.first], out[:, self.second] = 5.0, 4.9
        return out


@pytest.mark.parametrize(
    ("penalty", "in_prompt", "elsewhere"),
    [
        ({}, "XXXXXX", "XXXXXX"),
        # Of the prompt and the output, once.
        ({"repetition_penalty": 1.5}, "YXXXXX", "XYXXXX"),
        # Of the output only, once; or each time.
        ({"presence_penalty": 1.0}, "XYXXXX", "XYXXXX"),
        ({"frequency_penalty": 1.0}, "XYXYXY", "XYXYXY"),
    ],
)
def test_a07_which_tokens_a_penalty_counts(make_server, server, penalty, in_prompt, elsewhere):
    x, y = server.post("/tokenize", {"prompt": "XY"}).json()["tokens"]
    own = make_server(model=TwoFavourites(x, y), num_blocks=64)
    body = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **penalty}
    assert own.complete("Paris X X", **body)["choices"][0]["text"] == in_prompt
    assert own.complete("Paris", **body)["choices"][0]["text"] == elsewhere
