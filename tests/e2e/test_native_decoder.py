"""The native decoder: torch's numbers, and the same bits whatever else is computed beside a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.cache.kv_cache import KVCache
from octavo.config import ModelConfig, RopeConfig
from octavo.kernels import fused
from octavo.kernels import layer as kernel
from octavo.kernels.api import AttentionMeta, AttentionSpec
from octavo.kernels.linear import StoredMatrix
from octavo.kernels.native import ThreadPool, _native
from octavo.models.decoder import Decoder
from octavo.models.native import NativeDecoder
from octavo.weights.quantize import quantize

TOLERANCE = 1e-4
BLOCK_SIZE = 8

LLAMA = ModelConfig(
    architecture="llama",
    vocab_size=101,
    hidden_size=96,
    intermediate_size=112,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=64,
)


def variant(**changes: object) -> ModelConfig:
    return dataclasses.replace(LLAMA, **changes)  # type: ignore[arg-type]


GEMMA = {
    "norm_weight_offset": 1.0,
    "activation": "gelu_tanh",
    "qk_norm": True,
    "post_norms": True,
    "embedding_scale": 96**0.5,
    "attention_scale": 24**-0.5,
    "rope": RopeConfig(theta=1e6, scaling="linear", factor=4.0),
    "rope_local": RopeConfig(theta=1e4),
    "sliding_window": 6,
    "sliding_layers": (0,),
    "tie_word_embeddings": True,
}
GPT2 = {
    "architecture": "gpt2",
    "norm": "layer",
    "activation": "gelu_tanh",
    "gated_mlp": False,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "positions": "learned",
    "num_kv_heads": 6,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "llama": LLAMA,
    "llama-odd-sizes": variant(
        hidden_size=67, intermediate_size=45, num_heads=5, num_kv_heads=1, head_dim=40, vocab_size=53
    ),
    "llama-biases": variant(qkv_bias=True, output_bias=True, mlp_bias=True),
    "mistral": variant(architecture="mistral", sliding_window=7, sliding_layers=(0, 1)),
    "qwen2": variant(architecture="qwen2", qkv_bias=True, tie_word_embeddings=True),
    "qwen3": variant(architecture="qwen3", qk_norm=True, head_dim=64),
    "gemma3": variant(architecture="gemma3", **GEMMA),
    "gpt2": variant(**GPT2),
    "gpt2-exact-gelu": variant(**GPT2 | {"activation": "gelu", "tie_word_embeddings": False}),
    "rope-factors": variant(rope=RopeConfig(scaling="factors")),
}
POOLS = {n: ThreadPool(n) for n in (1, 3)}


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in Decoder(config).expected_weights().items():
        draw = torch.randn(shape, generator=generator)
        if name == "rope_freqs.weight":
            weights[name] = draw.abs() + 1
        elif len(shape) == 2:
            table = "embed" in name or "lm_head" in name
            weights[name] = draw * (0.3 if table else 1.5 * shape[1] ** -0.5)
        else:
            weights[name] = draw * 0.4 + (0 if name.endswith("bias") or config.norm_weight_offset else 1)
    return weights


def fill(decoder, config: ModelConfig):
    for name, weight in weights_of(config).items():
        decoder.load_weight(name, weight)
    return decoder


def native(config: ModelConfig, *, threads: int = 1, isa: str = "auto") -> NativeDecoder:
    return fill(NativeDecoder(config, POOLS[threads], isa=isa), config)


INT8_CONFIGS = {
    name: dataclasses.replace(CONFIGS[name], intermediate_size=128)
    for name in ("llama-biases", "gemma3", "gpt2")
}


def in_8_bits(config: ModelConfig, kind: str, *, threads: int = 1, isa: str = "auto") -> NativeDecoder:
    """Matrices in ``kind`` and activations in int8."""
    decoder = NativeDecoder(config, POOLS[threads], isa=isa, int8=True)
    for name, weight in weights_of(config).items():
        if weight.dim() == 2:
            rows = quantize(weight, kind)
            decoder.load_weight(name, StoredMatrix(kind, *weight.shape, rows.view(-1)))
        else:
            decoder.load_weight(name, weight)
    return decoder


class Run:
    """One decoder with its own cache; ``step`` computes the next tokens of any sequences."""

    def __init__(
        self, decoder, attention: str = "fused", kv_dtype: str = "float32", threads: int = 1
    ) -> None:
        config = decoder.config
        shape = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "block_size": BLOCK_SIZE}
        self.decoder = decoder
        self.cache = KVCache(num_layers=config.num_layers, num_blocks=128, kv_dtype=kv_dtype, **shape)
        spec = AttentionSpec(num_heads=config.num_heads, kv_dtype=self.cache.key.dtype, device="cpu", **shape)
        self.attention = AttentionBackend(attention, spec, POOLS[threads])
        self.lengths: dict[int, int] = {}

    @torch.inference_mode()
    def step(
        self, chunks: dict[int, list[int]], read: dict[int, int] | None = None
    ) -> dict[int, torch.Tensor]:
        """Sequence s lives in the blocks 8 s to 8 s + 7. Logits of every new token, by sequence.

        With ``read`` only as many of the last ones are meant to be read.
        """
        positions: list[int] = []
        slots: list[int] = []
        for s, ids in chunks.items():
            start = self.lengths.get(s, 0)
            self.lengths[s] = start + len(ids)
            positions += range(start, start + len(ids))
            slots += range(64 * s + start, 64 * s + start + len(ids))
        counts = [len(ids) for ids in chunks.values()]
        batch = ForwardBatch(
            token_ids=torch.tensor([i for ids in chunks.values() for i in ids]),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_table=torch.tensor([range(8 * s, 8 * s + 8) for s in chunks], dtype=torch.int32),
            seq_lens=torch.tensor([self.lengths[s] for s in chunks], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
            logits_rows=torch.arange(sum(counts)),
            rows_read=None if read is None else torch.tensor([read[s] for s in chunks], dtype=torch.int32),
        )
        hidden = self.decoder.forward(batch, self.cache, self.attention)
        logits = self.decoder.logits(hidden, batch.logits_rows)
        return dict(zip(chunks, logits.split(counts), strict=True))


def ids_of(config: ModelConfig, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


def test_equals_the_torch_decoder(config: ModelConfig) -> None:
    ids = ids_of(config, 23)
    want = Run(fill(Decoder(config), config), "reference").step({0: ids})[0]
    assert want.std() > 0.3  # the tolerance means something
    got = Run(native(config)).step({0: ids})[0]
    assert (got - want).abs().max() < TOLERANCE


def test_bits_do_not_depend_on_chunks_company_threads_or_instruction_set(config: ModelConfig) -> None:
    assert_law(config, partial(native, config))


@pytest.mark.parametrize("name", INT8_CONFIGS)
@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_nor_do_they_with_activations_in_int8(name: str, kind: str) -> None:
    assert_law(INT8_CONFIGS[name], partial(in_8_bits, INT8_CONFIGS[name], kind))


@pytest.mark.parametrize("name", INT8_CONFIGS)
def test_activations_in_int8_are_near(name: str) -> None:
    """Norms, activations and gates are those of float32; only what is multiplied is rounded."""
    config = INT8_CONFIGS[name]
    ids = ids_of(config, 23)
    want = Run(fill(Decoder(config), config), "reference").step({0: ids})[0]
    got = Run(in_8_bits(config, "q8_0")).step({0: ids})[0]
    assert not torch.equal(got, Run(native(config)).step({0: ids})[0])
    assert (got - want).norm() < 0.05 * want.norm()


def assert_law(config: ModelConfig, make: Callable[..., NativeDecoder]) -> None:
    ids = ids_of(config, 23)
    want = Run(make()).step({0: ids})[0]

    run = Run(make(threads=3), threads=3)
    parts = [run.step({0: ids[:1]}), run.step({1: ids_of(config, 40, 1), 0: ids[1:8]})]
    parts += [run.step({0: ids[8:16], **{s: ids_of(config, s, s) for s in (2, 5, 7)}})]
    parts += [run.step({3: [1], 0: [token]}) for token in ids[16:]]
    assert torch.equal(torch.cat([part[0] for part in parts]), want)

    for isa in _native.isas():
        assert torch.equal(Run(make(isa=isa)).step({0: ids})[0], want), isa


class LayerByLayer(AttentionBackend):
    """As a step runs that needs Python between two layers."""

    def one_pass(self, step):
        return None


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_one_pass_over_the_layers_has_the_bits_of_layer_by_layer(config: ModelConfig, kv_dtype: str) -> None:
    whole, apart = Run(native(config), kv_dtype=kv_dtype), Run(native(config), kv_dtype=kv_dtype)
    apart.attention.__class__ = LayerByLayer
    for chunks, read in (
        ({0: ids_of(config, 23), 1: [4]}, None),
        ({0: [7], 1: ids_of(config, 9, 1)}, {0: 1, 1: 0}),
        ({0: [9], 1: [3]}, None),
    ):
        got, want = whole.step(chunks, read), apart.step(chunks, read)
        assert all(torch.equal(got[s], want[s]) for s in chunks)
    assert torch.equal(whole.cache.key, apart.cache.key)
    assert torch.equal(whole.cache.value, apart.cache.value)


def test_a_plan_of_other_rows_or_another_shape_is_refused() -> None:
    run = Run(native(LLAMA))
    run.step({0: [1, 2, 3]})
    layers, caches = run.decoder._native, run.decoder._caches[run.cache]
    positions = torch.tensor([3])

    def one_pass(spec: AttentionSpec, rows: int) -> None:
        step = kernel.Step(run.decoder._shape, positions, positions, caches.layers[0], 4)
        lens = torch.tensor([4], dtype=torch.int32)
        meta = AttentionMeta(torch.zeros(1, 1, dtype=torch.int32), lens, torch.tensor([0, rows]).int())
        plan = fused.plan(meta, spec, POOLS[1])
        kernel.run_layers(layers, caches, [0] * len(layers), step, plan.native, kernel.Workspace(), POOLS[1])

    spec = run.attention.spec
    one_pass(spec, 1)
    with pytest.raises(ValueError, match="the step has 1 rows, its plan 2"):
        one_pass(spec, 2)
    with pytest.raises(ValueError, match="the plan is of another shape than the step"):
        one_pass(dataclasses.replace(spec, kv_dtype=torch.float16), 1)
    with pytest.raises(ValueError, match=r"key must be \[num_blocks, .* torch.float16, contiguous"):
        kernel.LayerCaches(caches.layers, dataclasses.replace(spec, kv_dtype=torch.float16))
    first = caches.layers[0]
    short = first._replace(key=first.key[:5], value=first.value[:5])
    with pytest.raises(ValueError, match="a layer has 5 blocks, the first 128"):
        kernel.LayerCaches([first, short], spec)


def test_a_decoder_does_not_hold_a_cache_whose_engine_is_gone() -> None:
    decoder = native(LLAMA)
    run = Run(decoder)
    run.step({0: [1]})
    assert len(decoder._caches) == 1
    del run
    assert not decoder._caches


def test_more_rows_than_pass_through_a_layer_at_once_have_the_same_bits() -> None:
    config = variant(num_layers=1)
    alone, together = Run(native(config)), Run(native(config, threads=3), threads=3)
    batch = {s: ids_of(config, 50, s) for s in range(12)}
    got = together.step(batch)
    for s, ids in batch.items():
        assert torch.equal(alone.step({s: ids})[s], got[s])


def test_rows_that_nobody_reads_change_no_bit_of_the_others(config: ModelConfig) -> None:
    chunks = {0: ids_of(config, 23), 1: ids_of(config, 9, 1), 2: ids_of(config, 30, 2), 3: [5]}
    read = {0: 1, 1: 0, 2: 30, 3: 1}
    whole, part = Run(native(config)), Run(native(config, threads=3), threads=3)
    want, got = whole.step(chunks), part.step(chunks, read)
    for s, count in read.items():
        end = len(chunks[s])
        assert torch.equal(got[s][end - count :], want[s][end - count :])
    assert not torch.equal(got[1], want[1])  # the last layer leaves out what nobody reads
    assert torch.equal(whole.cache.key, part.cache.key)
    assert torch.equal(whole.cache.value, part.cache.value)
    later = {s: [7] for s in chunks}
    nobody = part.step(later, dict.fromkeys(chunks, 0))
    want = whole.step(later)
    assert not any(torch.equal(nobody[s], want[s]) for s in chunks)
    assert torch.equal(whole.cache.key, part.cache.key)


def test_float16_caches_hold_what_the_torch_decoder_writes(config: ModelConfig) -> None:
    ids = ids_of(config, 23)
    want = Run(fill(Decoder(config), config), "reference", "float16").step({0: ids})[0]
    got = Run(native(config), kv_dtype="float16").step({0: ids})[0]
    assert (got - want).abs().max() < 0.02 * want.abs().max()


def test_same_weights_are_expected_in_the_same_shapes(config: ModelConfig) -> None:
    decoder = NativeDecoder(config, POOLS[1])
    assert decoder.expected_weights() == Decoder(config).expected_weights()


def test_an_order_that_depends_on_the_number_of_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rounding that only rows in company go through turns the comparison to the bit red, and 1e-4 not."""
    ids = ids_of(LLAMA, 23)
    want = Run(native(LLAMA)).step({0: ids})[0]
    honest = kernel.logits

    def rounds_in_company(norm, head, x, rows, *args):
        out = honest(norm, head, x, rows, *args)
        return out if len(rows) == 1 else (out + 1e-3) - 1e-3

    monkeypatch.setattr(kernel, "logits", rounds_in_company)
    got = Run(native(LLAMA)).step({0: ids})[0]
    assert not torch.equal(got, want)
    assert (got - want).abs().max() < TOLERANCE  # which the other law would not have seen


# ---- what is refused


def test_w03_a_wrong_shape_and_an_unknown_name_are_named() -> None:
    decoder = NativeDecoder(LLAMA, POOLS[1])
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match=r"k_proj\.weight must have shape \(64, 96\).*\(8, 96\)"):
        decoder.load_weight(name, torch.zeros(8, 96))
    with pytest.raises(ValueError, match=r"\(64, 96\).*\(96, 64\)"):
        decoder.load_weight(name, StoredMatrix.of(torch.zeros(96, 64)))
    with pytest.raises(ValueError, match=r"\(96,\).*\(97,\)"):
        decoder.load_weight("model.norm.weight", torch.zeros(97))
    with pytest.raises(ValueError, match="no weight called"):
        decoder.load_weight("model.layers.2.input_layernorm.weight", torch.zeros(96))


@pytest.mark.parametrize("ids", [[101], [-1], [3, 2**40]])
def test_a_token_without_an_embedding_is_refused(ids: list[int]) -> None:
    run = Run(native(LLAMA))
    with pytest.raises(ValueError, match=r"token_ids\[\d\] is .*allowed are 0 to 100"):
        run.step({0: ids})


def test_a_slot_outside_the_cache_and_a_position_without_a_row_are_refused() -> None:
    run = Run(native(LLAMA))
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is 1024"):
        run.step({16: [1]})
    learned = Run(native(variant(**GPT2, max_position_embeddings=32)))
    learned.lengths[0] = 32
    with pytest.raises(ValueError, match=r"positions\[0\] is 32, allowed are 0 to 31"):
        learned.step({0: [1]})


def test_a_tied_head_is_not_a_second_copy() -> None:
    tied = NativeDecoder(variant(tie_word_embeddings=True), POOLS[1])
    assert tied._head is tied._embedding
    assert "lm_head.weight" not in tied.expected_weights()
