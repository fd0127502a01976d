"""Laws of the engine, over a tiny model with real paged attention. Case ids are in the test names."""

from __future__ import annotations

import itertools
import mmap
import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_engine import EOS, VOCAB, dense_greedy, dense_logits, greedy, prompt, tokens

from octavo.config import EngineConfig, ModelConfig, RopeConfig
from octavo.engine.build import prefix_fingerprint
from octavo.engine.runner import SCORE_ROWS, build
from octavo.engine.step import BlockCopy, ScheduledRequest
from octavo.request import Request, SamplingParams


def test_the_batch_of_the_worked_example():
    a = Request(
        id=0, label="", prompt_token_ids=[1, 2, 3], params=SamplingParams(), block_table=array("i", [7, 2])
    )
    a.output_token_ids = [40, 50, 60]
    b = Request(
        id=1,
        label="",
        prompt_token_ids=list(range(10, 18)),
        params=SamplingParams(),
        block_table=array("i", [9, 3]),
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


def test_copies_run_in_their_order(tiny):
    t = tiny()
    for block in (0, 1, 2):
        t.kv_cache.key[:, block] = float(block)
    t.runner.copy_blocks([BlockCopy(1, 0, 2), BlockCopy(2, 1, 3)])
    assert t.kv_cache.key[0, 0, 0, :, 0].tolist() == [1, 1, 0, 0]
    assert t.kv_cache.key[0, 1, 0, :, 0].tolist() == [2, 2, 2, 1]


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

    warm = resident_after(500)
    assert resident_after(1500) - warm < 1500 << 10  # a KiB a request


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
    compact = replace(cache, history="compact")
    others = [
        (replace(config, attention="sdpa"), *base[1:]),
        (replace(config, weights="float32"), *base[1:]),
        (replace(config, activations="int8"), *base[1:]),
        (replace(config, topk_planes=True), *base[1:]),
        (replace(config, topk_planes=True, attn_topk_tail=True), *base[1:]),
        (replace(config, topk_planes=True, attn_topk_mode="fast"), *base[1:]),
        (replace(config, cache=replace(cache, kv_dtype="float16")), *base[1:]),
        (replace(config, cache=replace(cache, block_size=32)), *base[1:]),
        (replace(config, cache=compact), *base[1:]),
        (replace(config, cache=replace(compact, history_window=1024)), *base[1:]),
        (replace(config, cache=replace(compact, history_values="int4")), *base[1:]),
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
        cache = t.scheduler._blocks.cache
        keys.append(set(cache.digests(cache.chain(prompt(20), ""))))
    assert keys[0] == keys[1]
    assert not keys[0] & keys[2]


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
