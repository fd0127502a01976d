"""Laws of the sampler. The case ids (A01 ...) are in the test names."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.sampler import (
    LOGPROB_FLOOR,
    NOT_FINITE,
    NOTHING_LEFT,
    SamplingRow,
    sample,
    score,
)
from octavo.kernels.native import ThreadPool
from octavo.request import MAX_LOGPROBS, SamplingParams

VOCAB = 50
POOL = ThreadPool(2)


def row(prompt=(1, 2), output=(), end=(), seed=0, choice=0, **params) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params),
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        end_token_ids=end,
        seed=seed,
        choice=choice,
    )


def one(logits: torch.Tensor, r: SamplingRow, vocab_size: int | None = None) -> int:
    return sample(logits[None], [r], vocab_size or logits.numel(), POOL).token_ids[0]


def draws(logits: torch.Tensor, r: dict, count: int) -> np.ndarray:
    rows = [row(seed=i, **r) for i in range(count)]
    out = sample(logits.expand(count, -1), rows, logits.numel(), POOL)
    assert out.errors == [None] * count
    return np.bincount(out.token_ids, minlength=logits.numel())


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 1.5},
        {"n": None},
        {"top_k": 2.5},
        {"seed": "x"},
        {"seed": 1.5},
        {"max_tokens": "5"},
        {"min_tokens": 1.5},
        {"logprobs": True},
        {"temperature": "hot"},
        {"temperature": None},
        {"top_p": math.nan},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e39},
        {"logit_bias": [1]},
        {"logit_bias": {1: "a"}},
        {"logit_bias": {1: 1e39}},
        {"logit_bias": {1: math.nan}},
        {"stop": 5},
        {"stop": [1]},
        {"stop": b"x"},
        {"stop_token_ids": 5},
    ],
)
def test_a_parameter_of_the_wrong_kind_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        SamplingParams(**wrong)


@pytest.mark.parametrize("largest", [{"logit_bias": {3: 1e6, 4: -1e6}}, {"repetition_penalty": 0.01}])
@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0, 100.0])
def test_the_largest_parameters_overflow_nothing(logits, largest, temperature):
    out = sample(logits[None] * 1e3, [row(temperature=temperature, logprobs=2, **largest)], VOCAB, POOL)
    assert out.errors == [None]
    assert all(math.isfinite(entry.logprob) for entry in out.logprobs[0].values())


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_a01_a_tiny_temperature_is_greedy(logits, temperature):
    assert one(logits * 1e4, row(temperature=temperature, seed=9)) == int(logits.argmax())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": 999999}, ["temperature", "0.0", "100.0", "999999"]),
        ({"temperature": math.nan}, ["temperature", "nan"]),
        ({"top_p": -1}, ["top_p", "(0, 1]", "-1"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"min_p": 1.5}, ["min_p", "1.5"]),
        ({"prompt_logprobs": -1}, ["prompt_logprobs", "-1", "0"]),
        ({"logprobs": 10**6}, ["logprobs", str(MAX_LOGPROBS)]),
        ({"max_tokens": -1}, ["max_tokens", "-1"]),
    ],
)
def test_a01_a04_a10_bad_values_name_the_field_and_its_range(params, words):
    with pytest.raises(ValueError) as error:
        SamplingParams(**params)
    assert all(word in str(error.value) for word in words), error.value


NO_NUMBERS = ["x", None, math.nan, math.inf, [1], True, 10**400]
NO_INTEGERS = ["1", 1.5, math.nan, [1], True]
WRONG_KINDS = {
    "n": [*NO_INTEGERS, None, 0],
    "top_k": [*NO_INTEGERS, None],
    "min_tokens": [*NO_INTEGERS, None, -1],
    "max_tokens": [*NO_INTEGERS, math.inf],
    "seed": [*NO_INTEGERS, 2**63],
    "logprobs": NO_INTEGERS,
    "prompt_logprobs": NO_INTEGERS,
    **dict.fromkeys(["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"], NO_NUMBERS),
    "repetition_penalty": [*NO_NUMBERS, 0, -1, 1e-300, 1e-40, 1e38],
    "logit_bias": [5, [1], {"5": 1.0}, {1.5: 1.0}, {True: 1.0}, *({5: bad} for bad in [*NO_NUMBERS, 1e39])],
    "stop": [5, [5], [None], b"x", "", ["a", ""]],
    "stop_token_ids": [5, "ab", [1.0], [None], [True]],
    "ignore_eos": ["no", None],
    "skip_special_tokens": ["no", None],
    "include_stop_str_in_output": ["no", None],
}


@pytest.mark.parametrize("field", WRONG_KINDS)
def test_a01_a_value_of_the_wrong_kind_is_one_sentence_that_names_the_field(field):
    for value in WRONG_KINDS[field]:
        with pytest.raises(ValueError, match=f"^{field}") as error:
            SamplingParams(**{field: value})
        assert len(str(error.value)) < 300
        assert "\n" not in str(error.value)


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), seed=np.int64(3), logit_bias={np.int64(2): np.float32(1)}, stop={"a"}
    )
    assert params.stop_strings == ("a",)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {7: 1e9}},
        {"logit_bias": {7: -1e9}},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 1e3},
        {"repetition_penalty": 1e-3, "logit_bias": dict.fromkeys(range(VOCAB), 1e9), "temperature": 1e-3},
    ],
)
@pytest.mark.filterwarnings("error")
def test_a02_nothing_overflows_at_the_bounds(logits, params):
    out = sample(logits[None], [row(prompt=range(VOCAB), **params)], VOCAB, POOL)
    assert out.errors == [None]


def test_a01_the_smallest_temperature_that_is_not_greedy_stays_finite(logits):
    assert one(logits * 1e6, row(temperature=1e-3)) == int(logits.argmax())


def test_a02_a_greedy_row_with_an_infinite_bias_in_a_mixed_batch(logits):
    best, second = logits.topk(2).indices.tolist()
    rows = [
        row(temperature=0.0, logit_bias={best: -math.inf}, logprobs=3),
        row(temperature=1.7, top_p=0.3, seed=5),
        row(temperature=0.0),
    ]
    before = logits.expand(3, -1).clone()
    out = sample(before, rows, VOCAB, POOL)
    assert out.errors == [None, None, None]
    assert out.token_ids[0] == second
    assert out.token_ids[2] == best
    assert torch.equal(before, logits.expand(3, -1)), "the caller's logits are left alone"
    # the model's own log-probabilities: the bias is not in them
    assert out.logprobs[0][best].rank == 1
    assert all(math.isfinite(entry.logprob) for entry in out.logprobs[0].values())


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 1, 9999999])
def test_a03_top_k_of_the_whole_vocabulary_changes_nothing(logits, top_k):
    for seed in range(20):
        assert one(logits, row(seed=seed, top_k=top_k)) == one(logits, row(seed=seed))


def test_a04_more_logprobs_than_the_vocabulary_are_capped_to_it(logits):
    small = logits[:5]
    found = sample(small[None], [row(temperature=0.0, logprobs=20)], 5, POOL).logprobs[0]
    assert sorted(found) == [0, 1, 2, 3, 4]


def test_a05_no_infinity_in_what_is_reported(logits):
    logits[7] = -math.inf
    (found,) = score(logits[None], [7], [VOCAB], VOCAB, POOL)
    assert found[7].logprob == LOGPROB_FLOOR
    json.dumps({k: v.logprob for k, v in found.items()}, allow_nan=False)


@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.5, 5.0]), k=st.sampled_from([0, 3]))
@settings(max_examples=60, deadline=None)
def test_a06_ids_past_the_tokenizer_are_never_sampled(seed, temperature, k):
    logits = torch.zeros(VOCAB)
    logits[40:] = 100.0
    r = row(seed=seed, temperature=temperature, top_k=k, logprobs=5)
    out = sample(logits[None], [r], 40, POOL)
    assert out.token_ids[0] < 40
    assert all(token < 40 for token in out.logprobs[0])


def test_a07_repetition_counts_prompt_and_output_presence_and_frequency_output_only():
    logits = torch.tensor([2.0, 2.0, 2.0, 1.9, -1.0])
    greedy = {"temperature": 0.0, "prompt": (0, 0), "output": (1,)}
    assert one(logits, row(**greedy, repetition_penalty=1.5)) == 2  # 0 and 1 are both pushed down
    assert one(logits, row(**greedy, presence_penalty=1.0)) == 0  # the prompt's 0 is not
    assert one(logits, row(**greedy, frequency_penalty=1.0)) == 0
    once_and_twice = {"temperature": 0.0, "prompt": (), "output": (0, 1, 1)}
    close = torch.tensor([2.0, 2.05, -5.0])
    assert one(close, row(**once_and_twice, presence_penalty=1.0)) == 1  # the same for once and twice
    assert one(close, row(**once_and_twice, frequency_penalty=0.1)) == 0  # twice counts twice
    # a negative logit is multiplied, not divided: it never gets better by being repeated
    assert one(torch.tensor([-1.0, -1.2]), row(temperature=0.0, prompt=(0,), repetition_penalty=2.0)) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a09_every_end_token_is_masked_before_min_tokens(temperature):
    logits = torch.zeros(VOCAB)
    logits[[0, 5]] = 50.0
    for length in (0, 1):
        r = row(output=[9] * length, end=(0, 5), min_tokens=2, temperature=temperature)
        assert one(logits, r) not in (0, 5)
    assert one(logits, row(output=[9, 9], end=(0, 5), min_tokens=2, temperature=temperature)) in (0, 5)


def test_a11_choices_of_one_seed_differ_and_are_reproducible():
    flat = torch.zeros(5000)
    first = [one(flat, row(seed=1, choice=c)) for c in range(4)]
    assert len(set(first)) == 4
    assert first == [one(flat, row(seed=1, choice=c)) for c in range(4)]
    assert len({one(flat, row(seed=1, output=[0] * length)) for length in range(20)}) == 20


ROWS = st.builds(
    row,
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 3),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.1]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.sampled_from([None, {4: -math.inf, 6: 3.0}]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@given(rows=st.lists(ROWS, min_size=1, max_size=8), seed=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_a12_a_row_alone_equals_the_row_in_any_batch(rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    together = sample(logits, rows, VOCAB, POOL)
    for i, r in enumerate(rows):
        alone = sample(logits[i : i + 1], [r], VOCAB, POOL)
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_the_draw_follows_the_softmax(logits):
    """Chi-square against softmax(logits / T): 49 degrees of freedom, 99.9% point 85."""
    count = 20_000
    expected = torch.softmax(logits.double() / 1.5, -1).numpy() * count
    seen = draws(logits, {"temperature": 1.5}, count)
    chi2 = ((seen - expected) ** 2 / expected).sum()
    assert chi2 < 85, chi2


def test_top_k_top_p_and_min_p_keep_exactly_their_sets():
    p = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    logits = p.log() + 3
    kept = {
        "top_k": draws(logits, {"top_k": 2}, 500),
        "top_p": draws(logits, {"top_p": 0.84}, 500),  # 0.4 + 0.25 + 0.2 reaches it
        "min_p": draws(logits, {"min_p": 0.3}, 500),  # at least 0.12
        "both": draws(logits, {"top_k": 3, "top_p": 0.7}, 500),  # of what top_k left: 0.4 + 0.25 of 0.85
        "tiny": draws(logits, {"top_p": 1e-9}, 50),
    }
    assert {k: np.flatnonzero(v).tolist() for k, v in kept.items()} == {
        "top_k": [1, 3],
        "top_p": [1, 3, 4],
        "min_p": [1, 3, 4],
        "both": [1, 3],
        "tiny": [1],
    }
    ratio = kept["top_k"][1] / kept["top_k"].sum()
    assert abs(ratio - 0.4 / 0.65) < 0.08, "what is kept keeps its odds"


def test_logprobs_are_the_models_own_with_ranks(logits):
    r = row(temperature=2.0, repetition_penalty=1.8, seed=4, logprobs=3)
    out = sample(logits[None], [r], VOCAB, POOL)
    expected = torch.log_softmax(logits, -1)
    chosen = out.token_ids[0]
    found = out.logprobs[0]
    assert list(found)[:3] == logits.topk(3).indices.tolist()
    assert chosen in found
    for token, entry in found.items():
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-6)
        assert entry.rank == 1 + int((expected > expected[token]).sum())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"logit_bias": {1: 1.0}}])
def test_h11_logits_that_are_not_finite_fail_their_own_row(logits, value, params):
    batch = logits.expand(3, -1).clone()
    batch[1, 17] = value
    out = sample(batch, [row(**params), row(**params), row(**params)], VOCAB, POOL)
    assert out.errors == [None, NOT_FINITE, None]
    assert out.token_ids[1] == -1
    assert out.token_ids[0] == one(logits, row(**params))


def test_a_row_of_minus_infinity_or_without_a_token_left_is_an_error(logits):
    everything = dict.fromkeys(range(VOCAB), -math.inf)
    out = sample(
        torch.stack([torch.full((VOCAB,), -math.inf), logits, logits]),
        [row(), row(logit_bias=everything), row(logit_bias=everything, temperature=0.0)],
        VOCAB,
        POOL,
    )
    assert out.errors == [NOT_FINITE, NOTHING_LEFT, NOTHING_LEFT]
