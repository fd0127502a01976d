"""What HF's config.json and GGUF's metadata become, and what is refused in one sentence."""

import contextlib
import subprocess
import sys

import pytest

from octavo.config import ModelConfig, RopeConfig, UnsupportedModelError
from octavo.model_metadata import ARCHITECTURES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 50, "n_embd": 64, "n_head": 4, "n_layer": 2}
GPT2 |= {"n_positions": 128, "eos_token_id": 0}


def without(mapping, key):
    return {k: v for k, v in mapping.items() if k != key}


def as_kind(architecture, model_type, **changes):
    return LLAMA | {"architectures": [architecture], "model_type": model_type} | changes


def gguf(name="llama", **changes):
    keys = {
        "context_length": 2048,
        "embedding_length": 64,
        "block_count": 4,
        "feed_forward_length": 128,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 100000.0,
        "vocab_size": 1000,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"{name}.{key}": value for key, value in keys.items() if value is not None}
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return metadata | {"general.architecture": name}


def test_llama_from_hf():
    config = ModelConfig.from_hf(LLAMA)
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        rope=RopeConfig(theta=100000.0),
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="bfloat16",
    )
    assert config.softmax_scale == 8**-0.5
    assert ModelConfig.from_hf(without(LLAMA, "architectures")) == config
    assert ModelConfig.from_hf(without(LLAMA, "num_key_value_heads")).num_kv_heads == 8


def test_the_same_llama_from_gguf():
    from_hf = ModelConfig.from_hf(without(LLAMA, "torch_dtype") | {"tie_word_embeddings": True})
    assert ModelConfig.from_gguf(gguf(), ["token_embd.weight"]) == from_hf


def test_w01_the_tie_flag():
    """W01: stated, or by the architecture's rule; in a GGUF file, by whether there is an output matrix."""
    assert not ModelConfig.from_hf(LLAMA).tie_word_embeddings
    assert ModelConfig.from_hf(LLAMA | {"tie_word_embeddings": True}).tie_word_embeddings
    assert ModelConfig.from_hf(GPT2).tie_word_embeddings
    assert not ModelConfig.from_hf(GPT2 | {"tie_word_embeddings": False}).tie_word_embeddings
    assert ModelConfig.from_hf(as_kind("Gemma3ForCausalLM", "gemma3_text")).tie_word_embeddings
    assert ModelConfig.from_gguf(gguf(), ["token_embd.weight"]).tie_word_embeddings
    for name in ("output.weight", "lm_head.weight"):
        assert not ModelConfig.from_gguf(gguf(), ["token_embd.weight", name]).tie_word_embeddings


def test_what_sets_the_architectures_apart():
    mistral = ModelConfig.from_hf(as_kind("MistralForCausalLM", "mistral", sliding_window=8))
    assert [mistral.window(i) for i in range(4)] == [8] * 4
    assert (
        ModelConfig.from_hf(as_kind("MistralForCausalLM", "mistral", sliding_window=None)).window(0) is None
    )

    qwen2 = ModelConfig.from_hf(as_kind("Qwen2ForCausalLM", "qwen2", sliding_window=8))
    assert qwen2.qkv_bias
    assert not qwen2.output_bias
    assert qwen2.sliding_layers == ()  # use_sliding_window is off
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}
    assert ModelConfig.from_hf(as_kind("Qwen2ForCausalLM", "qwen2", **window)).sliding_layers == (3,)

    qwen3 = ModelConfig.from_hf(as_kind("Qwen3ForCausalLM", "qwen3"))
    assert qwen3.qk_norm
    assert not qwen3.qkv_bias
    assert qwen3.head_dim == 128

    gemma = ModelConfig.from_hf(
        as_kind("Gemma3ForCausalLM", "gemma3_text", sliding_window=512, head_dim=32, eos_token_id=[1, 106])
        | {"query_pre_attn_scalar": 64, "sliding_window_pattern": 3, "rope_theta": 1e6, "hidden_act": None}
    )
    assert gemma.sliding_layers == (0, 1, 3)
    assert (gemma.layer_rope(0).theta, gemma.layer_rope(2).theta) == (1e4, 1e6)
    assert (gemma.norm_weight_offset, gemma.embedding_scale, gemma.softmax_scale) == (1.0, 8.0, 0.125)
    assert (gemma.activation, gemma.qk_norm, gemma.post_norms) == ("gelu_tanh", True, True)
    assert gemma.eos_token_ids == (1, 106)

    gpt2 = ModelConfig.from_hf(GPT2)
    assert (gpt2.norm, gpt2.positions, gpt2.gated_mlp, gpt2.activation) == (
        "layer",
        "learned",
        False,
        "gelu_tanh",
    )
    assert (gpt2.qkv_bias, gpt2.output_bias, gpt2.mlp_bias) == (True, True, True)
    assert (gpt2.intermediate_size, gpt2.num_kv_heads, gpt2.head_dim) == (256, 4, 16)
    assert gpt2.eos_token_ids == (0,)  # 0 is an id


def test_layer_types_rule_over_a_pattern():
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = as_kind("Gemma3ForCausalLM", "gemma3_text", sliding_window=8, layer_types=types)
    assert ModelConfig.from_hf(config).sliding_layers == (1, 3)
    with pytest.raises(UnsupportedModelError, match=r"layer_types .* 4 layers"):
        ModelConfig.from_hf(config | {"layer_types": types[:3]})
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        ModelConfig.from_hf(config | {"layer_types": [*types[:3], "linear_attention"]})


@pytest.mark.parametrize(
    ("stated", "scaling", "expected"),
    [
        (131072, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072),
        (131072, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (32768, {"type": "yarn", "factor": 4.0}, 131072),
        (32768, {"type": "linear", "factor": 8.0}, 32768),
        (32768, None, 32768),
    ],
)
def test_w05_the_context_is_scaled_once(stated, scaling, expected):
    """W05: a length that already contains the factor is not multiplied again."""
    if scaling and (scaling.get("rope_type") == "llama3"):
        scaling = scaling | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = ModelConfig.from_hf(LLAMA | {"max_position_embeddings": stated, "rope_scaling": scaling})
    assert config.max_position_embeddings == expected


def test_rope_of_a_gguf_file():
    yarn = gguf(rope__scaling__type="yarn", rope__scaling__factor=4.0)
    assert ModelConfig.from_gguf(yarn).rope == RopeConfig(
        theta=100000.0, scaling="yarn", factor=4.0, original_max_position_embeddings=2048
    )
    assert ModelConfig.from_gguf(yarn).max_position_embeddings == 8192
    yarn |= {"llama.rope.scaling.original_context_length": 512}
    assert ModelConfig.from_gguf(yarn).max_position_embeddings == 2048
    linear = ModelConfig.from_gguf(gguf(rope__scaling__type="linear", rope__scaling__factor=2.0))
    assert (linear.rope.scaling, linear.rope.factor) == ("linear", 2.0)
    factors = ModelConfig.from_gguf(gguf(), ["token_embd.weight", "rope_freqs.weight"])
    assert factors.rope.scaling == "factors"
    for key, value in (("type", "longrope"), ("attn_factor", 0.5)):
        with pytest.raises(UnsupportedModelError, match=r"not supported"):
            ModelConfig.from_gguf(gguf(**{f"rope__scaling__{key}": value}))


def test_gemma3_and_gpt2_from_gguf():
    keys = {"attention__key_length": 32, "attention__value_length": 32, "attention__sliding_window": 512}
    gemma = ModelConfig.from_gguf(gguf("gemma3", block_count=7, **keys, rope__freq_base=1e6))
    assert gemma.sliding_layers == (0, 1, 2, 3, 4, 6)
    assert (gemma.layer_rope(0).theta, gemma.layer_rope(5).theta) == (1e4, 1e6)
    assert (gemma.head_dim, gemma.softmax_scale, gemma.embedding_scale) == (32, 32**-0.5, 8.0)
    assert gemma.norm_weight_offset == 1.0
    flags = [True, False] * 2
    listed = gguf("gemma3", **keys, attention__sliding_window_pattern=flags)
    assert ModelConfig.from_gguf(listed).sliding_layers == (0, 2)

    gpt2 = ModelConfig.from_gguf(
        gguf("gpt2", attention__layer_norm_epsilon=1e-5, attention__head_count_kv=None)
    )
    assert (gpt2.num_kv_heads, gpt2.positions, gpt2.norm) == (8, "learned", "layer")


def test_a_vocabulary_without_its_key_is_counted():
    metadata = gguf(vocab_size=None) | {"tokenizer.ggml.tokens": ["a"] * 77}
    assert ModelConfig.from_gguf(metadata).vocab_size == 77


REFUSED = {
    "unknown class": (
        LLAMA | {"architectures": ["FooForCausalLM"]},
        "FooForCausalLM.*supported: LlamaForCausalLM",
    ),
    "no class": (
        without(without(LLAMA, "architectures"), "model_type"),
        "architecture None is not supported",
    ),
    "images": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {}},
        "images.*text-only",
    ),
    "classifier": (
        LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
        "LlamaForSequenceClassification",
    ),
    "scaling": (
        LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "'dynamic'.*linear, llama3, yarn",
    ),
    "no factor": (LLAMA | {"rope_scaling": {"type": "linear"}}, "needs 'factor'"),
    "bad factor": (LLAMA | {"rope_scaling": {"type": "linear", "factor": "2"}}, "positive number, got '2'"),
    "zero factor": (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 0}}, "positive number, got 0"),
    "llama3 short": (LLAMA | {"rope_scaling": {"type": "llama3", "factor": 8}}, "needs 'low_freq_factor'"),
    "partial": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    "activation": (LLAMA | {"hidden_act": "relu"}, "'relu' is not supported; supported: gelu"),
    "missing": (without(LLAMA, "hidden_size"), r"config\.json lacks 'hidden_size'"),
    "text size": (LLAMA | {"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
    "no layers": (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
    "odd groups": (
        LLAMA | {"num_key_value_heads": 3},
        r"num_heads \(8\) must be a multiple of num_kv_heads \(3\)",
    ),
    "odd head": (LLAMA | {"head_dim": 7}, "even head_dim, got 7"),
    "softcap": (
        as_kind("Gemma3ForCausalLM", "gemma3_text", attn_logit_softcapping=30.0),
        "attn_logit_softcapping=30.0",
    ),
    "flat gemma": (
        as_kind("Gemma3ForCausalLM", "gemma3_text", rope_parameters={"rope_theta": 1e4}),
        "keyed by 'full_attention'",
    ),
    "two ropes": (
        LLAMA
        | {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e4},
                "sliding_attention": {"rope_theta": 1e6},
            }
        },
        "gemma3 only",
    ),
    "quantised": (LLAMA | {"quantization_config": {"bits": 4}}, "quantised.*GGUF"),
    "gpt2 scale": (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    "gpt2 heads": (GPT2 | {"n_head": 5}, r"hidden size \(64\) must be a multiple of the heads \(5\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_in_one_sentence(case):
    config, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message) as error:
        ModelConfig.from_hf(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (gguf("phi3"), "'phi3' is not supported; supported: llama, qwen2"),
        ({}, "None is not supported"),
        (gguf(block_count=None), r"the GGUF file lacks 'llama\.block_count'"),
        (gguf(embedding_length=-1), "positive integer, got -1"),
        (gguf(rope__dimension_count=4), r"llama\.rope\.dimension_count \(4\) must equal the head_dim \(8\)"),
        (gguf(attention__head_count_kv=[2, 2, 4, 4]), "num_kv_heads must be a positive integer"),
        (gguf(attention__layer_norm_rms_epsilon=None), "lacks 'llama.attention.layer_norm_rms_epsilon'"),
    ],
)
def test_gguf_metadata_that_is_refused(metadata, message):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_gguf(metadata)


WRONG = [None, 0, -1, 1.5, "x", [], [1], [None], [[1]], {}, {"a": 1}, True, 2**31, 2**63, 10**400]
WRONG += [float("nan"), float("inf")]
ROPE = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 128, "rope_theta": 1e4, "beta_fast": 32, "mscale": 1.0}
OPTIONS = [
    "head_dim",
    "sliding_window",
    "layer_types",
    "rope_scaling",
    "rope_parameters",
    "num_key_value_heads",
]
GEMMA = as_kind("Gemma3ForCausalLM", "gemma3_text", query_pre_attn_scalar=256, sliding_window=8)
GEMMA |= {"rope_local_base_freq": 1e4, "sliding_window_pattern": 6, "layer_types": None}


def read_or_refused(translate, given):
    """A value of any kind is either taken or refused with the one error that says so."""
    with contextlib.suppress(UnsupportedModelError):
        config = translate(given)
        assert all(type(token) is int for token in config.eos_token_ids)
        assert config.num_layers < 10_001


@pytest.mark.parametrize("base", [LLAMA, GPT2, GEMMA, as_kind("MistralForCausalLM", "mistral")])
def test_w10_a_config_with_a_value_of_any_kind_is_read_or_refused(base):
    for key in [*base, *OPTIONS]:
        for value in WRONG:
            read_or_refused(ModelConfig.from_hf, base | {key: value})


@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn"])
def test_w05_rope_settings_of_any_kind_are_read_or_refused(kind):
    for key in ROPE:
        for value in WRONG:
            read_or_refused(
                ModelConfig.from_hf, LLAMA | {"rope_parameters": ROPE | {"rope_type": kind, key: value}}
            )


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen2"])
def test_w10_gguf_metadata_with_a_value_of_any_kind_is_read_or_refused(name):
    base = gguf(name, attention__sliding_window=8, attention__layer_norm_epsilon=1e-5)
    options = ["attention.key_length", "attention.value_length", "attention.scale", "rope.freq_base_swa"]
    options += ["attention.sliding_window_pattern", "rope.scaling.type", "rope.scaling.factor"]
    tokens = [f"tokenizer.ggml.{key}" for key in ("tokens", "eos_token_id", "eot_token_id", "bos_token_id")]
    for key in [*base, *(f"{name}.{option}" for option in options), *tokens]:
        for value in WRONG:
            read_or_refused(ModelConfig.from_gguf, base | {key: value})


def test_the_least_a_model_weighs():
    config = ModelConfig.from_hf(LLAMA)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = 2 * q + 2 * kv + 3 * config.intermediate_size
    assert config.min_weights == 64 * (config.num_layers * layer + 2 * config.vocab_size)


def test_translation_needs_no_torch():
    code = "import sys, octavo.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ODD = [None, 0, -1, 1.5, "x", [], [1], [None], ["x"], {}, {"a": 1}, True, float("nan"), 2**40]
HF = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "eos_token_id": 2,
    "rope_scaling": None,
    "rope_parameters": None,
    "hidden_act": "silu",
    "layer_types": None,
    "use_sliding_window": True,
    "sliding_window": None,
    "max_window_layers": 1,
    "sliding_window_pattern": 6,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "n_inner": 4,
    "architectures": None,
}
GGUF = {
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "block_count": 2,
    "feed_forward_length": 128,
    "context_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 4,
    "attention.sliding_window_pattern": 6,
    "attention.key_length": 16,
    "rope.freq_base": 1e4,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 64,
    "vocab_size": 2,
}
TOKENIZER = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 1}


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_w10_whatever_one_value_is_the_metadata_is_translated_or_refused(value):
    """Nothing else is raised, and nothing of a stated size is made."""
    hf = [row.hf_class for row in ARCHITECTURES]
    cases = [({**HF, "architectures": [name], key: value}, ModelConfig.from_hf) for name in hf for key in HF]
    for name in ("llama", "qwen3", "gemma3", "gpt2"):
        good = {f"{name}.{key}": item for key, item in GGUF.items()}
        good |= {**TOKENIZER, "general.architecture": name}
        cases += [({**good, key: value}, ModelConfig.from_gguf) for key in good]
    for metadata, translate in cases:
        with contextlib.suppress(UnsupportedModelError):
            translate(metadata)


@pytest.mark.parametrize(
    ("good", "key", "translate"),
    [
        (
            HF | {"architectures": ["MistralForCausalLM"], "sliding_window": 8},
            "num_hidden_layers",
            ModelConfig.from_hf,
        ),
        (
            {f"llama.{k}": v for k, v in GGUF.items()} | TOKENIZER | {"general.architecture": "llama"},
            "llama.block_count",
            ModelConfig.from_gguf,
        ),
    ],
    ids=["hf", "gguf"],
)
def test_w10_a_number_of_layers_is_bounded_before_they_are_listed(good, key, translate):
    assert translate(good).sliding_layers == (0, 1)
    with pytest.raises(UnsupportedModelError, match="the most is 10000"):
        translate({**good, key: 2**40})
