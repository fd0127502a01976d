"""Checkpoints as HF tensors, and their way into a model: ties, names, shapes, dtypes, layouts."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.weights.errors import WeightsError
from octavo.weights.gguf_names import unpermute
from octavo.weights.load import Checkpoint, load_model, open_checkpoint

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class Tiny:
    """The outermost weights of a decoder, float32; ``loads`` counts how often each was given."""

    def __init__(self, *, head: bool) -> None:
        self.weights = {EMBED: torch.zeros(5, 4), NORM: torch.zeros(4)} | (
            {HEAD: torch.zeros(5, 4)} if head else {}
        )
        self.loads: Counter[str] = Counter()

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in self.weights.items()}

    def load_weight(self, name: str, tensor: Tensor) -> None:
        self.weights[name].copy_(tensor)
        self.loads[name] += 1


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {EMBED: torch.randn(5, 4, generator=generator), NORM: torch.randn(4, generator=generator)}


def checkpoint(path: Path, state: dict[str, Tensor]) -> Checkpoint:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({name: tensor.clone() for name, tensor in state.items()}, path / "model.safetensors")
    return open_checkpoint(path)


def assert_loaded(model: Tiny, state: dict[str, Tensor]) -> None:
    assert model.loads == dict.fromkeys(model.weights, 1)
    for name, weight in model.weights.items():
        assert torch.equal(weight, state[name].float())


def test_w01_tied_and_missing_is_tied(tmp_path: Path) -> None:
    model = Tiny(head=False)
    load_model(model, checkpoint(tmp_path, tensors()), tied=True)
    assert_loaded(model, tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w01_tied_and_equal_is_used(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    model = Tiny(head=False)
    load_model(model, checkpoint(tmp_path, state | {HEAD: state[EMBED]}), tied=True)
    assert_loaded(model, state)


def test_w01_tied_and_different_is_an_error(tmp_path: Path) -> None:
    state = tensors()
    head = state[EMBED].clone()
    head[3, 1] += 1e-6
    with pytest.raises(WeightsError, match=r"ties lm_head.weight .* two different tensors"):
        load_model(Tiny(head=False), checkpoint(tmp_path, state | {HEAD: head}), tied=True)
    with pytest.raises(WeightsError, match=r"'lm_head.weight' has shape \[4, 4\] .* \[5, 4\]"):
        load_model(Tiny(head=False), checkpoint(tmp_path, state | {HEAD: head[:4]}), tied=True)


def test_w01_untied_and_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"lacks 'lm_head.weight'; the config does not tie"):
        load_model(Tiny(head=True), checkpoint(tmp_path, tensors()), tied=False)


def test_w01_untied_and_present_is_used(tmp_path: Path) -> None:
    state = tensors() | {HEAD: tensors(1)[EMBED]}
    model = Tiny(head=True)
    load_model(model, checkpoint(tmp_path, state), tied=False)
    assert_loaded(model, state)


def test_w03_a_missing_tensor_is_named(tmp_path: Path) -> None:
    state = tensors()
    del state[NORM]
    with pytest.raises(WeightsError, match=r"lacks 'model\.norm\.weight'$"):
        load_model(Tiny(head=False), checkpoint(tmp_path, state), tied=True)
    del state[EMBED]
    state[HEAD] = torch.ones(5, 4)  # a projection alone is no embedding
    with pytest.raises(WeightsError, match=r"lacks 'model.embed_tokens.weight', 'model.norm.weight'"):
        load_model(Tiny(head=False), checkpoint(tmp_path, state), tied=True)


def test_w03_an_extra_tensor_is_named(tmp_path: Path) -> None:
    extra = {f"x.{i}": torch.ones(1) for i in range(5)}
    with pytest.raises(WeightsError, match=r"the model has no 'x\.0', 'x\.1', 'x\.2' and 2 more"):
        load_model(Tiny(head=False), checkpoint(tmp_path, tensors() | extra), tied=True)


def test_w03_a_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    state = tensors() | {EMBED: torch.ones(4, 5)}
    with pytest.raises(WeightsError, match=r"'model.embed_tokens.weight' has shape \[4, 5\] .* \[5, 4\]"):
        load_model(Tiny(head=False), checkpoint(tmp_path, state), tied=True)


def test_the_number_of_threads_is_left_as_it_was(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    load_model(Tiny(head=False), checkpoint(tmp_path, tensors()), tied=True)
    with pytest.raises(WeightsError):
        load_model(Tiny(head=True), checkpoint(tmp_path, tensors()), tied=False)
    assert torch.get_num_threads() == threads


def test_integers_are_not_weights(tmp_path: Path) -> None:
    state = tensors() | {NORM: torch.ones(4, dtype=torch.int8)}
    with pytest.raises(WeightsError, match=r"'model.norm.weight' is stored as int8"):
        load_model(Tiny(head=False), checkpoint(tmp_path, state), tied=True)


def test_known_buffers_are_ignored(tmp_path: Path) -> None:
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "transformer.h.0.attn.bias": torch.ones(1, dtype=torch.uint8),
        "transformer.h.0.attn.masked_bias": torch.ones(1),
    }
    load_model(Tiny(head=False), checkpoint(tmp_path, tensors() | buffers), tied=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_w08_half_precision_is_upcast_with_one_line(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    state = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    model = Tiny(head=False)
    with caplog.at_level(logging.INFO, "octavo"):
        load_model(model, checkpoint(tmp_path / "tiny", state), tied=True)
    name = str(dtype).removeprefix("torch.")
    assert [r.getMessage() for r in caplog.records] == [
        f"tiny: 2 tensors stored as {name} are used as float32"
    ]
    assert_loaded(model, state)


def test_w08_float32_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo"):
        load_model(Tiny(head=False), checkpoint(tmp_path, tensors()), tied=True)
    assert not caplog.records


def test_canonical_renames_and_splits(tmp_path: Path) -> None:
    both = torch.cat([tensors()[EMBED], tensors()[NORM][None]])

    def canonical(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        assert name == "both"
        return [(EMBED, tensor[:5]), (NORM, tensor[5])]

    model = Tiny(head=False)
    load_model(model, checkpoint(tmp_path, {"both": both}), tied=True, canonical=canonical)
    assert_loaded(model, tensors())
    with pytest.raises(WeightsError, match=r"two tensors for 'model.norm.weight'"):
        load_model(
            model,
            checkpoint(tmp_path, {"both": both}),
            tied=True,
            canonical=lambda _, tensor: [(NORM, tensor[5]), (NORM, tensor[5])],
        )


# --- GGUF ---

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 8, 16


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """How a llama GGUF stores rotary rows: row i of a head's first half, then row i of its second half."""
    stored = np.empty_like(weight)
    for head in range(heads):
        for i in range(DIM // 2):
            stored[head * DIM + 2 * i] = weight[head * DIM + i]
            stored[head * DIM + 2 * i + 1] = weight[head * DIM + DIM // 2 + i]
    return stored


def write_gguf(path: Path, arch: str, state: dict[str, np.ndarray], **changes: int) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_head_count(changes.get("heads", HEADS))
    writer.add_head_count_kv(KV_HEADS)
    if "parts" in changes:
        writer.add_uint16("split.count", changes["parts"])
    for name, tensor in state.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def read(path: Path) -> dict[str, np.ndarray]:
    opened = open_checkpoint(path)
    result = {name: tensor.numpy() for name, tensor in opened.tensors()}
    assert tuple(result) == opened.names
    assert opened.kind == "gguf"
    return result


def test_w04_llama_rotary_rows_are_unpermuted_by_head(tmp_path: Path) -> None:
    q, k, v = (
        normal(HEADS * DIM, WIDTH),
        normal(KV_HEADS * DIM, WIDTH, seed=1),
        normal(KV_HEADS * DIM, WIDTH, seed=2),
    )
    q_bias = normal(HEADS * DIM, seed=3)
    path = write_gguf(
        tmp_path / "x.gguf",
        "llama",
        {
            "blk.0.attn_q.weight": interleave(q, HEADS),
            "blk.0.attn_k.weight": interleave(k, KV_HEADS),
            "blk.0.attn_v.weight": v,
            "blk.0.attn_q.bias": interleave(q_bias, HEADS),
        },
    )
    got = read(path)
    assert np.array_equal(got["model.layers.0.self_attn.q_proj.weight"], q)
    assert np.array_equal(got["model.layers.0.self_attn.k_proj.weight"], k)
    assert np.array_equal(got["model.layers.0.self_attn.v_proj.weight"], v)
    assert np.array_equal(got["model.layers.0.self_attn.q_proj.bias"], q_bias)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3"])
def test_w04_other_architectures_keep_their_rows(tmp_path: Path, arch: str) -> None:
    q = normal(HEADS * DIM, WIDTH)
    got = read(write_gguf(tmp_path / "x.gguf", arch, {"blk.0.attn_q.weight": q, "blk.0.attn_k.weight": q}))
    assert np.array_equal(got["model.layers.0.self_attn.q_proj.weight"], q)
    assert np.array_equal(got["model.layers.0.self_attn.k_proj.weight"], q)


def test_w04_rows_that_make_no_whole_heads_are_refused(tmp_path: Path) -> None:
    state = {"blk.0.attn_q.weight": normal(HEADS * DIM, WIDTH)}
    with pytest.raises(WeightsError, match=r"q_proj.weight' has 32 rows, which do not make 5 heads"):
        read(write_gguf(tmp_path / "x.gguf", "llama", state, heads=5))


def test_unpermute_by_the_worked_example() -> None:
    assert unpermute(torch.tensor([0, 2, 1, 3, 10, 12, 11, 13]), 2, "q").tolist() == [
        0,
        1,
        2,
        3,
        10,
        11,
        12,
        13,
    ]


def test_gemma3_norms_lose_the_one_that_gguf_adds(tmp_path: Path) -> None:
    names = {
        "output_norm": "model.norm",
        "blk.3.attn_norm": "model.layers.3.input_layernorm",
        "blk.3.post_attention_norm": "model.layers.3.post_attention_layernorm",
        "blk.3.ffn_norm": "model.layers.3.pre_feedforward_layernorm",
        "blk.3.post_ffw_norm": "model.layers.3.post_feedforward_layernorm",
        "blk.3.attn_q_norm": "model.layers.3.self_attn.q_norm",
        "blk.3.attn_k_norm": "model.layers.3.self_attn.k_norm",
    }
    stored = {f"{name}.weight": normal(WIDTH, seed=i) for i, name in enumerate(names)}
    got = read(write_gguf(tmp_path / "x.gguf", "gemma3", stored))
    for theirs, ours in names.items():
        assert np.array_equal(got[f"{ours}.weight"], stored[f"{theirs}.weight"] - 1)


def test_gpt2_linear_weights_are_handed_out_as_in_by_out(tmp_path: Path) -> None:
    w = normal(48, WIDTH)
    stored = {"blk.1.attn_qkv.weight": w, "blk.1.attn_qkv.bias": normal(48), "position_embd.weight": w}
    got = read(write_gguf(tmp_path / "x.gguf", "gpt2", stored))
    assert np.array_equal(got["transformer.h.1.attn.c_attn.weight"], w.T)
    assert np.array_equal(got["transformer.h.1.attn.c_attn.bias"], normal(48))
    assert np.array_equal(got["transformer.wpe.weight"], w)


@pytest.mark.parametrize(
    ("arch", "name", "parts", "words"),
    [
        ("mamba", "token_embd.weight", 1, "architecture 'mamba', supported are llama"),
        (
            "llama",
            "blk.0.ffn_gate_exps.weight",
            1,
            "'blk.0.ffn_gate_exps.weight' that the architecture llama",
        ),
        ("llama", "blk.00.ffn_gate.weight", 1, "'blk.00.ffn_gate.weight' that"),
        ("llama", "token_embd.weight", 3, "one of 3 parts"),
    ],
)
def test_a_gguf_that_is_not_supported_is_refused(
    tmp_path: Path, arch: str, name: str, parts: int, words: str
) -> None:
    path = write_gguf(tmp_path / "x.gguf", arch, {name: normal(4)}, parts=parts)
    with pytest.raises(WeightsError, match=words):
        open_checkpoint(path)


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(WeightsError, match=r"neither a folder of safetensors nor a .gguf"):
        open_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(WeightsError, match="no file or folder"):
        open_checkpoint(tmp_path / "absent.gguf")


# --- fingerprint ---


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    state = tensors()
    first = checkpoint(tmp_path / "a", state).fingerprint()
    assert checkpoint(tmp_path / "b", state).fingerprint() == first
    state[NORM][0] += 1
    assert checkpoint(tmp_path / "b", state).fingerprint() != first
    other = checkpoint(tmp_path / "c", tensors())
    (tmp_path / "c" / "config.json").write_text('{"model_type": "llama", "rope_theta": 5.0}')
    assert other.fingerprint() != first

    gguf_path = write_gguf(tmp_path / "x.gguf", "llama", {"token_embd.weight": normal(4, 4)})
    before = open_checkpoint(gguf_path).fingerprint()
    raw = bytearray(gguf_path.read_bytes())
    raw[-40] ^= 1
    gguf_path.write_bytes(raw)
    assert open_checkpoint(gguf_path).fingerprint() != before


def test_the_fingerprint_follows_the_index(tmp_path: Path) -> None:
    # The same two files, in the same order of first use; only the third tensor's place differs.
    state = tensors() | {HEAD: tensors(1)[EMBED]}
    checkpoint(tmp_path, state)
    save_file({name: -tensor for name, tensor in state.items()}, tmp_path / "other.safetensors")
    digests = set()
    for head_file in ("model.safetensors", "other.safetensors"):
        weight_map = {EMBED: "model.safetensors", NORM: "other.safetensors", HEAD: head_file}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        digests.add(open_checkpoint(tmp_path).fingerprint())
    assert len(digests) == 2


@pytest.mark.real_model
def test_the_default_model_is_read_whole_and_fast(smollm2_path: Path) -> None:
    """Against the gguf package, on tensors of each kind; under 3 s of CPU for all (measured: 0.4 s)."""
    start = time.process_time()
    shapes, kept = {}, {}
    for name, tensor in open_checkpoint(smollm2_path).tensors():
        shapes[name] = tuple(tensor.shape)
        if ".layers.7." in name or "layers" not in name:
            kept[name] = tensor
    seconds = time.process_time() - start
    assert len(shapes) == 272
    assert sum(np.prod(shape) for shape in shapes.values()) == 134_515_008
    assert shapes["model.layers.29.self_attn.k_proj.weight"] == (192, 576)
    assert seconds < 3, f"{seconds:.2f} s"
    theirs = {t.name: t for t in gguf.GGUFReader(smollm2_path).tensors}
    for ours, stored in [
        ("mlp.down_proj", "ffn_down"),
        ("self_attn.v_proj", "attn_v"),
        ("input_layernorm", "attn_norm"),
    ]:
        source = theirs[f"blk.7.{stored}.weight"]
        want = gguf.quants.dequantize(source.data, source.tensor_type)
        assert np.array_equal(kept[f"model.layers.7.{ours}.weight"].numpy(), want)
    source = theirs["blk.7.attn_q.weight"]
    want = gguf.quants.dequantize(source.data, source.tensor_type).reshape(9, 32, 2, 576)
    got = kept["model.layers.7.self_attn.q_proj.weight"].numpy().reshape(9, 2, 32, 576)
    assert np.array_equal(got[:, 0], want[:, :, 0])
    assert np.array_equal(got[:, 1], want[:, :, 1])
