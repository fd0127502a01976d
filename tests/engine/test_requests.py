"""How requests come into the engine, are refused, and end. Case ids are in the test names."""

from __future__ import annotations

import math

import pytest
from tiny_engine import EOS, VOCAB, always, dense_greedy, greedy, prompt, tokens

from octavo.request import SamplingParams

# ---- admission


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], ["empty"]),
        ([5, -1, 5], ["-1", "position 1", f"0 .. {VOCAB - 1}"]),
        ([5, VOCAB], [str(VOCAB), "position 1"]),
        ([1] * 41, ["41", "40"]),
        ([1] * 40, ["40", "no room"]),
        ([1.5], ["token ids"]),
        (["a"], ["token ids"]),
    ],
)
def test_s01_s02_s15_a_bad_prompt_is_refused_and_the_next_is_served(tiny, ids, words):
    t = tiny(max_model_len=40)
    neighbour = t.add(prompt(7), greedy(5, logprobs=1))
    with pytest.raises(ValueError) as error:
        t.add(ids, greedy())
    assert all(word in str(error.value) for word in words), error.value
    following = t.add(prompt(8), greedy(5))
    last = t.drain()
    (alone,) = tiny(max_model_len=40).run((prompt(7), greedy(5, logprobs=1)))
    assert last[neighbour].outputs == alone.outputs
    assert len(tokens(last[following])) == 5


def test_s03_a_prompt_larger_than_the_pool_is_refused_at_once(tiny):
    t = tiny(block_size=4, num_blocks=8)
    with pytest.raises(ValueError, match=r"40.*32"):
        t.add(prompt(40), greedy(1))
    assert not t.engine.has_unfinished()


def test_s04_a_request_that_fills_the_pool_ends_and_the_engine_lives_on(tiny):
    t = tiny(block_size=4, num_blocks=2)
    (output,) = t.run((prompt(7), greedy(10)))
    assert output.outputs[0].finish_reason == "length"
    assert tokens(output) == dense_greedy(t.model, prompt(7), 1)
    (following,) = t.run((prompt(3), greedy(2)))
    assert len(tokens(following)) == 2


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, ["logit_bias", str(VOCAB), str(VOCAB - 1)]),
        ({"logit_bias": {-1: 1.0}}, ["logit_bias", "-1"]),
        ({"stop_token_ids": [3, 5000]}, ["stop_token_ids", "5000"]),
    ],
)
def test_token_ids_in_parameters_must_exist(tiny, params, words):
    with pytest.raises(ValueError) as error:
        tiny().add(prompt(3), SamplingParams(**params))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "service",
    [
        {"cache_salt": None},
        {"cache_salt": b"x"},
        {"priority": None},
        {"priority": "a"},
        {"priority": math.nan},
    ],
)
def test_a_salt_or_priority_of_the_wrong_kind_is_refused_and_the_next_is_served(tiny, service):
    t = tiny()
    t.add(prompt(4), greedy(2))
    with pytest.raises(ValueError, match=next(iter(service))):
        t.add(prompt(5), greedy(2), **service)
    (output,) = t.drain().values()
    assert output.error is None


def test_s13_labels_are_only_labels(tiny):
    t = tiny()
    first = t.add(prompt(5), greedy(4), label="same")
    second = t.add(prompt(6), greedy(4), label="same")
    t.engine.abort(first)
    third = t.add(prompt(7), greedy(4), label="same")
    last = t.drain()
    assert len({first, second, third}) == 3
    assert set(last) == {second, third}
    assert [last[i].label for i in (second, third)] == ["same", "same"]
    assert len({o.request_id for o in last.values()}) == 2


# ---- the end of a request


@pytest.mark.parametrize("end", [0, 1, EOS])
def test_a08_every_end_token_ends_the_text_and_0_is_an_id(tiny, end):
    (output,) = tiny(eos=(0, 1, EOS)).run((prompt(5), always(end, max_tokens=9)))
    assert tokens(output) == [end]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert output.outputs[0].text == ""


def test_a09_min_tokens_holds_back_every_end_and_ignore_eos_runs_to_the_limit(tiny):
    t = tiny()
    held, ignoring = t.run(
        (prompt(5), always(EOS, max_tokens=9, min_tokens=2, stop_token_ids=[77])),
        (prompt(5), always(EOS, max_tokens=4, ignore_eos=True)),
    )
    assert len(tokens(held)) == 3
    assert tokens(held)[-1] == EOS
    assert EOS not in tokens(held)[:2]
    assert tokens(ignoring) == [EOS] * 4
    assert ignoring.outputs[0].finish_reason == "length"


def test_a10_max_tokens_0_scores_the_prompt_only(tiny):
    t = tiny()
    (output,) = t.run((prompt(6), greedy(0, prompt_logprobs=0)))
    assert tokens(output) == []
    assert output.outputs[0].finish_reason == "length"
    assert len(output.prompt_logprobs) == 6
    (full,) = tiny(max_model_len=6).run((prompt(6), greedy(0)))
    assert full.outputs[0].finish_reason == "length"


def test_t04_the_reason_of_every_end(tiny):
    t = tiny()
    letter = ord("x") - ord("!")  # the byte-level alphabet starts with "!"
    eos, stop_id, stop, length = t.run(
        (prompt(5), always(EOS)),
        (prompt(5), always(letter, stop_token_ids=[letter])),
        (prompt(5), always(letter, stop=["xxx"], max_tokens=9)),
        (prompt(5), always(letter, max_tokens=2)),
    )
    ends = [(o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in (eos, stop_id, stop, length)]
    assert ends == [("stop", None), ("stop", letter), ("stop", "xxx"), ("length", None)]
    assert [o.outputs[0].text for o in (eos, stop_id, stop, length)] == ["", "", "", "xx"]
    assert tokens(stop) == [letter] * 3
    pending = t.add(prompt(5), always(letter, max_tokens=9))
    t.engine.step()
    aborted = t.engine.abort(pending)
    assert aborted.finished
    assert aborted.outputs[0].finish_reason == "abort"
    assert tokens(aborted) == [letter]


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(tiny):
    letter = ord("x") - ord("!")
    (output,) = tiny().run((prompt(5), always(letter, stop="xx", max_tokens=2)))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "xx")


def test_text_after_a_stop_string_is_kept_when_asked_for(tiny):
    letter = ord("x") - ord("!")
    params = always(letter, stop="xx", max_tokens=9, include_stop_str_in_output=True)
    (output,) = tiny().run((prompt(5), params))
    assert output.outputs[0].text == "xx"


def test_a09_a_stop_string_ends_nothing_before_min_tokens(tiny):
    (whole,) = tiny().run((prompt(5), greedy(8, ignore_eos=True)))
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    assert len(text) >= 4
    params = {"ignore_eos": True, "stop": sorted(set(text))}
    (at_once,) = tiny().run((prompt(5), greedy(8, **params)))
    assert (at_once.outputs[0].text, at_once.outputs[0].finish_reason) == ("", "stop")
    (held,) = tiny().run((prompt(5), greedy(8, min_tokens=5, **params)))
    assert len(held.outputs[0].token_ids) > 5
    assert held.outputs[0].finish_reason == "stop"
    assert text.startswith(held.outputs[0].text)
    (to_the_end,) = tiny().run((prompt(5), greedy(8, min_tokens=8, **params)))
    assert (to_the_end.outputs[0].text, to_the_end.outputs[0].token_ids) == (text, ids)
    assert to_the_end.outputs[0].finish_reason == "length"


def test_t04_a_stop_that_only_an_unfinished_character_completes(tiny):
    """0xC3 (id from its letter) begins a character of two bytes that never ends."""
    t = tiny()
    lead = next(i for i in range(256) if t.engine.tokenizer.vocabulary.bytes_of(i) == b"\xc3")
    params = SamplingParams(temperature=0.0, max_tokens=1, logit_bias={lead: 1e6}, stop=["\ufffd"])
    (output,) = t.run((prompt(5), params))
    choice = output.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", "\ufffd")


def test_a09_an_end_token_that_the_model_does_not_have_ends_nothing(tiny):
    t = tiny(eos=(EOS, 10**9))
    (output,) = t.run((prompt(5), SamplingParams(min_tokens=1, max_tokens=2, seed=1)))
    assert output.error is None
    assert t.engine.eos_token_ids == (EOS,)
