"""Laws of the engine, over a tiny model with real paged attention. Case ids are in the test names."""

from __future__ import annotations

import itertools
import math
import mmap
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_engine import EOS, VOCAB, always, dense_greedy, dense_logits, greedy, prompt, tokens

from octavo.config import EngineConfig, ModelConfig, RopeConfig
from octavo.engine.build import prefix_fingerprint
from octavo.engine.runner import SCORE_ROWS, build
from octavo.engine.step import BlockCopy, ScheduledRequest
from octavo.request import Request, SamplingParams


def test_the_batch_of_the_worked_example():
    a = Request(id=0, label="", prompt_token_ids=[1, 2, 3], params=SamplingParams(), block_table=[7, 2])
    a.output_token_ids = [40, 50, 60]
    b = Request(
        id=1, label="", prompt_token_ids=list(range(10, 18)), params=SamplingParams(), block_table=[9, 3]
    )
    batch = build([ScheduledRequest(a, 5, 1), ScheduledRequest(b, 4, 3)], 4)
    assert batch.token_ids.tolist() == [60, 14, 15, 16]
    assert batch.positions.tolist() == [5, 4, 5, 6]
    assert batch.slot_mapping.tolist() == [9, 12, 13, 14]
    assert batch.block_table.tolist() == [[7, 2], [9, 3]]
    assert batch.seq_lens.tolist() == [6, 7]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4]
    assert batch.logits_rows.tolist() == [0]
    assert batch.rows_read.tolist() == [1, 0]
    assert batch.read_rows().tolist() == [0]
    b.params = SamplingParams(prompt_logprobs=1)  # scores its prompt: every row is read
    assert build([ScheduledRequest(a, 5, 1), ScheduledRequest(b, 4, 3)], 4).rows_read is None
    # a share that spans the end of the prompt (a resume) takes tokens from both sides
    assert build([ScheduledRequest(a, 1, 4)], 4).token_ids.tolist() == [2, 3, 40, 50]
    assert build([ScheduledRequest(a, 4, 2)], 4).token_ids.tolist() == [50, 60]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17, 40])
def test_greedy_tokens_are_those_of_the_model_without_a_cache(tiny, length):
    t = tiny()
    (output,) = t.run((prompt(length), greedy(12)))
    assert tokens(output) == dense_greedy(t.model, prompt(length), 12)


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 64])
def test_p08_prefix_caching_and_chunks_change_no_token(tiny, budget):
    shared = prompt(30)
    jobs = [(shared + prompt(n, seed=n), greedy(6)) for n in (1, 2, 9)]
    expected = [tokens(o) for o in tiny(prefix_cache=False, budget=10_000).run(*jobs)]
    t = tiny(prefix_cache=True, budget=budget)
    assert [tokens(o) for o in t.run(*jobs)] == expected
    again = t.run(*jobs)
    assert [tokens(o) for o in again] == expected
    assert all(o.num_cached_tokens >= 28 for o in again)


@pytest.mark.parametrize("length", [16, 15, 17])
def test_s05_p01_a_prompt_that_is_cached_whole_still_computes_a_token(tiny, length):
    t = tiny(block_size=16)
    params = greedy(4, logprobs=3)
    (cold,) = t.run((prompt(length), params))
    before = t.engine.metrics.computed_tokens
    (warm,) = t.run((prompt(length), params))
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == length - 1
    assert t.engine.metrics.computed_tokens - before == 1 + 3
    assert tokens(cold) == tokens(warm)
    for a, b in zip(cold.outputs[0].logprobs, warm.outputs[0].logprobs, strict=True):
        assert list(a) == list(b)
        assert all(abs(a[k].logprob - b[k].logprob) < 1e-4 for k in a)


def test_p09_the_output_says_what_was_cached_and_where_it_diverged(tiny):
    t = tiny()
    t.run((prompt(20), greedy(1)))
    other = prompt(20)
    other[10] = 200
    (output,) = t.run((other, greedy(1)))
    assert output.num_cached_tokens == 10
    assert "10" in output.cache_miss_reason


def test_only_the_last_token_of_a_prompt_goes_through_the_head(tiny):
    t = tiny(budget=10)
    t.run((prompt(25), greedy(3)))
    assert t.model.forwards == [10, 10, 5, 1, 1]
    assert t.model.head_rows == [1, 1, 1]


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


# ---- sampling through the whole engine


def test_a11_choices_share_the_prompt_differ_and_are_reproducible(tiny):
    params = SamplingParams(n=4, seed=7, max_tokens=6, temperature=2.0, ignore_eos=True)
    t = tiny(num_blocks=64)
    entry = t.add(prompt(40), params)
    most_used = 0
    last = None
    while t.engine.has_unfinished():
        for output in t.engine.step():
            last = output
        most_used = max(most_used, t.engine.scheduler_stats.used_blocks)
    assert last.finished
    assert int(last.request_id) == entry
    assert [c.index for c in last.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in last.outputs}) == 4
    assert [c.finish_reason for c in last.outputs] == ["length"] * 4
    # 10 blocks of prompt once, and at most 3 of its own for each choice
    assert most_used <= 10 + 4 * 3
    assert t.engine.metrics.prompt_tokens == 40
    (again,) = tiny(num_blocks=128, prefix_cache=False).run((prompt(40), params))
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in last.outputs]


def test_a12_a_seed_gives_the_same_text_alone_and_in_company(tiny):
    params = SamplingParams(seed=42, temperature=1.5, max_tokens=10, top_p=0.95, ignore_eos=True)
    (alone,) = tiny().run((prompt(9), params))
    company = [(prompt(n), SamplingParams(temperature=3.0, max_tokens=12)) for n in (3, 20, 31)]
    together = tiny(budget=9).run(*company, (prompt(9), params))
    assert tokens(together[-1]) == tokens(alone)


def test_without_a_seed_two_requests_differ_and_the_engines_seed_repeats_them(tiny):
    params = SamplingParams(temperature=5.0, max_tokens=8, ignore_eos=True)
    a, b = tiny().run((prompt(4), params), (prompt(4), params))
    assert tokens(a) != tokens(b)
    again = tiny().run((prompt(4), params), (prompt(4), params))
    assert [tokens(o) for o in again] == [tokens(a), tokens(b)]


@pytest.mark.parametrize("budget", [5, 1000])
def test_prompt_logprobs_are_the_models_and_compute_the_whole_prompt(tiny, budget):
    ids = prompt(SCORE_ROWS + 20)
    t = tiny(budget=budget)
    t.run((ids, greedy(1)))  # would be a hit
    (output,) = t.run((ids, greedy(2, prompt_logprobs=2)))
    expected = torch.log_softmax(dense_logits(t.model, ids)[:, :VOCAB], -1)
    assert output.num_cached_tokens == 0
    assert "prompt_logprobs" in output.cache_miss_reason
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(ids)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        row = expected[position - 1]
        assert list(entry)[:2] == row.topk(2).indices.tolist()
        assert entry[ids[position]].logprob == pytest.approx(float(row[ids[position]]), abs=1e-4)
        assert entry[ids[position]].decoded_token is not None
    assert max(t.model.head_rows) <= SCORE_ROWS


def test_cumulative_logprob_is_the_sum_over_the_chosen_tokens(tiny):
    (output,) = tiny().run((prompt(6), SamplingParams(seed=3, logprobs=1, max_tokens=5, ignore_eos=True)))
    choice = output.outputs[0]
    chosen = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))


# ---- preemption and abort


HARD = {
    "greedy": greedy(24),
    "seeded": SamplingParams(seed=11, temperature=1.2, max_tokens=24, ignore_eos=True),
    "penalties": greedy(24, repetition_penalty=1.4, presence_penalty=1.0, frequency_penalty=0.5),
    "min_tokens": SamplingParams(temperature=0.0, max_tokens=24, min_tokens=20, logit_bias={EOS: 1e5}),
}


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_s07_s08_s09_a_preempted_request_gives_what_an_unpreempted_one_gives(tiny, kind, prefix_cache):
    jobs = [(prompt(10, seed=1), HARD[kind]), (prompt(11, seed=2), HARD[kind])]
    calm = tiny(num_blocks=64, prefix_cache=prefix_cache)
    expected = [tokens(o) for o in calm.run(*jobs)]
    assert calm.engine.metrics.num_preemptions == 0

    t = tiny(num_blocks=12, prefix_cache=prefix_cache)
    seen = []
    ids = [t.add(*job) for job in jobs]
    last = {}
    while t.engine.has_unfinished():
        for output in t.engine.step():
            last[int(output.request_id)] = output
        m = t.engine.metrics
        seen.append((m.prompt_tokens, m.computed_tokens, m.prefix_queries, m.prefix_hits, m.num_preemptions))
    assert [tokens(last[i]) for i in ids] == expected
    assert t.engine.metrics.num_preemptions > 0, "the case did not happen"
    assert sum(last[i].metrics.num_preemptions for i in ids) == t.engine.metrics.num_preemptions
    assert all(a <= b for x, y in itertools.pairwise(seen) for a, b in zip(x, y, strict=True))
    assert t.engine.metrics.prefix_hits == 0, "a resume is not a hit"
    assert all(last[i].num_cached_tokens == 0 for i in ids)
    assert t.engine.scheduler_stats.used_blocks == 0


def test_prompt_logprobs_survive_a_preemption(tiny):
    jobs = [(prompt(18, seed=s), greedy(20, prompt_logprobs=1)) for s in (1, 2)]
    expected = [o.prompt_logprobs for o in tiny().run(*jobs)]
    t = tiny(num_blocks=12, budget=7)
    outputs = t.run(*jobs)
    assert t.engine.metrics.num_preemptions > 0
    for output, wanted in zip(outputs, expected, strict=True):
        for a, b in zip(output.prompt_logprobs[1:], wanted[1:], strict=True):
            assert a is not None
            assert all(abs(a[k].logprob - b[k].logprob) < 1e-4 for k in b)


@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "finished"])
def test_s12_abort_in_every_state_frees_the_blocks(tiny, state):
    t = tiny(num_blocks=12, max_num_seqs=2, prefix_cache=False)
    first = t.add(prompt(10, seed=1), greedy(24))
    second = t.add(prompt(11, seed=2), greedy(24))
    third = t.add(prompt(5, seed=3), greedy(3))
    target = {"waiting": third, "running": first, "preempted": second, "finished": third}[state]
    t.engine.step()
    if state == "preempted":
        while not t.engine.metrics.num_preemptions:
            t.engine.step()
    if state == "finished":
        t.drain()
        assert t.engine.abort(target) is None
    else:
        output = t.engine.abort(target)
        assert output.finished
        assert output.outputs[0].finish_reason == "abort"
        assert t.engine.abort(target) is None
        last = t.drain()
        assert target not in last
        assert all(o.outputs[0].finish_reason == "length" for o in last.values())
    assert t.engine.abort(10**9) is None
    stats = t.engine.scheduler_stats
    assert (stats.used_blocks, stats.free_blocks) == (0, 12)


def test_s16_nothing_is_kept_of_what_has_ended(tiny):
    t = tiny(num_blocks=32)
    rng = random.Random(5)
    for i in range(120):
        t.add(prompt(rng.randrange(1, 12), seed=i), greedy(2))
        if i % 10 == 0:
            t.drain()
    t.drain()
    stats = t.engine.scheduler_stats
    assert stats.free_blocks + stats.cached_blocks == 32
    assert not t.engine._entries
    assert not t.engine._owner


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_s16_resident_memory_is_flat_after_many_requests(tiny):
    t = tiny(num_blocks=32)
    rng = random.Random(6)

    def resident_after(count: int) -> int:
        for i in range(count):
            t.add(prompt(rng.randrange(1, 12), seed=rng.randrange(10**9)), greedy(1))
            if i % 40 == 39:
                t.drain()
        t.drain()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    warm = resident_after(2000)
    assert resident_after(8000) - warm < 8 << 20


def test_p06_whatever_the_kv_depends_on_is_in_the_fingerprint():
    config = EngineConfig(model="m", attention="fused")
    model = ModelConfig(
        architecture="llama",
        vocab_size=10,
        hidden_size=32,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    base = (config, model, "weights", "avx2", 1)
    cache = config.cache
    others = [
        (replace(config, attention="sdpa"), *base[1:]),
        (replace(config, weights="float32"), *base[1:]),
        (replace(config, activations="int8"), *base[1:]),
        (replace(config, cache=replace(cache, kv_dtype="float16")), *base[1:]),
        (replace(config, cache=replace(cache, block_size=32)), *base[1:]),
        (config, replace(model, rope=RopeConfig(theta=5.0)), *base[2:]),
        (config, replace(model, sliding_window=8, sliding_layers=(0,)), *base[2:]),
        (config, model, "other weights", *base[3:]),
        (config, model, "weights", "portable", 1),
        (config, model, "weights", "avx2", 2),
    ]
    prints = [prefix_fingerprint(*arguments) for arguments in (base, *others)]
    assert len(set(prints)) == len(prints)
    assert prefix_fingerprint(*base) == prints[0]
    # what cannot change K and V does not empty the cache
    assert prefix_fingerprint(replace(config, num_threads=7, seed=3), *base[1:]) == prints[0]


def test_p06_nothing_is_matched_under_another_fingerprint(tiny):
    """The same cache object cannot live on; the digests that stand for its blocks differ."""
    keys = []
    for fingerprint in ("a", "a", "b"):
        t = tiny(fingerprint=fingerprint)
        t.run((prompt(20), greedy(1)))
        keys.append(set(t.scheduler._cache.digests(t.scheduler._cache.chain(prompt(20), ""))))
    assert keys[0] == keys[1]
    assert not keys[0] & keys[2]


# ---- an error costs one request


def test_copies_run_in_their_order(tiny):
    t = tiny()
    for block in (0, 1, 2):
        t.kv_cache.key[:, block] = float(block)
    t.runner.copy_blocks([BlockCopy(1, 0, 2), BlockCopy(2, 1, 3)])
    assert t.kv_cache.key[0, 0, 0, :, 0].tolist() == [1, 1, 0, 0]
    assert t.kv_cache.key[0, 1, 0, :, 0].tolist() == [2, 2, 2, 1]


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


# ---- metrics


def test_metrics_count_tokens_steps_and_times(tiny):
    t = tiny()
    t.run((prompt(10), greedy(4)), (prompt(10), greedy(4)))
    m = t.engine.metrics
    assert (m.prompt_tokens, m.generation_tokens) == (20, 8)
    assert m.finished == {"length": 2}
    assert m.time_to_first_token.count == 2
    assert m.inter_token.count == 6
    assert m.end_to_end.count == 2
    assert m.num_steps == m.step_time.count > 0
    assert sum(m.step_time.counts) == m.step_time.count
    assert m.prefix_queries == 20


def test_times_of_a_request_are_in_order(tiny):
    (output,) = tiny().run((prompt(10), greedy(4)))
    m = output.metrics
    times = [m.arrival_time, m.first_scheduled_time, m.first_token_time, m.finished_time]
    assert times == sorted(times)
