"""A folder in Hugging Face's format through the whole offline API, against transformers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo import LLM, SamplingParams

PROMPTS = ["hello", "a somewhat longer prompt, over several blocks", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=288,  # wider than the tokenizer
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=[256, 7],
        bos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(path, max_shard_size="100KB")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return path


@pytest.mark.parametrize("attention", ["fused", "sdpa", "bmm", "loop", "reference"])
def test_greedy_ids_and_logprobs_equal_transformers(folder: Path, attention: str) -> None:
    llm = LLM(str(folder), attention=attention, num_threads=1, num_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for output in outputs:
        ids, new = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids + new])).logits[0, :-1, :257]
        expected = torch.log_softmax(logits, -1)
        scored = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for row, token, entry in zip(expected, (ids + new)[1:], scored, strict=True):
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert new == expected[len(ids) - 1 :].argmax(-1).tolist()


def test_a08_every_end_token_of_the_config_ends_the_text(folder: Path) -> None:
    llm = LLM(str(folder), num_threads=1, num_blocks=64)
    assert llm.engine.eos_token_ids == (7, 256)
    for end in (7, 256):
        params = SamplingParams(temperature=0.0, logit_bias={end: 1e4})
        (output,) = llm.generate("hello", params, use_tqdm=False)
        assert output.outputs[0].token_ids == [end]
        assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention": "flash"}, ["attention", "fused", "flash"]),
        ({"block_size": 24}, ["block_size", "24"]),
        ({"max_model_len": 10_000}, ["max_model_len", "256", "10000"]),
        ({"kv_cache_memory": "a lot"}, ["a size", "a lot"]),
        ({"kv_cache_memory": 10}, ["holds no block"]),
        ({"max_num_seqs": 0}, ["max_num_seqs"]),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens"]),
        ({"max_num_batched_tokens": float("nan")}, ["max_num_batched_tokens", "whole number"]),
        ({"max_num_batched_tokens": 1.5}, ["max_num_batched_tokens", "1.5"]),
        ({"max_model_len": "64"}, ["max_model_len", "'64'"]),
        ({"block_size": "16"}, ["block_size", "'16'"]),
        ({"num_blocks": True}, ["num_blocks", "True"]),
        ({"num_threads": 5000}, ["num_threads", "1024", "5000"]),
        ({"attention": "sdpa", "device": "abacus"}, ["device", "abacus"]),
    ],
)
def test_options_out_of_range_are_one_sentence(folder: Path, options: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        LLM(str(folder), **options)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        *({"num_threads": bad} for bad in (1.5, "2", True, 0, 10**20)),
        *({"block_size": bad} for bad in (16.0, "16", None, True)),
        *({"num_blocks": bad} for bad in (0, 1.5, "x", 10**12)),
        *({"max_model_len": bad} for bad in (0, -1, 1.5, "8k")),
        *({"max_num_seqs": bad} for bad in (0.5, "2", None)),
        *({"max_num_batched_tokens": bad} for bad in (1.5, None)),
        *({"seed": bad} for bad in ("x", 1.5, [1])),
        *({"device": bad} for bad in ("banana", None)),
        {"enable_prefix_caching": "no"},
        {"kv_dtype": None},
        {"attention": None},
    ],
    ids=str,
)
def test_an_option_of_the_wrong_kind_is_one_sentence_that_names_it(folder: Path, options: dict) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name) as error:
        LLM(str(folder), **options)
    assert "\n" not in str(error.value)


def test_a_model_is_a_name_or_a_path() -> None:
    for bad in (None, 5, b"x"):
        with pytest.raises(ValueError, match="model must be a name or a path"):
            LLM(bad)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 5000},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 2**30},
        {"intermediate_size": 2**30},
        {"vocab_size": 2**30},
        {"head_dim": 2**30},
        {"vocab_size": 10**30},
    ],
    ids=str,
)
def test_w10_a_config_that_its_files_cannot_hold_is_refused_before_memory_is_taken(
    folder: Path, tmp_path: Path, changes: dict
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    start = time.process_time()
    with pytest.raises(ValueError, match=r"can hold no more than|the most is|head_dim"):
        LLM(str(tmp_path), attention="sdpa", num_threads=1, num_blocks=8)
    assert time.process_time() - start < 1.0


def test_s14_a_length_that_the_pool_cannot_hold_is_lowered_with_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(str(folder), num_threads=1, num_blocks=4)
    assert llm.max_model_len == 64
    lines = [record.getMessage() for record in caplog.records if "max_model_len" in record.getMessage()]
    assert len(lines) == 1
    assert "256" in lines[0]
    assert "64" in lines[0]
