"""What fails inside a step costs the request that fails, and nobody else."""

from __future__ import annotations

import math

import pytest
from tiny_engine import VOCAB, dense_greedy, greedy, prompt, tokens

from octavo.engine.sampler import NOT_FINITE
from octavo.request import SamplingParams


def test_h11_a_forward_pass_that_raises_costs_only_the_request_that_raises_again(tiny, caplog):
    jobs = [(prompt(6), greedy(5)), ([40, 41, 200], greedy(5)), (prompt(9), greedy(5))]
    expected = tiny().run(*jobs)
    t = tiny()
    t.model.fail_on = {200}
    a, bad, b = t.run(*jobs)
    assert (a.outputs, b.outputs) == (expected[0].outputs, expected[2].outputs)
    assert bad.finished
    assert bad.outputs[0].finish_reason == "error"
    assert "this token cannot be computed" in bad.error
    assert "\n" not in bad.error
    assert "a step of 3 requests failed (RuntimeError: this token cannot be computed)" in caplog.text
    assert t.engine.scheduler_stats.used_blocks == 0
    (following,) = t.run((prompt(6), greedy(5)))
    assert tokens(following) == tokens(expected[0])


def test_h11_what_a_failed_request_wrote_is_never_matched(tiny):
    ids = [*prompt(8), 200, *prompt(7, seed=3)]
    t = tiny()
    t.model.nan_on = {200}
    (bad,) = t.run((ids, greedy(3)))
    assert bad.error == NOT_FINITE
    t.model.nan_on = set()
    (good,) = t.run((ids, greedy(3)))
    assert tokens(good) == dense_greedy(t.model, ids, 3)


def test_h11_those_who_wait_for_a_prefix_of_a_failed_request_go_on(tiny):
    shared = [200, *prompt(30)]
    t = tiny(budget=8)
    t.model.fail_on = {200}
    first, second = t.run((shared, greedy(2)), ([*shared, 65], greedy(2)))
    assert first.error
    assert second.error
    (third,) = t.run((prompt(30), greedy(2)))
    assert third.error is None


def test_h11_a_failing_sampler_or_detokenizer_costs_its_own_request(tiny, monkeypatch):
    import octavo.engine.sampler as sampler
    from octavo.tokenizer import IncrementalDetokenizer

    jobs = [(prompt(6), greedy(4)), (prompt(5), greedy(4, presence_penalty=0.5)), (prompt(7), greedy(4))]
    expected = [o.outputs for o in tiny().run(*jobs)]

    def broken(*_):
        raise ZeroDivisionError("in the sampler")

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_penalize", lambda x, row: row.params.presence_penalty and broken())
        a, bad, b = tiny().run(*jobs)
        assert (a.outputs, b.outputs) == (expected[0], expected[2])
        assert "ZeroDivisionError" in bad.error

    t = tiny()
    ids = [t.add(*job) for job in jobs]
    monkeypatch.setattr(IncrementalDetokenizer, "push", broken_for(t.engine._entries[ids[1]], broken))
    last = t.drain()
    assert (last[ids[0]].outputs, last[ids[2]].outputs) == (expected[0], expected[2])
    assert "ZeroDivisionError" in last[ids[1]].error
    assert last[ids[1]].outputs[0].finish_reason == "error"
    assert t.engine.scheduler_stats.used_blocks == 0


def test_h11_text_that_cannot_be_flushed_costs_its_own_request(tiny, monkeypatch):
    from octavo.tokenizer import IncrementalDetokenizer

    def broken(*_):
        raise ZeroDivisionError("in the detokenizer")

    t = tiny()
    bad, good = t.add(prompt(6), greedy(4)), t.add(prompt(5), greedy(4))
    patched = broken_for(t.engine._entries[bad], broken, "flush")
    monkeypatch.setattr(IncrementalDetokenizer, "flush", patched)
    last = t.drain()
    assert "ZeroDivisionError" in last[bad].error
    assert last[bad].outputs[0].finish_reason == "error"
    assert len(last[bad].outputs[0].token_ids) == 4
    assert last[good].error is None
    assert t.engine.metrics.finished == {"error": 1, "length": 1}


@pytest.mark.parametrize("scored", ["logprobs", "prompt_logprobs"])
def test_h11_a_scored_token_without_text_costs_its_own_request(tiny, monkeypatch, scored):
    t = tiny()
    bad, good = t.add(prompt(6), greedy(4, **{scored: 1})), t.add(prompt(5), greedy(4))
    monkeypatch.setattr(type(t.engine.tokenizer), "id_to_text", lambda self, token: 1 / 0)
    last = t.drain()
    assert "ZeroDivisionError" in last[bad].error
    assert last[bad].outputs[0].finish_reason == "error"
    assert last[good].error is None
    assert t.engine.scheduler_stats.used_blocks == 0


def broken_for(entry, broken, method="push"):
    from octavo.tokenizer import IncrementalDetokenizer

    good = getattr(IncrementalDetokenizer, method)
    own = {id(choice.detokenizer) for choice in entry.choices}
    return lambda self, *args, **kw: broken() if id(self) in own else good(self, *args, **kw)


def test_h11_a_row_without_a_token_left_and_one_failing_choice(tiny, monkeypatch):
    from octavo.tokenizer import IncrementalDetokenizer

    everything = dict.fromkeys(range(VOCAB), -math.inf)
    good, bad = tiny().run((prompt(4), greedy(2)), (prompt(4), greedy(2, logit_bias=everything)))
    assert len(tokens(good)) == 2
    assert "forbid every token" in bad.error

    t = tiny()
    entry_id = t.add(prompt(4), SamplingParams(n=3, seed=2, max_tokens=4, ignore_eos=True))
    failing = t.engine._entries[entry_id].choices[1].detokenizer
    push = IncrementalDetokenizer.push

    def fails_for_one(self, token, **kw):
        if self is failing:
            raise ZeroDivisionError("in the detokenizer")
        return push(self, token, **kw)

    monkeypatch.setattr(IncrementalDetokenizer, "push", fails_for_one)
    output = t.drain()[entry_id]
    assert [c.finish_reason for c in output.outputs] == ["length", "error", "length"]
    assert "ZeroDivisionError" in output.error
