"""Every architecture against transformers: the same random float32 weights, the same logits."""

import copy
import dataclasses
import json

import pytest
import torch
import transformers

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.cache.kv_cache import KVCache
from octavo.config import ModelConfig, RopeConfig
from octavo.kernels.api import AttentionSpec
from octavo.kernels.native import ThreadPool
from octavo.models.decoder import Decoder
from octavo.models.native import NativeDecoder
from octavo.models.registry import canonical
from octavo.models.rope import frequencies

TOLERANCE = 1e-4
BLOCK_SIZE = 4
SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6, "sliding_window_pattern": 3}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

CASES = {
    "llama": (transformers.LlamaConfig, SMALL),
    "llama-mha": (transformers.LlamaConfig, SMALL | {"num_key_value_heads": 6}),
    "llama-tied": (transformers.LlamaConfig, SMALL | {"tie_word_embeddings": True}),
    "llama-biases": (transformers.LlamaConfig, SMALL | {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": (transformers.LlamaConfig, SMALL | {"rope_parameters": YARN}),
    "mistral": (transformers.MistralConfig, SMALL | {"sliding_window": 8}),
    "qwen2": (transformers.Qwen2Config, SMALL),
    "qwen2-sliding": (transformers.Qwen2Config, SMALL | WINDOW),
    "qwen3": (transformers.Qwen3Config, SMALL | {"head_dim": 16}),
    "gemma3": (transformers.Gemma3TextConfig, SMALL | GEMMA),
    "gemma3-mha": (transformers.Gemma3TextConfig, SMALL | GEMMA | {"num_key_value_heads": 6}),
    "gpt2": (transformers.GPT2Config, GPT2),
    "gpt2-untied": (transformers.GPT2Config, GPT2 | {"tie_word_embeddings": False}),
}


def config_of(case, **changes):
    config_class, fields = CASES[case]
    config = config_class(**copy.deepcopy(fields) | changes)
    config._attn_implementation = "eager"
    return config


def reference_model(config):
    """transformers' own model, with weights wild enough that anything left out shows."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                is_table = "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name
                weight.normal_(0, 0.3 if is_table else 1.5 * config.hidden_size**-0.5)
            elif name.endswith("bias"):
                weight.normal_(0, 0.5)
            else:
                weight.uniform_(-0.6, 0.6).add_(0.0 if config.model_type == "gemma3_text" else 1.0)
    return model


def metadata_of(model):
    """What ``config.json`` of this model would hold."""
    return json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}


def decoder_for(model, config=None, kind=Decoder):
    config = config or ModelConfig.from_hf(metadata_of(model))
    decoder = kind(config)
    missing = decoder.expected_weights()
    for name, tensor in model.state_dict().items():
        for target, part in canonical(config.architecture, name, tensor):
            if target == "lm_head.weight" and config.tie_word_embeddings:
                continue
            decoder.load_weight(target, part)
            assert missing.pop(target) == tuple(part.shape)
    assert not missing
    return decoder


class Paged:
    """Drives a decoder by hand: sequences in scattered blocks, any mix of chunks in a step."""

    def __init__(self, decoder, num_blocks=48, attention="reference"):
        config = decoder.config
        self.decoder = decoder
        self.cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            num_kv_heads=config.num_kv_heads,
            block_size=BLOCK_SIZE,
            head_dim=config.head_dim,
        )
        spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            kv_dtype=torch.float32,
            device="cpu",
        )
        self.attention = AttentionBackend(attention, spec, ThreadPool(1))
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.blocks = {}
        self.lengths = {}

    @torch.inference_mode()
    def step(self, **chunks):
        """Compute each sequence's next tokens; returns the logits of every one, by sequence."""
        positions, slots = [], []
        for name, ids in chunks.items():
            blocks, start = self.blocks.setdefault(name, []), self.lengths.get(name, 0)
            self.lengths[name] = start + len(ids)
            while len(blocks) * BLOCK_SIZE < self.lengths[name]:
                blocks.append(self.free.pop())
            new = range(start, self.lengths[name])
            positions += new
            slots += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in new]
        widest = max(len(self.blocks[name]) for name in chunks)
        counts = [len(ids) for ids in chunks.values()]
        batch = ForwardBatch(
            token_ids=torch.tensor([i for ids in chunks.values() for i in ids]),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_table=torch.tensor(
                [self.blocks[n] + [0] * (widest - len(self.blocks[n])) for n in chunks], dtype=torch.int32
            ),
            seq_lens=torch.tensor([self.lengths[n] for n in chunks], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
            logits_rows=torch.arange(sum(counts)),
        )
        hidden = self.decoder(batch, self.cache, self.attention)
        assert hidden.shape == (sum(counts), self.decoder.config.hidden_size)
        logits = self.decoder.logits(hidden, batch.logits_rows)
        assert logits.dtype == torch.float32
        return dict(zip(chunks, logits.split(counts), strict=True))


def ids_of(length, seed=0):
    return torch.randint(0, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def expected_logits(model, ids):
    return model(torch.tensor([ids])).logits[0]


def worst(got, expected):
    return (got - expected).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_prefill_chunks_and_decode_equal_transformers(case):
    """W07: q/k norm, biases and 1 + w included. Logits of all 21 tokens, however they were computed."""
    model = reference_model(config_of(case))
    decoder = decoder_for(model)
    ids = ids_of(21)
    expected = expected_logits(model, ids)
    assert expected.std() > 0.5  # the tolerance below means something

    assert worst(Paged(decoder).step(a=ids)["a"], expected) < TOLERANCE

    run = Paged(decoder)
    parts = [run.step(a=ids[first:last])["a"] for first, last in ((0, 7), (7, 9), (9, 16))]
    parts += [run.step(a=[token])["a"] for token in ids[16:]]
    assert worst(torch.cat(parts), expected) < TOLERANCE


AS_SERVED = {
    "llama": {"head_dim": 32},
    "llama-biases": {"head_dim": 40},
    "mistral": {"head_dim": 32},
    "qwen2-sliding": {"hidden_size": 192},
    "qwen3": {"head_dim": 64},
    "gemma3": {"head_dim": 32},
    "gpt2": {"n_embd": 128},
}


def native_decoder(config, isa="auto"):
    return NativeDecoder(config, ThreadPool(1), isa=isa)


@pytest.mark.parametrize("attention", ["fused", "sdpa", "bmm", "loop"])
@pytest.mark.parametrize("case", AS_SERVED)
def test_every_backend_equals_transformers(case, attention):
    """What is served: the native decoder with fused attention, torch's with the others."""
    model = reference_model(config_of(case, **AS_SERVED[case]))
    decoder = decoder_for(model, kind=native_decoder if attention == "fused" else Decoder)
    ids, other = ids_of(21), ids_of(12, 1)
    run = Paged(decoder, attention=attention)
    parts = [run.step(a=ids[:9])["a"], run.step(a=ids[9:16], b=other[:5])["a"]]
    parts += [run.step(a=[token], b=other[5:6])["a"] for token in ids[16:17]]
    parts += [run.step(a=[token])["a"] for token in ids[17:]]
    expected = expected_logits(model, ids)
    assert expected.std() > 0.5
    assert worst(torch.cat(parts), expected) < TOLERANCE


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3", "gpt2"])
def test_a_mixed_batch_equals_each_sequence_alone(case):
    model = reference_model(config_of(case))
    a, b, c = ids_of(13, 1), ids_of(9, 2), ids_of(17, 3)
    run = Paged(decoder_for(model))
    steps = [
        run.step(a=a[:11]),
        run.step(a=a[11:12], b=b[:5]),
        run.step(b=b[5:], c=c[:6], a=a[12:]),
        run.step(c=c[6:]),
    ]
    for name, ids in (("a", a), ("b", b), ("c", c)):
        got = torch.cat([step[name] for step in steps if name in step])
        assert worst(got, expected_logits(model, ids)) < TOLERANCE


def test_w06_sliding_window_8_at_sequence_9():
    """W06: the ninth token sees itself and the seven before it, not the first."""
    model = reference_model(config_of("mistral", num_hidden_layers=1))
    decoder = decoder_for(model)
    assert decoder.config.window(0) == 8
    ids = ids_of(9)
    other = [(ids[0] + 1) % 101, *ids[1:]]
    got, got_other = Paged(decoder).step(a=ids)["a"], Paged(decoder).step(a=other)["a"]
    assert worst(got, expected_logits(model, ids)) < TOLERANCE
    assert torch.equal(got[8], got_other[8])
    assert worst(got[7], got_other[7]) > 0.01


def test_w05_factors_of_a_gguf_file_equal_llama3_scaling():
    """W05: a GGUF file says llama3 scaling as a tensor of divisors, one for each frequency."""
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    model = reference_model(config_of("llama", rope_parameters=scaling))
    config = ModelConfig.from_hf(metadata_of(model))
    plain = RopeConfig(theta=10000.0)
    factors = frequencies(plain, config.head_dim)[0] / frequencies(config.rope, config.head_dim)[0]
    assert factors.max() == pytest.approx(8.0)

    decoder = Decoder(dataclasses.replace(config, rope=dataclasses.replace(plain, scaling="factors")))
    assert decoder.expected_weights()["rope_freqs.weight"] == (config.head_dim // 2,)
    decoder.load_weight("rope_freqs.weight", factors)
    for name, tensor in model.state_dict().items():
        decoder.load_weight(name, tensor)
    ids = ids_of(21)
    expected = expected_logits(model, ids)
    assert worst(Paged(decoder).step(a=ids)["a"], expected) < TOLERANCE
    assert worst(Paged(decoder_for(model)).step(a=ids)["a"], expected) < TOLERANCE
    unscaled = decoder_for(model, dataclasses.replace(config, rope=plain))
    assert worst(Paged(unscaled).step(a=ids)["a"], expected) > 10 * TOLERANCE


MUTANTS = {
    "rope base": ("llama", lambda c: {"rope": dataclasses.replace(c.rope, theta=5e3)}),
    "yarn's attention factor": (
        "llama-yarn",
        lambda c: {"rope": dataclasses.replace(c.rope, attention_factor=1.0)},
    ),
    "no rope scaling": ("llama-yarn", lambda c: {"rope": RopeConfig(theta=c.rope.theta)}),
    "norm epsilon": ("llama", lambda c: {"norm_eps": 1e-2}),
    "window one wider": ("mistral", lambda c: {"sliding_window": 9}),
    "window of the wrong layers": ("qwen2-sliding", lambda c: {"sliding_layers": (0,)}),
    "w instead of 1 + w": ("gemma3", lambda c: {"norm_weight_offset": 0.0}),
    "one rope base": ("gemma3", lambda c: {"rope_local": None}),
    "embedding scale": ("gemma3", lambda c: {"embedding_scale": 1.0}),
    "score scale": ("gemma3", lambda c: {"attention_scale": None}),
    "gelu without tanh": ("gpt2", lambda c: {"activation": "gelu"}),
    "silu": ("gemma3", lambda c: {"activation": "silu"}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_config_shows(mutant):
    """The comparison above is sharp enough to see each of these mistakes."""
    case, change = MUTANTS[mutant]
    model = reference_model(config_of(case))
    config = ModelConfig.from_hf(metadata_of(model))
    wrong = decoder_for(model, dataclasses.replace(config, **change(config)))
    ids = ids_of(21)
    assert worst(Paged(wrong).step(a=ids)["a"], expected_logits(model, ids)) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("case", "flag", "suffix"),
    [
        ("qwen2", "qkv_bias", "_proj.bias"),
        ("qwen3", "qk_norm", "_norm.weight"),
        ("gemma3", "qk_norm", "_norm.weight"),
    ],
)
def test_w07_forgotten_weights_show(case, flag, suffix):
    """W07: a decoder without attention bias or q/k norm neither takes the weights nor gives the logits."""
    model = reference_model(config_of(case))
    config = dataclasses.replace(ModelConfig.from_hf(metadata_of(model)), **{flag: False})
    decoder = Decoder(config)
    refused = []
    for name, tensor in model.state_dict().items():
        if name in decoder.expected_weights():
            decoder.load_weight(name, tensor)
        else:
            refused.append(name)
    assert all(name.endswith(suffix) or name == "lm_head.weight" for name in refused)
    assert len(refused) >= 2 * config.num_layers
    with pytest.raises(ValueError, match="no weight called"):
        decoder.load_weight(refused[0], model.state_dict()[refused[0]])
    ids = ids_of(5)
    assert worst(Paged(decoder).step(a=ids)["a"], expected_logits(model, ids)) > 0.01


def test_w01_tied_embeddings_have_no_lm_head_of_their_own():
    tied = Decoder(ModelConfig.from_hf(metadata_of(reference_model(config_of("llama-tied")))))
    untied = Decoder(ModelConfig.from_hf(metadata_of(reference_model(config_of("llama")))))
    assert "lm_head.weight" not in tied.expected_weights()
    assert untied.expected_weights()["lm_head.weight"] == (101, 48)
    with pytest.raises(ValueError, match=r"no weight called 'lm_head\.weight'"):
        tied.load_weight("lm_head.weight", torch.zeros(101, 48))


def test_w03_a_wrong_shape_is_named_with_both_shapes():
    decoder = Decoder(ModelConfig.from_hf(metadata_of(reference_model(config_of("llama")))))
    with pytest.raises(ValueError, match=r"k_proj\.weight must have shape \(16, 48\).*\(8, 48\)"):
        decoder.load_weight("model.layers.0.self_attn.k_proj.weight", torch.zeros(8, 48))
    with pytest.raises(ValueError, match="no weight called"):
        decoder.load_weight("model.layers.3.input_layernorm.weight", torch.zeros(48))


def test_half_precision_tensors_are_upcast_on_loading():
    decoder = Decoder(ModelConfig.from_hf(metadata_of(reference_model(config_of("llama")))))
    weight = torch.randn(48).bfloat16()
    decoder.load_weight("model.norm.weight", weight)
    assert torch.equal(decoder.norm.weight, weight.float())


def test_gpt2_names_with_and_without_prefix_and_without_masks():
    weight = torch.arange(12.0).view(2, 6)
    for prefix in ("", "transformer."):
        parts = dict(canonical("gpt2", f"{prefix}h.1.attn.c_attn.weight", weight))
        assert list(parts) == [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
        assert torch.equal(parts["model.layers.1.self_attn.k_proj.weight"], weight[:, 2:4].t())
        assert list(canonical("gpt2", f"{prefix}h.1.attn.bias", weight)) == []
    assert list(canonical("gpt2", "unknown.weight", weight)) == [("unknown.weight", weight)]
    with pytest.raises(ValueError, match="q, k and v"):
        list(canonical("gpt2", "h.0.attn.c_attn.bias", torch.zeros(4)))
