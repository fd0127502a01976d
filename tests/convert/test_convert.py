"""Whole checkpoints: what the converted folder computes, through the engine and through transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.convert import write
from octavo.convert.heads import LayerHeads
from octavo.convert.pool import Plan, turn
from octavo.convert.recover import Recovery
from octavo.convert.run import Options, compute, convert
from octavo.convert.source import read_source
from octavo.convert.stack import load_stack, run
from octavo.convert.write import write_model
from octavo.weights.load import open_checkpoint

IDS = torch.randint(0, 256, (21,), generator=torch.Generator().manual_seed(5)).tolist()
TEXT = " ".join(tiny.WORDS[i % 7 * (i % 3 + 1) % 13] for i in range(1500))
QUICK = Recovery(steps=8, batch=64, learning_rate=3e-3)
encoders = pytest.mark.parametrize("name", list(tiny.ENCODERS))
decoders = pytest.mark.parametrize("name", list(tiny.DECODERS))


def quiet(what: str, steps: int) -> Callable[[], None]:
    return lambda: None


def write_any(folder: Path, name: str) -> Path:
    folder.mkdir()
    (tiny.write_encoder if name in tiny.ENCODERS else tiny.write_decoder)(folder, name)
    return folder


def turned_folder(original: Path, out: Path, family: str) -> None:
    """The same model in other coordinates, by turns drawn at random."""
    source = read_source(open_checkpoint(original))
    assert source.family == family
    generator = torch.Generator().manual_seed(1)

    def any_turn(count: int, size: int, family: str) -> torch.Tensor:
        if family == "orthogonal":
            return torch.linalg.qr(torch.randn(count, size, size, generator=generator))[0]
        angle = torch.rand(count, size // 2, generator=generator) * 6.3
        cos, sin = torch.diag_embed(angle.cos()), torch.diag_embed(angle.sin())
        return torch.cat((torch.cat((cos, -sin), -1), torch.cat((sin, cos), -1)), -2)

    layers: list[LayerHeads] = []
    for layer in source.heads():
        kv, size = layer.k.shape[0], layer.head_dim
        qk, vo = any_turn(kv, size, family), any_turn(kv, size, "orthogonal")
        layers.append(turn(layer, Plan([], [], qk, vo, 0.0)))
    out.mkdir()
    write_model(source, layers, 1, 1024, out)


@decoders
def test_turning_a_decoders_heads_changes_no_logit(tmp_path: Path, name: str) -> None:
    original = write_any(tmp_path / "original", name)
    turned_folder(original, tmp_path / "turned", "phases")
    want, got = (tiny.decoder_logits(folder, IDS) for folder in (original, tmp_path / "turned"))
    assert want.std() > 0.5
    assert not torch.equal(got, want)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@encoders
def test_turning_an_encoders_heads_changes_no_vector(tmp_path: Path, name: str) -> None:
    original = write_any(tmp_path / "original", name)
    turned_folder(original, tmp_path / "turned", "orthogonal")
    want, got = (LLM(f, num_threads=1).embed(tiny.TEXTS) for f in (original, tmp_path / "turned"))
    assert not torch.equal(got, want)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@decoders
def test_rate_one_and_every_key_is_the_original_decoder(tmp_path: Path, name: str) -> None:
    original, out = write_any(tmp_path / "original", name), tmp_path / "out"
    convert(original, out, Options(compress_rate=1, topk=64), quiet)
    want = tiny.decoder_logits(original, IDS)
    torch.testing.assert_close(tiny.decoder_logits(out, IDS), want, atol=1e-4, rtol=0)
    assert scores(out) == pytest.approx(scores(original), abs=1e-4)
    assert load_file(out / "model.safetensors").keys() == load_file(original / "model.safetensors").keys()


@encoders
def test_rate_one_and_every_key_is_the_original_encoder(tmp_path: Path, name: str) -> None:
    original, out = write_any(tmp_path / "original", name), tmp_path / "out"
    convert(original, out, Options(compress_rate=1, topk=24), quiet)
    want, got = (LLM(folder, num_threads=1).embed(tiny.TEXTS) for folder in (original, out))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def scores(folder: Path) -> list[float]:
    """Log-probabilities of a prompt's tokens in the engine."""
    llm = LLM(folder, num_threads=1, num_blocks=16)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(IDS, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return [entry[i].logprob for i, entry in zip(IDS[1:], output.prompt_logprobs[1:], strict=True)]


@decoders
@pytest.mark.parametrize("method", ["mean", "aligned"])
def test_a_converted_decoder_is_a_plain_one_with_fewer_heads(tmp_path: Path, name: str, method: str) -> None:
    """The engine and transformers agree on it, and on its sizes."""
    original, out = write_any(tmp_path / "original", name), tmp_path / "out"
    report = convert(original, out, Options(compress_rate=3, topk=8, method=method), quiet)
    config = json.loads((out / "config.json").read_text())
    assert config["num_attention_heads"] == report["num_heads"][1] == 2
    assert config["num_key_value_heads"] == report["num_kv_heads"][1] == (1 if name == "llama-gqa" else 2)
    assert (config["head_dim"], config["c2psa"]) == (32, {"compress_rate": 3, "topk": 8})
    logprobs = torch.log_softmax(tiny.decoder_logits(out, IDS)[:-1, :257], -1)
    want = logprobs.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()
    assert scores(out) == pytest.approx(want, abs=1e-4)
    (output,) = LLM(out, num_threads=1, num_blocks=16).generate("the cat", use_tqdm=False)
    assert output.outputs[0].token_ids


@encoders
@pytest.mark.parametrize("rate", [2, 6])
def test_a_converted_encoder_keeps_the_top_keys(tmp_path: Path, name: str, rate: int) -> None:
    """What the engine makes of the folder is what the stack makes of the pooled heads with top-k."""
    original, out = write_any(tmp_path / "original", name), tmp_path / "out"
    options = Options(compress_rate=rate, topk=3)
    convert(original, out, options, quiet)
    engine = LLM(out, num_threads=1).encoder
    assert [layer.attention.num_heads for layer in engine.encoder.layers] == [6 // rate] * 2
    source = read_source(open_checkpoint(original))
    stack, heads = load_stack(source.checkpoint, source.config), compute(original, options, quiet).heads
    for text in tiny.TEXTS:
        ids = engine.tokenizer.encode(text, max_tokens=24, truncate=False).ids
        with torch.no_grad():
            sparse, dense = (stack.outcome(run(stack, heads, torch.tensor([ids]), k)) for k in (3, None))
        torch.testing.assert_close(engine.embed([text]), sparse, atol=1e-5, rtol=1e-5)
        assert len(ids) <= 3 or not torch.allclose(sparse, dense, atol=1e-4)


def test_the_stack_is_the_model(tmp_path: Path) -> None:
    """With its own heads it gives transformers' logits, for several windows at once."""
    for name in tiny.DECODERS:
        folder = write_any(tmp_path / name, name)
        source = read_source(open_checkpoint(folder))
        stack = load_stack(source.checkpoint, source.config)
        windows = torch.tensor([IDS, IDS[::-1]])
        with torch.no_grad():
            logits = stack.outcome(run(stack, source.heads(), windows))
        for row, window in zip(logits, windows.tolist(), strict=True):
            torch.testing.assert_close(row, tiny.decoder_logits(folder, window), atol=1e-4, rtol=1e-4)


def test_heads_that_are_copies_in_other_coordinates_convert_without_loss(tmp_path: Path) -> None:
    """Two of three heads are made of the third and turned; the converted model is the original's equal."""
    original, out = write_any(tmp_path / "original", "llama-mha"), tmp_path / "out"
    source = read_source(open_checkpoint(original))
    copied = []
    for layer in source.heads():
        places = torch.tensor([0, 1, 1, 0, 0, 1])
        copied.append(replace(layer, q=layer.q[places], k=layer.k[places], v=layer.v[places]))
    (tmp_path / "copies").mkdir()
    write_model(source, copied, 1, 64, tmp_path / "copies")
    strip_c2psa(tmp_path / "copies")
    turned_folder(tmp_path / "copies", tmp_path / "turned", "phases")
    strip_c2psa(tmp_path / "turned")
    report = convert(tmp_path / "turned", out, Options(compress_rate=3, topk=64), quiet)
    assert max(report["pooling_error"]["aligned"]) < 1e-9 < min(report["pooling_error"]["mean"])
    want = tiny.decoder_logits(tmp_path / "turned", IDS)
    torch.testing.assert_close(tiny.decoder_logits(out, IDS), want, atol=1e-4, rtol=0)


def strip_c2psa(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["c2psa"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["bert", "llama-mha", "qwen2"])
def test_fitting_brings_layers_nearer_and_is_reproducible(tmp_path: Path, name: str) -> None:
    original = write_any(tmp_path / "original", name)
    options = Options(compress_rate=3, topk=8, text=TEXT, recovery=QUICK, window=16, tokens=1024)
    calls: list[str] = []

    def progress(what: str, steps: int) -> Callable[[], None]:
        return lambda: calls.append(what)

    made = compute(original, options, progress)
    assert calls.count("distil") == 2 * (QUICK.steps + 1)
    distillation = made.report["distillation"]
    before, after = distillation["target_error_before"], distillation["target_error_after"]
    assert all(b > a for b, a in zip(before, after, strict=True))
    steps = {step["step"]: step for step in made.report["steps"]}
    sparse = ["original, top-k"] if name == "bert" else []
    assert list(steps) == ["original", *sparse, "mean-pooled", "aligned", "aligned+distilled"]
    assert steps["original"]["layer_error"] == 0
    assert steps["aligned+distilled"]["layer_error"] < steps["aligned"]["layer_error"]
    metric = "cosine" if name == "bert" else "perplexity"
    assert all(metric in step for step in made.report["steps"])
    again = compute(original, options, quiet)
    other = compute(original, replace(options, recovery=replace(QUICK, seed=1)), quiet)
    for one, two, three in zip(made.heads, again.heads, other.heads, strict=True):
        assert torch.equal(one.q, two.q)
        assert not torch.equal(one.q, three.q)
        assert one.biased or not one.q[..., -1].any()


def test_without_heads_to_pool_fitting_starts_at_the_original(tmp_path: Path) -> None:
    original = write_any(tmp_path / "original", "bert")
    options = Options(compress_rate=1, topk=24, text=TEXT, recovery=QUICK, window=16, tokens=512)
    steps = compute(original, options, quiet).report["steps"]
    assert [step["cosine"] for step in steps] == pytest.approx([1.0] * 4, abs=1e-4)


def test_tensors_keep_their_type(tmp_path: Path) -> None:
    original, out = write_any(tmp_path / "original", "llama-gqa"), tmp_path / "out"
    file = original / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    convert(original, out, Options(compress_rate=2, topk=8), quiet)
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert LLM(out, num_threads=1, num_blocks=16).generate(IDS, use_tqdm=False)


def test_sentence_files_come_along(tmp_path: Path) -> None:
    original, out = write_any(tmp_path / "original", "bert"), tmp_path / "out"
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{k}", "path": p} for k, p in kinds.items()]
    (original / "modules.json").write_text(json.dumps(modules))
    (original / "1_Pooling").mkdir()
    (original / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    convert(original, out, Options(compress_rate=2, topk=24), quiet)
    config = LLM(out, num_threads=1).encoder.config
    assert (config.pooling, config.normalize, config.head_dim) == ("cls", True, 8)


def test_a_decoder_says_that_it_attends_to_all_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    original = write_any(tmp_path / "original", "llama-gqa")
    for topk, lines in ((8, 1), (64, 0)):
        out = tmp_path / f"top{topk}"
        convert(original, out, Options(compress_rate=2, topk=topk), quiet)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="octavo"):
            LLM(out, num_threads=1, num_blocks=16)
        found = [record.getMessage() for record in caplog.records if "keys" in record.getMessage()]
        if lines:
            caplog.clear()
            LLM(out, num_threads=1, num_blocks=16, attn_topk=topk)
            assert not [record for record in caplog.records if "keys" in record.getMessage()]
        line = f"top{topk} asks for the top {topk} keys: the decoder attends to all without attn_topk"
        assert found == [line] * lines


def test_refusals(tmp_path: Path) -> None:
    original = write_any(tmp_path / "original", "llama-mha")
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "x").touch()
    file.touch()

    def refuses(reason: str, folder: Path = original, out: Path = tmp_path / "out", **options) -> None:
        with pytest.raises(ValueError, match=reason):
            convert(folder, out, Options(**{"compress_rate": 2, "topk": 8} | options), quiet)
        assert not (tmp_path / "out").exists()
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []

    refuses(r"full is not empty", out=full)
    refuses(r"file is a file", out=file)
    refuses(r"divide num_heads=6 \(1, 2, 3, 6\), got 4", compress_rate=4)
    refuses(r"divide num_heads=6 \(1, 2, 3, 6\), got 'x'", compress_rate="x")
    refuses("topk must be", topk=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.convert.evaluate._window_ids", lambda *_: torch.tensor([[260]]))
        refuses("the text has token 260, the model knows 260", text="any")
    refuses("method must be one of mean, aligned, got 'sum'", method="sum")
    refuses("text is too short: its four fifths must hold a window of 64 tokens", text="a short text")
    converted = tmp_path / "converted"
    convert(original, converted, Options(compress_rate=2, topk=8), quiet)
    refuses("converted is converted already", folder=converted)
    path = original / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    refuses("is a qwen3 model; what can be converted are llama, mistral, qwen2, bert", folder=original)


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = write_any(tmp_path / "original", "bert")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        convert(original, tmp_path / "out", Options(compress_rate=2, topk=8), quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["original"]
    (tmp_path / "out").mkdir()  # an empty folder is taken
    monkeypatch.undo()
    convert(original, tmp_path / "out", Options(compress_rate=2, topk=8), quiet)
    assert LLM(tmp_path / "out", num_threads=1).embed("the cat").shape == (1, 48)


def test_a_config_whose_heads_do_not_fit_is_refused(tmp_path: Path) -> None:
    original, out = write_any(tmp_path / "original", "bert"), tmp_path / "out"
    convert(original, out, Options(compress_rate=2, topk=8), quiet)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    with pytest.raises(ValueError, match=r"hidden_size \(48\) must be the heads \(3\) times compress_rate"):
        LLM(out)
    (out / "config.json").write_text(json.dumps(config | {"c2psa": {"compress_rate": 0, "topk": 8}}))
    with pytest.raises(ValueError, match="compress_rate must be a positive integer"):
        LLM(out)
