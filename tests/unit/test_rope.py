"""Rotary positions against transformers' tables, and the rotation's own laws."""

import copy

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from octavo.config import ModelConfig, RopeConfig
from octavo.models.rope import CHUNK, RopeTable, frequencies, rotate

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SCALINGS = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn-without-original": {"rope_type": "yarn", "factor": 8.0},
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
    },
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
POSITIONS = torch.tensor([0, 1, 2, 5, 63, 511, 512, 513, 1023, 1024, 2047, 3000, 4095])


def full_table(rotation):
    """cos and sin with no sign folded in, ``[positions, head_dim]``."""
    cos, sin = rotation.cos[:, 0].clone(), rotation.sin[:, 0].clone()
    sin[:, : sin.shape[1] // 2].neg_()
    return cos, sin


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("style", ["nested", "rope_type", "type"])
def test_w05_table_equals_transformers(name, theta, style):
    """W05: frequencies, cosines and sines, whichever way config.json spells them."""
    scaling = copy.deepcopy(SCALINGS[name])
    hf = transformers.LlamaConfig(
        **{k: v for k, v in LLAMA.items() if k != "architectures"},
        rope_parameters={**copy.deepcopy(scaling), "rope_theta": theta},
    )
    if style == "nested":
        config = LLAMA | {"rope_parameters": {**scaling, "rope_theta": theta}}
    else:
        kind = scaling.pop("rope_type")
        config = LLAMA | {"rope_theta": theta, "rope_scaling": {style: kind, **scaling}}
    rope = ModelConfig.from_hf(config).rope
    assert rope.scaling == name.split("-")[0]

    inverse, factor = frequencies(rope, 64)
    module = LlamaRotaryEmbedding(hf)
    if name != "none":
        expected, expected_factor = ROPE_INIT_FUNCTIONS[hf.rope_parameters["rope_type"]](hf)
        assert factor == pytest.approx(expected_factor)
        assert torch.allclose(inverse, expected, rtol=1e-6, atol=0)
    cos, sin = full_table(RopeTable(rope, 64, "cpu").at(POSITIONS))
    expected_cos, expected_sin = module(torch.zeros(1), POSITIONS[None])
    assert torch.allclose(cos, expected_cos[0], rtol=0, atol=1e-6)
    assert torch.allclose(sin, expected_sin[0], rtol=0, atol=1e-6)


def test_the_scalings_differ_from_each_other():
    """So that the comparison above cannot pass by ignoring the scaling."""
    tables = [
        frequencies(ModelConfig.from_hf(LLAMA | {"rope_parameters": dict(scaling)}).rope, 64)
        for scaling in SCALINGS.values()
    ]
    for i, (a, fa) in enumerate(tables):
        for b, fb in tables[i + 1 :]:
            assert not torch.allclose(a, b, rtol=1e-3) or abs(fa - fb) > 1e-3


@pytest.mark.parametrize("style", ["old", "nested"])
def test_gemma_has_two_tables_and_scales_only_the_global_one(style):
    fields = {k: v for k, v in LLAMA.items() if k != "architectures"} | {
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    old = {
        "rope_theta": 2e5,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    hf = transformers.Gemma3TextConfig(
        **fields,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=copy.deepcopy(nested),
    )
    config = ModelConfig.from_hf(
        fields
        | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 16, "sliding_window_pattern": 2}
        | (old if style == "old" else {"rope_parameters": nested})
    )
    assert config.sliding_layers == (0,)
    module = Gemma3RotaryEmbedding(hf)
    for layer, kind in enumerate(hf.layer_types):
        cos, sin = full_table(RopeTable(config.layer_rope(layer), 64, "cpu").at(POSITIONS))
        expected_cos, expected_sin = module(torch.zeros(1), POSITIONS[None], kind)
        assert torch.allclose(cos, expected_cos[0], atol=1e-6)
        assert torch.allclose(sin, expected_sin[0], atol=1e-6)


def test_rotation_equals_transformers():
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4)
    q, k = torch.randn(13, 4, 64), torch.randn(13, 2, 64)
    cos, sin = LlamaRotaryEmbedding(config)(q, POSITIONS[None])
    expected = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    got = rotate(torch.cat((q, k), 1), RopeTable(RopeConfig(), 64, "cpu").at(POSITIONS))
    assert torch.allclose(got, torch.cat((expected[0][0], expected[1][0]), 1), atol=1e-5)


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    table = RopeTable(RopeConfig(), 64, "cpu")

    def score(query_at, key_at):
        at = table.at(torch.tensor([query_at, key_at]))
        both = rotate(torch.cat((q, k)), at)
        return (both[0] * both[1]).sum(-1)

    assert torch.allclose(score(7, 3), score(507, 503), atol=1e-3)
    assert not torch.allclose(score(7, 3), score(8, 3), atol=1e-2)


def test_rows_have_the_same_bits_however_the_table_grew():
    config = RopeConfig(scaling="yarn", factor=4.0, original_max_position_embeddings=512)
    at_once, in_steps = RopeTable(config, 64, "cpu"), RopeTable(config, 64, "cpu")
    everything = torch.arange(3 * CHUNK)
    expected = at_once.at(everything)
    for longest in (0, 5, CHUNK - 1, CHUNK, 2 * CHUNK + 1):
        in_steps.at(torch.tensor([longest]))
    for got, want in zip(in_steps.at(everything), expected, strict=True):
        assert torch.equal(got, want)


def test_factors_of_the_checkpoint_divide_the_frequencies():
    factors = torch.linspace(1, 8, 32)
    config = RopeConfig(theta=5e5, scaling="factors")
    inverse, _ = frequencies(config, 64, factors)
    assert torch.allclose(inverse * factors, frequencies(RopeConfig(theta=5e5), 64)[0])
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        frequencies(config, 64)
