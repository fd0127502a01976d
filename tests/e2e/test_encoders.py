"""Encoders against transformers: the same weights, the same vectors, alone and in any batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from encoder_checkpoint import (
    FAMILIES,
    SMALL,
    TEXTS,
    checkpoint,
    load,
    write_sentence_files,
)
from safetensors.torch import load_file, save_file

from octavo.encoder_config import EncoderConfig, SentenceFiles
from octavo.engine.encoder import EncoderEngine
from octavo.llm import LLM
from octavo.models.encoder import Encoder, EncoderBatch
from octavo.nn import C2PSA
from octavo.tokenizer.encoder import EncoderTokenizer
from octavo.weights.errors import WeightsError

HEAD = {"architectures": ["BertForSequenceClassification"]}
every = pytest.mark.parametrize("name", list(FAMILIES))


def reference_hidden(model: Any, engine: EncoderEngine, text: Any) -> torch.Tensor:
    """transformers on one text by itself: ``[tokens, hidden]``."""
    encoded = engine.tokenizer.encode(text, max_tokens=100, truncate=False)
    inputs = {"input_ids": torch.tensor([encoded.ids])}
    if engine.config.type_vocab_size > 1:
        inputs["token_type_ids"] = torch.tensor([encoded.segments])
    with torch.no_grad():
        hidden: torch.Tensor = model(**inputs)[0][0]
    return hidden


@every
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [False, True])
def test_embeddings_equal_transformers(tmp_path: Path, name: str, pooling: str, normalize: bool) -> None:
    model = checkpoint(tmp_path, name)
    write_sentence_files(tmp_path, pooling, normalize)
    engine = load(tmp_path)
    pairs = [("the cat", "a dog ran fast"), ("why ?", "on a mat")]
    got = engine.embed([*TEXTS, *pairs])
    for row, text in zip(got, [*TEXTS, *pairs], strict=True):
        hidden = reference_hidden(model, engine, text)
        want = hidden.mean(0) if pooling == "mean" else hidden[0]
        want = torch.nn.functional.normalize(want, dim=0) if normalize else want
        torch.testing.assert_close(row, want, atol=1e-5, rtol=1e-5)


@every
def test_classes_equal_transformers(tmp_path: Path, name: str) -> None:
    labels = {0: "bad", 1: "good", 2: "unsure"}
    model = checkpoint(tmp_path, name, "ForSequenceClassification", id2label=labels, num_labels=3)
    engine = load(tmp_path)
    for output, text in zip(engine.classify(TEXTS), TEXTS, strict=True):
        want = reference_hidden(model, engine, text).softmax(-1)
        assert list(output.scores) == list(labels.values())
        torch.testing.assert_close(torch.tensor(list(output.scores.values())), want, atol=1e-5, rtol=1e-5)
        assert output.label == labels[int(want.argmax())]
        assert output.score == max(output.scores.values())


def test_a_head_of_one_output_and_one_of_many_labels(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    model = checkpoint(tmp_path / "one", "bert", "ForSequenceClassification", num_labels=1)
    engine = load(tmp_path / "one")
    (output,) = engine.classify(["the cat sat"])
    assert output.score == pytest.approx(float(reference_hidden(model, engine, "the cat sat")), abs=1e-5)
    (tmp_path / "many").mkdir()
    kind = {"num_labels": 4, "problem_type": "multi_label_classification"}
    model = checkpoint(tmp_path / "many", "bert", "ForSequenceClassification", **kind)
    engine = load(tmp_path / "many")
    (output,) = engine.classify(["the cat sat"])
    want = reference_hidden(model, engine, "the cat sat").sigmoid()
    torch.testing.assert_close(torch.tensor(list(output.scores.values())), want, atol=1e-5, rtol=1e-5)


@every
def test_n01_a_text_gives_the_same_vector_in_any_company(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, name)
    engine = load(tmp_path)
    together = engine.embed(TEXTS * 5)
    for i, text in enumerate(TEXTS):
        torch.testing.assert_close(engine.embed([text])[0], together[i], atol=1e-5, rtol=1e-5)
    assert engine.embed([]).shape == (0, 32)


def test_n02_segments_of_a_pair(tmp_path: Path) -> None:
    checkpoint(tmp_path, "bert")
    encoded = EncoderTokenizer(tmp_path).encode(("the cat", "a dog ran"), max_tokens=24, truncate=False)
    assert encoded.segments == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(encoded.ids) == 8
    engine = load(tmp_path)
    # The segments matter, and are not those of one longer text.
    pair, swapped = engine.embed([("the cat", "a dog"), ("a dog", "the cat")])
    assert not torch.allclose(pair, swapped, atol=1e-3)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_n03_a_text_that_is_too_long(tmp_path: Path, name: str) -> None:
    """24 positions: RoBERTa has 26, of which two are lost to padding."""
    model = checkpoint(tmp_path, name)
    engine = load(tmp_path)
    fits, long = "cat " * 22, "cat " * 23
    want = reference_hidden(model, engine, fits).mean(0)
    torch.testing.assert_close(engine.embed([fits])[0], want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"^the text has 25 tokens and the model takes 24: .*truncate=True$"):
        engine.embed([long])
    with pytest.raises(ValueError, match=r"^text 1: the text has 25 tokens"):
        engine.embed([fits, long])
    torch.testing.assert_close(engine.embed([long], truncate=True)[0], want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="has 25 tokens"):
        engine.embed([long])  # truncation ended with its call


def test_the_sentence_files_limit_the_length(tmp_path: Path) -> None:
    checkpoint(tmp_path, "bert")
    write_sentence_files(tmp_path, "mean", False, limit=6)
    with pytest.raises(ValueError, match="has 7 tokens and the model takes 6"):
        load(tmp_path).embed(["cat " * 5])


def test_the_text_of_a_control_token_is_plain_text(tmp_path: Path) -> None:
    checkpoint(tmp_path, "bert")
    tokenizer = EncoderTokenizer(tmp_path)
    ids = tokenizer.encode("cat [SEP] dog", max_tokens=24, truncate=False).ids
    assert ids.count(3) == 1
    assert ids[-1] == 3


@pytest.mark.parametrize("text", [3, None, b"cat", ("a", "b", "c"), ("a", 1), "\ud800"])
def test_what_is_no_text_is_refused(tmp_path: Path, text: Any) -> None:
    checkpoint(tmp_path, "bert")
    with pytest.raises(ValueError, match=r"text"):
        load(tmp_path).embed([text])


def test_classify_without_a_head_is_one_sentence(tmp_path: Path) -> None:
    checkpoint(tmp_path, "bert")
    with pytest.raises(ValueError, match="has no classification head"):
        load(tmp_path).classify(["the cat"])


def test_heads_for_other_purposes_are_left_out(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "bert", "ForMaskedLM")
    engine = load(tmp_path)
    want = reference_hidden(model.bert, engine, "the cat").mean(0)
    torch.testing.assert_close(engine.embed(["the cat"])[0], want, atol=1e-5, rtol=1e-5)


def test_w03_a_tensor_that_is_missing_extra_or_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    query = "encoder.layer.1.attention.self.query.weight"
    for change, reason in (
        ({query: None}, "lacks 'layers.1.attention.q_proj.weight'"),
        ({"encoder.layer.1.attention.self.gate.weight": torch.ones(2)}, "has no 'encoder.layer.1.*gate"),
        ({query: torch.ones(8, 32)}, r"q_proj.weight' has shape \[8, 32\] in the checkpoint and \[32, 32\]"),
    ):
        save_file({k: v for k, v in {**tensors, **change}.items() if v is not None}, file)
        with pytest.raises(WeightsError, match=reason):
            load(tmp_path)


def test_a_config_larger_than_its_files_is_refused_at_once(tmp_path: Path) -> None:
    checkpoint(tmp_path, "bert")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 2_000_000_000}))
    with pytest.raises(ValueError, match=r"describes a model of \d+ weights, but its files have \d+ bytes"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "swish"}, "activation must be one of"),
        ({"position_embedding_type": "relative_key"}, "must be 'absolute'"),
        ({"num_attention_heads": 5}, r"hidden_size \(32\) must be a multiple of the heads \(5\)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"model_type": "t5"}, "model_type must be one of bert, roberta, distilbert"),
        ({"c2psa": {"compress_rate": 2}}, "lacks 'topk'"),
        ({"c2psa": 3}, "c2psa must be an object"),
        ({"architectures": "BertModel"}, "architectures must be a list"),
        ({"model_type": "roberta", "pad_token_id": 24}, "leaves none after pad_token_id 24"),
        ({"model_type": "roberta", "pad_token_id": "1"}, "pad_token_id must be a whole number"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps"),
        (HEAD | {"id2label": {"0": "a", "2": "b"}}, "must number distinct labels from 0"),
        (HEAD | {"id2label": {"0": "a", "1": "a"}}, "must number distinct labels from 0"),
    ],
)
def test_config_refuses(change: dict[str, Any], reason: str) -> None:
    config = SMALL | {"model_type": "bert", "type_vocab_size": 2}
    assert EncoderConfig.from_hf(config).max_tokens == 24
    with pytest.raises(ValueError, match=reason):
        EncoderConfig.from_hf(config | change)


def test_sentence_files_refuse() -> None:
    module = [{"type": "sentence_transformers.models.Dense"}]
    with pytest.raises(ValueError, match="names 'Dense'"):
        SentenceFiles.read(module, {}, {})
    with pytest.raises(ValueError, match="mean or cls alone, the checkpoint has pooling_mode_max_tokens"):
        SentenceFiles.read([], {"pooling_mode_max_tokens": True}, {})


def test_a_c2psa_checkpoint_is_a_model_with_fewer_heads(tmp_path: Path) -> None:
    """With r = 1 and every key it is the MHA model; with fewer of both it is another, with its shapes."""
    checkpoint(tmp_path, "bert")
    want = load(tmp_path).embed(TEXTS)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"c2psa": {"compress_rate": 1, "topk": 24}}))
    engine = load(tmp_path)
    assert all(isinstance(layer.attention, C2PSA) for layer in engine.encoder.layers)
    torch.testing.assert_close(engine.embed(TEXTS), want, atol=1e-5, rtol=1e-5)
    path.write_text(json.dumps(config | {"c2psa": {"compress_rate": 1, "topk": 1}}))
    assert not torch.allclose(load(tmp_path).embed(TEXTS), want, atol=1e-3)
    path.write_text(json.dumps(config | {"c2psa": {"compress_rate": 2, "topk": 24}}))
    with pytest.raises(
        WeightsError, match=r"attention.\w+.weight' has shape \[32, 32\] .* and \[(16, 32|32, 16)\]"
    ):
        load(tmp_path)


@pytest.mark.parametrize("c2psa", [{}, {"compress_rate": 2, "topk": 2}])
def test_an_encoder_trains(c2psa: dict[str, int]) -> None:
    """Packed and checkpointed, every parameter gets a gradient."""
    config = EncoderConfig.from_hf(
        SMALL | {"model_type": "bert", "type_vocab_size": 2, "c2psa": c2psa or None}
    )
    model = Encoder(config).train()
    ids = torch.randint(0, 40, (11,))
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4])
    model.embed(
        EncoderBatch(ids, positions, torch.zeros(11, dtype=torch.long), ((2, 3), (1, 5)))
    ).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_llm_embeds_and_says_what_an_encoder_cannot_do(tmp_path: Path) -> None:
    checkpoint(tmp_path, "bert")
    llm = LLM(tmp_path, num_threads=1)
    want = load(tmp_path).embed(TEXTS)
    torch.testing.assert_close(llm.embed(TEXTS), want, atol=1e-6, rtol=1e-6)
    assert llm.embed("the cat").shape == (1, 32)
    assert llm.embed(("the cat", "a dog")).shape == (1, 32)
    assert llm.embed(["the cat", "a dog"]).shape == (2, 32)
    with pytest.raises(ValueError, match=r"is an encoder and writes no text: use embed\(\) or classify\(\)"):
        llm.generate("the cat")
    with pytest.raises(ValueError, match="texts must be text"):
        llm.embed(3)  # type: ignore[arg-type]


def test_the_command_line_refuses_to_chat_with_an_encoder(tmp_path: Path) -> None:
    checkpoint(tmp_path, "bert")
    code = "from octavo.cli import main; main()"
    command = [sys.executable, "-c", code, "run", str(tmp_path), "--prompt", "hello"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is an encoder and writes no text" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_converted_checkpoint_gives_the_same_vector_in_any_company(tmp_path: Path) -> None:
    """C2PSA with shared heads and fewer keys than tokens, from a file of its own shapes."""
    checkpoint(tmp_path, "bert")
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"c2psa": {"compress_rate": 2, "topk": 3}}))
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".attention.self." in name:
            tensors[name] = tensor[:16].contiguous()
        elif name.endswith("attention.output.dense.weight"):
            tensors[name] = tensor[:, :16].contiguous()
    save_file(tensors, file)
    engine = load(tmp_path)
    assert [layer.attention.compress_rate for layer in engine.encoder.layers] == [2, 2, 2]
    together = engine.embed(TEXTS * 5)
    for i, text in enumerate(TEXTS):
        torch.testing.assert_close(engine.embed([text])[0], together[i], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def minilm() -> Path:
    from octavo.weights import hub

    return hub.pull("minilm", progress=False)


@pytest.mark.real_model
def test_minilm_equals_transformers(minilm: Path) -> None:
    """The published model in its own folder, which brings its pooling, its norm and its limit."""
    llm = LLM("minilm", num_threads=1)
    assert (llm.encoder.config.pooling, llm.encoder.config.normalize) == ("mean", True)
    assert llm.encoder.config.max_tokens == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    texts = [
        "The cat sat on the mat.",
        "Café déjà vu — 123 😊",
        "A man is playing a guitar. " * 12,
        "Ein Mann spielt Gitarre.",
        "x",
    ]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    want = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    got = llm.embed(texts)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for i, text in enumerate(texts):
        torch.testing.assert_close(llm.embed(text)[0], got[i], atol=1e-5, rtol=1e-5)
    near, far = llm.embed(["A cat is on a mat.", "Stock prices fell sharply."]) @ got[0]
    assert near > 0.7 > 0.2 > far
