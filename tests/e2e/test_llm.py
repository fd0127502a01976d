"""The offline API on the real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams

pytestmark = pytest.mark.real_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def open_llm(path: Path, **options) -> LLM:
    return LLM(str(path), num_blocks=256, **options)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return open_llm(smollm2_path)


def test_it_answers(llm: LLM) -> None:
    (output,) = llm.generate("The capital of France is", GREEDY, use_tqdm=False)
    assert output.outputs[0].text.startswith(" Paris")
    (answer,) = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


def test_p04_the_second_turn_of_a_chat_reuses_the_first_and_its_reply(llm: LLM) -> None:
    (first,) = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    turn = [
        *CHAT,
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And of Italy?"},
    ]
    (second,) = llm.chat(turn, SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
    assert second.num_cached_tokens >= len(first.prompt_token_ids) + len(first.outputs[0].token_ids) - 1


def test_a12_a_seeded_text_is_the_same_alone_and_in_company(llm: LLM) -> None:
    params = SamplingParams(seed=42, temperature=0.8, top_p=0.95, max_tokens=12)
    llm.reset_prefix_cache()
    (alone,) = llm.generate("Once upon a time", params, use_tqdm=False)
    company = ["The weather today", "My favourite book", "In the year 2050", "A recipe for bread"]
    together = llm.generate(["Once upon a time", *company], params, use_tqdm=False)
    assert together[0].outputs[0].text == alone.outputs[0].text


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    *_, last = llm.stream_chat(CHAT, SamplingParams(temperature=0.0, max_tokens=20))
    (whole,) = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    assert last.outputs == whole.outputs


@pytest.mark.parametrize(
    ("attention", "kv_dtype"), [("sdpa", "float32"), ("bmm", "float32"), ("fused", "float16")]
)
def test_every_backend_gives_the_same_answer(
    llm: LLM, smollm2_path: Path, attention: str, kv_dtype: str
) -> None:
    prompts = ["The capital of France is", "Water boils at a temperature of"]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
    expected = llm.generate(prompts, params, use_tqdm=False)
    other = open_llm(smollm2_path, attention=attention, kv_dtype=kv_dtype)
    tolerance = 1e-4 if kv_dtype == "float32" else 0.05
    for a, b in zip(expected, other.generate(prompts, params, use_tqdm=False), strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].cumulative_logprob == pytest.approx(
            b.outputs[0].cumulative_logprob, abs=6 * tolerance
        )


def test_torch_uses_the_threads_that_an_engine_of_its_backends_was_given(
    smollm2_path: Path, llm: LLM
) -> None:
    """The native engine has threads of its own and leaves torch's alone."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        LLM(str(smollm2_path), num_threads=1, num_blocks=2)
        assert torch.get_num_threads() == 2
        LLM(str(smollm2_path), attention="sdpa", num_threads=1, num_blocks=2)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
