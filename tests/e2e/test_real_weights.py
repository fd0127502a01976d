"""Real checkpoints against transformers with the same dequantised weights: greedy ids and perplexity."""

import math

import pytest
import torch
import transformers

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.cache.kv_cache import KVCache
from octavo.config import ModelConfig
from octavo.kernels.api import AttentionSpec
from octavo.kernels.native import ThreadPool
from octavo.models.decoder import Decoder
from octavo.models.native import NativeDecoder
from octavo.models.registry import MODELS
from octavo.weights import hub
from octavo.weights.load import load_model, load_stored, open_checkpoint
from octavo.weights.stored import float32

NEW_TOKENS = 32
BLOCK_SIZE = 16
TOLERANCE = 3e-4  # of logits up to 40
TEXT = (
    "The Moon is the only natural satellite of the Earth. It orbits at an average distance of about "
    "384,400 kilometres, and its gravity causes the tides of the ocean. Because the Moon turns once about "
    "its own axis in the time that it takes to go once around the Earth, the same side of the Moon always "
    "faces the Earth. The other side was seen for the first time in 1959, when a probe flew past it and sent "
    "back pictures. Ten years later, people walked on the Moon, and brought rocks from the Moon back to "
    "the Earth."
)


def greedy_pieces(text, vocabulary, space):
    """Ids of ``text`` by the longest piece that matches: not the model's own tokenizer, but ordinary text
    in ordinary words, which is all that a perplexity needs."""
    text, ids = text.replace(" ", space), []
    while text:
        length = next(n for n in range(min(len(text), 30), 0, -1) if text[:n] in vocabulary)
        ids.append(vocabulary[text[:length]])
        text = text[length:]
    return ids


def text_ids(checkpoint, space):
    tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
    return greedy_pieces(TEXT, {token: i for i, token in enumerate(tokens)}, space)


def config_of(checkpoint):
    return ModelConfig.from_gguf(checkpoint.metadata, checkpoint.names)


def load(checkpoint, change=lambda name, tensor: tensor, kind=Decoder):
    """The float32 decoder of a checkpoint, each tensor passed through ``change``."""
    config = config_of(checkpoint)
    decoder = kind(config)

    def changed(name, tensor):
        for target, part in MODELS[config.architecture].canonical(name, tensor):
            yield target, change(target, part)

    load_model(decoder, checkpoint, tied=config.tie_word_embeddings, canonical=changed)
    return decoder


class OneSequence:
    """A single sequence in its own cache, block after block."""

    def __init__(self, decoder, max_length, attention="reference"):
        config = decoder.config
        self.decoder = decoder
        num_blocks = -(-max_length // BLOCK_SIZE)
        shape = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "block_size": BLOCK_SIZE}
        self.cache = KVCache(num_layers=config.num_layers, num_blocks=num_blocks, **shape)
        spec = AttentionSpec(num_heads=config.num_heads, kv_dtype=torch.float32, device="cpu", **shape)
        self.attention = AttentionBackend(attention, spec, ThreadPool(1))
        self.blocks = torch.arange(num_blocks, dtype=torch.int32).flip(0)[None]
        self.length = 0

    @torch.inference_mode()
    def step(self, ids):
        positions = torch.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        batch = ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=positions,
            slot_mapping=self.blocks[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_table=self.blocks,
            seq_lens=torch.tensor([self.length], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, len(ids)], dtype=torch.int32),
            logits_rows=torch.arange(len(ids)),
        )
        return self.decoder.logits(self.decoder(batch, self.cache, self.attention), batch.logits_rows)


def generate(decoder, ids, attention):
    run = OneSequence(decoder, len(ids) + NEW_TOKENS, attention)
    run.step(ids[:7])
    logits, out = run.step(ids[7:]), []
    while True:
        out.append(int(logits[-1].argmax()))
        if len(out) == NEW_TOKENS:
            return out
        logits = run.step(out[-1:])


def perplexity(logits, ids):
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return math.exp(loss)


def transformers_model(config, checkpoint):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    extra = model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    assert not extra.unexpected_keys
    assert set(extra.missing_keys) <= {"lm_head.weight"}  # tied
    return model


@torch.inference_mode()
def expected_of(model, ids):
    """The peer's logits over the text, and its greedy continuation."""
    logits = model(torch.tensor([ids])).logits[0]
    continued = model.generate(
        torch.tensor([ids]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )
    return logits, continued[0, len(ids) :].tolist()


def compare(decoder, expected, ids, attention="reference"):
    """The same logits over the text, and the same greedy continuation."""
    logits, continued = expected
    got = OneSequence(decoder, len(ids), attention).step(ids)
    assert (got - logits).abs().max() < TOLERANCE
    assert generate(decoder, ids, attention) == continued
    return got


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def smollm2_decoder(smollm2):
    return load(smollm2)


@pytest.fixture(scope="module")
def smollm2_expected(smollm2):
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
    )
    return expected_of(transformers_model(config, smollm2), text_ids(smollm2, "Ġ"))


@pytest.mark.real_model
def test_smollm2_equals_transformers(smollm2, smollm2_decoder, smollm2_expected):
    compare(smollm2_decoder, smollm2_expected, text_ids(smollm2, "Ġ"))


@pytest.mark.real_model
def test_smollm2_as_it_is_served_equals_transformers(smollm2, smollm2_expected):
    """The native decoder on weights as they are stored: what ``LLM`` runs by default."""
    config = config_of(smollm2)
    decoder = NativeDecoder(config, ThreadPool(1))
    to_canonical = MODELS[config.architecture].canonical
    load_stored(decoder, smollm2, "auto", tied=config.tie_word_embeddings, canonical=to_canonical)
    compare(decoder, smollm2_expected, text_ids(smollm2, "Ġ"), "fused")


@pytest.mark.real_model
def test_w04_smollm2_reads_english_unless_rows_stay_permuted(smollm2, smollm2_decoder):
    """W04: with Q and K rows left in the file's rotary order the model still talks, only much worse."""
    ids = text_ids(smollm2, "Ġ")
    right = perplexity(OneSequence(smollm2_decoder, len(ids)).step(ids), ids)
    assert right < 15

    def permute_back(name, tensor):
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return tensor
        tensor = float32(tensor)
        heads = tensor.view(-1, 2, 32, tensor.shape[1])  # [heads, halves, pairs, hidden]
        return heads.transpose(1, 2).reshape(tensor.shape)

    wrong_decoder = load(smollm2, permute_back)
    wrong_logits = OneSequence(wrong_decoder, len(ids)).step(ids)
    assert wrong_logits.isfinite().all()
    assert perplexity(wrong_logits, ids) > 3 * right


@pytest.mark.slow
def test_gemma3_equals_transformers():
    checkpoint = open_checkpoint(hub.pull("gemma3-270m"))
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        sliding_window=512,
        query_pre_attn_scalar=256,
        eos_token_id=None,
    )
    ids = [2, *text_ids(checkpoint, "▁")]  # the model expects its begin-of-text token
    logits = compare(load(checkpoint), expected_of(transformers_model(config, checkpoint), ids), ids)
    assert perplexity(logits, ids) < 15
