"""Published models, converted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.convert.run import Options, convert
from octavo.weights import hub

PROMPT = "Call me Ishmael. Some years ago - never mind how long precisely - having 12 dollars in my purse"
SENTENCES = ["A cat is on a mat.", "Stock prices fell sharply.", "Who wrote Moby-Dick?", "It rains in Spain."]


def quiet(what: str, steps: int) -> Callable[[], None]:
    return lambda: None


@pytest.mark.slow
@pytest.mark.real_model
def test_a_gguf_at_rate_one_is_the_same_model(smollm2_path: Path, tmp_path: Path) -> None:
    """Tokenizer, config and weights come out of the file as they went in: half a gigabyte in float32."""
    convert(smollm2_path, tmp_path / "out", Options(compress_rate=1, topk=8192), quiet)
    params = SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=0, logprobs=1)
    found = []
    for model in (smollm2_path, tmp_path / "out"):
        llm = LLM(model, max_model_len=256)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        (chat,) = llm.chat([{"role": "user", "content": "Name a whale."}], params, use_tqdm=False)
        found.append((output, chat, llm.engine.eos_token_ids))
    (one, chat, ends), (two, other_chat, other_ends) = found
    assert one.prompt_token_ids == two.prompt_token_ids
    assert chat.prompt_token_ids == other_chat.prompt_token_ids
    assert set(ends) == set(other_ends)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert chat.outputs[0].token_ids == other_chat.outputs[0].token_ids
    rows = zip(one.prompt_token_ids[1:], one.prompt_logprobs[1:], two.prompt_logprobs[1:], strict=True)
    for token, a, b in rows:
        assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.real_model
def test_aligned_heads_keep_more_of_minilms_vectors(tmp_path: Path) -> None:
    path = Path(hub.pull("minilm", progress=False))
    want = LLM(path, num_threads=1).embed(SENTENCES)
    cosines = {}
    methods: tuple[Literal["mean", "aligned"], ...] = ("mean", "aligned")
    for method in methods:
        convert(path, tmp_path / method, Options(compress_rate=2, topk=512, method=method), quiet)
        got = LLM(tmp_path / method, num_threads=1).embed(SENTENCES)
        cosines[method] = torch.cosine_similarity(got, want).mean().item()
    assert cosines["mean"] < cosines["aligned"]
