"""The law of stored weights: a model on a checkpoint's own bits is, to the bit, the model on their values."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo import LLM, SamplingParams
from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.bench import perplexity
from octavo.cache.kv_cache import KVCache
from octavo.config import EngineConfig
from octavo.engine.build import _check_products, assemble, load, read_config
from octavo.kernels.api import AttentionSpec
from octavo.kernels.native import ThreadPool
from octavo.models.decoder import Decoder
from octavo.models.native import NativeDecoder
from octavo.models.registry import canonical
from octavo.weights.load import load_model, load_stored, open_checkpoint

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K", "F16", "BF16", "F32")
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 300, 256, 512, 4, 2, 64, 2
IDS = [5, 299, 17, 0, 33, 33, 128, 250, 9, 61, 77]
BLOCK_SIZE = 4


def tensors(names: str) -> dict[str, np.ndarray]:
    """A tiny llama in GGUF's or Hugging Face's names; the rotary rows differ, which no test here minds."""
    rng = np.random.default_rng(0)
    q, kv = (HEADS * DIM, HIDDEN), (KV_HEADS * DIM, HIDDEN)
    layer = {
        ("attn_norm", "input_layernorm"): (HIDDEN,),
        ("ffn_norm", "post_attention_layernorm"): (HIDDEN,),
        ("attn_q", "self_attn.q_proj"): q,
        ("attn_k", "self_attn.k_proj"): kv,
        ("attn_v", "self_attn.v_proj"): kv,
        ("attn_output", "self_attn.o_proj"): q[::-1],
        ("ffn_gate", "mlp.gate_proj"): (INNER, HIDDEN),
        ("ffn_up", "mlp.up_proj"): (INNER, HIDDEN),
        ("ffn_down", "mlp.down_proj"): (HIDDEN, INNER),
    }
    shapes = {("token_embd", "model.embed_tokens"): (VOCAB, HIDDEN), ("output_norm", "model.norm"): (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {(f"blk.{i}.{g}", f"model.layers.{i}.{h}"): shape for (g, h), shape in layer.items()}
    at = ("gguf", "hf").index(names)
    return {
        f"{pair[at]}.weight": (rng.standard_normal(shape) * 0.1 + (len(shape) == 1)).astype(np.float32)
        for pair, shape in shapes.items()
    }


def write_gguf(path: Path, kind: str, also: dict[str, str] | None = None) -> Path:
    """All matrices in ``kind``, but those of a part that ``also`` has a type for."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    for name, tensor in tensors("gguf").items():
        dtype = gguf.GGMLQuantizationType[(also or {}).get(name.split(".")[-2], kind)]
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, blocks_of(tensor, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks_of(values: np.ndarray, dtype: gguf.GGMLQuantizationType) -> np.ndarray:
    """The package's own quantiser; random blocks of small scales where it has none."""
    try:
        return gguf.quants.quantize(values, dtype)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[dtype]
        rng = np.random.default_rng(values.size)
        blocks = rng.integers(0, 256, (values.size // block, size), dtype=np.uint8)
        for at in {"Q4_K": (0, 2), "Q6_K": (208,)}[dtype.name]:
            scales = (rng.standard_normal(len(blocks)) * 1e-4).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
        return blocks.reshape(len(values), -1)


def write_folder(path: Path, kind: str) -> Path:
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    state = {name: torch.from_numpy(t).to(DTYPES[kind]) for name, t in tensors("hf").items()}
    save_file(state, path / "model.safetensors")
    return path


def logits(path: Path, weights: str | None) -> torch.Tensor:
    """``[len(IDS), VOCAB]`` of two chunks, by the native decoder; weights None: by the torch decoder."""
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint)
    pool = ThreadPool(2)
    to_canonical = partial(canonical, config.architecture)
    if weights is None:
        decoder: Decoder | NativeDecoder = Decoder(config)
        load_model(decoder, checkpoint, tied=config.tie_word_embeddings, canonical=to_canonical)
    else:
        decoder = NativeDecoder(config, pool)
        load_stored(decoder, checkpoint, weights, tied=config.tie_word_embeddings, canonical=to_canonical)
    shape = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "block_size": BLOCK_SIZE}
    spec = AttentionSpec(num_heads=config.num_heads, kv_dtype=torch.float32, device="cpu", **shape)
    attention = AttentionBackend("reference" if weights is None else "fused", spec, pool)
    blocks = torch.arange(-(-len(IDS) // BLOCK_SIZE), dtype=torch.int32).flip(0)[None]
    cache = KVCache(num_layers=config.num_layers, num_blocks=blocks.shape[1], **shape)
    rows = []
    for start, stop in ((0, 7), (7, len(IDS))):
        positions = torch.arange(start, stop)
        batch = ForwardBatch(
            token_ids=torch.tensor(IDS[start:stop]),
            positions=positions,
            slot_mapping=blocks[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_table=blocks,
            seq_lens=torch.tensor([stop], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32),
            logits_rows=positions - start,
        )
        with torch.inference_mode():
            rows.append(decoder.logits(decoder(batch, cache, attention), batch.logits_rows).clone())
    return torch.cat(rows)


def assert_law(path: Path) -> None:
    kept = logits(path, "auto")
    assert torch.isfinite(kept).all()
    assert kept.std() > 0.01
    assert torch.equal(kept, logits(path, "float32"))
    assert torch.allclose(kept, logits(path, None), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_as_stored_gives_the_bits_of_its_float32_expansion(tmp_path: Path, kind: str) -> None:
    assert_law(write_gguf(tmp_path / "x.gguf", kind))


@pytest.mark.parametrize("kind", DTYPES)
def test_safetensors_as_stored_give_the_bits_of_their_float32_expansion(tmp_path: Path, kind: str) -> None:
    assert_law(write_folder(tmp_path / "m", kind))


@pytest.mark.parametrize("weights", ["float16", "bfloat16", "q8_0", "q4_1"])
def test_what_is_rounded_at_load_is_near_and_not_the_same(tmp_path: Path, weights: str) -> None:
    """That the option reaches the kernels; how near is measured on a real model and text."""
    path = write_folder(tmp_path / "m", "F32")
    exact, rounded = logits(path, "float32"), logits(path, weights)
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().mean() < {"q4_1": 0.3, "q8_0": 0.03}.get(weights, 0.02) * exact.std()


# --- the default model ---


@pytest.fixture(scope="module")
def config(smollm2_path: Path) -> EngineConfig:
    config = EngineConfig(model=str(smollm2_path), num_threads=2)
    return replace(config, cache=replace(config.cache, num_blocks=64))


def answers(config: EngineConfig) -> list[tuple[list[int], list[dict], list[dict | None]]]:
    loaded = load(open_checkpoint(config.model), config)
    llm = LLM.from_engine(assemble(config, loaded))
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    prompts = ["The capital of France is", "It was a bright cold day in April, and", "def main("]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.mark.real_model
def test_the_default_model_answers_with_the_same_bits_as_stored(config: EngineConfig) -> None:
    """Greedy ids and every log-probability that was asked for, equal without a tolerance."""
    assert answers(config) == answers(replace(config, weights="float32"))


@pytest.mark.real_model
def test_a_quantised_model_is_not_quantised_again(config: EngineConfig) -> None:
    with pytest.raises(ValueError, match=r"weights='q8_0' would round '.*' a second time"):
        load(open_checkpoint(config.model), replace(config, weights="q8_0"))


@pytest.mark.parametrize("changes", [{"attention": "sdpa"}, {"weights": "float16"}])
def test_an_engine_needs_the_model_that_was_loaded_for_it(tmp_path: Path, changes: dict) -> None:
    config = EngineConfig(model="m", weights="float32", num_threads=1)
    loaded = load(open_checkpoint(write_tokenized(tmp_path / "m")), config)
    with pytest.raises(ValueError, match=r"was loaded with .*weights='float32'"):
        assemble(replace(config, **changes), loaded)


def write_tokenized(path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    write_folder(path, "F32")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return path


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_the_torch_backends_refuse_what_they_would_have_to_expand(tmp_path: Path, attention: str) -> None:
    with pytest.raises(
        ValueError, match=r"weights='q8_0' needs attention=.fused.: with '\w+' they are float32"
    ):
        LLM(str(tmp_path), attention=attention, weights="q8_0")
    with pytest.raises(ValueError, match=r"weights must be one of auto, .* got 'int3'"):
        LLM(str(tmp_path), weights="int3")


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenized(tmp_path_factory.mktemp("int8") / "m"))


def test_activations_in_int8_answer_the_same_cold_warm_in_chunks_and_in_company(tokenized: str) -> None:
    """Ids and log-probabilities, to the bit; and they are not those of float32."""
    prompts = [[(7 * i + s) % 250 for i in range(n)] for s, n in enumerate((1, 5, 17, 30, 41))]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)

    def answers(calls: list[list[list[int]]], **options: object) -> list[tuple[list[int], list[dict]]]:
        llm = LLM(tokenized, weights="q4_1", block_size=4, num_blocks=128, num_threads=2, **options)
        outputs = [o for prompts in calls for o in llm.generate(prompts, params, use_tqdm=False)]
        if len(outputs) > len(prompts):
            assert all(o.num_cached_tokens for o in outputs[len(prompts) + 1 :])
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    alone = answers([[p] for p in prompts], activations="int8", enable_prefix_caching=False)
    assert alone != answers([[p] for p in prompts], enable_prefix_caching=False)
    assert answers([prompts], activations="int8", enable_prefix_caching=False) == alone
    assert answers([prompts], activations="int8", max_num_batched_tokens=8) == alone
    assert answers([prompts, prompts], activations="int8") == alone * 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {},
            r"activations=.int8. needs weights in q8_0, q4_0, .* or q6_k, but those of m are in f32: use",
        ),
        (
            {"weights": "float16"},
            r"activations=.int8. needs weights that are quantised, got weights='float16'",
        ),
        ({"weights": "q8_0", "attention": "sdpa"}, r"needs attention=.fused."),
        ({"attention": "sdpa"}, r"activations=.int8. needs attention=.fused., got 'sdpa'"),
        ({"activations": "int4"}, r"activations must be one of float32, int8, got 'int4'"),
    ],
)
def test_activations_in_int8_are_refused_where_they_cannot_be(
    tokenized: str, options: dict, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        LLM(tokenized, **{"activations": "int8", "num_blocks": 8} | options)


def test_the_command_line_takes_activations(tokenized: str) -> None:
    command = [
        sys.executable,
        "-c",
        "from octavo.cli import main; main()",
        "run",
        tokenized,
        "--raw",
        "--json",
    ]
    options = [
        "--prompt",
        "abc",
        "--max-tokens",
        "3",
        "--weights",
        "q8_0",
        "--activations",
        "int8",
        "--threads",
        "1",
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True, timeout=120)
    answer = json.loads(done.stdout)
    assert (answer["weights"], answer["activations"]) == ("q8_0", "int8")
    assert len(answer["token_ids"]) == 3


def test_what_keeps_float32_activations_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of two types: the products with a matrix that has no such kernel."""
    checkpoint = open_checkpoint(
        write_gguf(tmp_path / "x.gguf", "Q8_0", also={"ffn_down": "F16", "attn_v": "BF16"})
    )
    decoder = NativeDecoder(read_config(checkpoint), ThreadPool(1), int8=True)
    load_stored(decoder, checkpoint, "auto", tied=True, canonical=partial(canonical, "llama"))
    _check_products(decoder, "x.gguf")
    assert caplog.messages == ["x.gguf: 4 of 9 products keep float32 activations, for weights in bf16, f16"]


def test_perplexity_is_that_of_the_second_half_of_each_window(tmp_path: Path) -> None:
    """Against the same losses taken from logits of the torch decoder."""
    model = write_tokenized(tmp_path / "m")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 2, encoding="utf-8")
    options = {"num_threads": 1, "num_blocks": 16}
    told: list[str] = []
    result = perplexity.run(
        str(model),
        ["float32", "q8_0", "q8_0/int8"],
        text,
        window=24,
        max_windows=2,
        options=options,
        report=told.append,
    )
    llm = LLM(str(model), attention="reference", **options)
    ids = llm.tokenizer.encode(text.read_text())
    losses = []
    for piece in (ids[:24], ids[24:48]):
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate(piece, params, use_tqdm=False)
        losses.append(-sum(output.prompt_logprobs[i][piece[i]].logprob for i in range(12, 24)) / 12)
    row = result["weights"]["float32"]
    assert row["window_losses"] == pytest.approx(losses, abs=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)
    assert row["loss_change"] == 0
    assert 0 < abs(result["weights"]["q8_0"]["loss_change"]) < 0.1
    json.dumps(result)
    with pytest.raises(ValueError, match=r"weights are auto, .* got 'q2'"):
        perplexity.run(str(model), ["q2"], text, window=24, max_windows=2, options={}, report=told.append)
    text.write_text("short", encoding="utf-8")
    with pytest.raises(ValueError, match=r"text.txt has 5 tokens, less than one window of 24"):
        perplexity.run(
            str(model), ["auto"], text, window=24, max_windows=2, options=options, report=told.append
        )


# --- memory ---

PEAK = """
import sys
from octavo import LLM, SamplingParams

def mib(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) / 1024

llm = LLM(sys.argv[1], num_blocks=64, num_threads=1)
llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
kv = 64 * 16 * 30 * 3 * 64 * 2 * 4 / 2**20
print(mib("VmHWM") - kv)
"""


@pytest.mark.real_model
def test_peak_memory_is_the_weights_as_stored_the_pool_and_less_than_300_mib(smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(smollm2_path)],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    weights = smollm2_path.stat().st_size / 2**20
    assert weights < float(done.stdout) < weights + 300
