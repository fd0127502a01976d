"""The throughput bench's arithmetic: what is sent, what is counted, what is compared."""

import itertools
import math
import mmap
from typing import Any

import pytest

from octavo.bench import workloads
from octavo.bench.throughput import Settings, compare_ids, summarise
from octavo.bench.worker import forget_peak, peak_bytes, play

TEXT = list(range(80_000))


def test_the_workloads_are_those_announced():
    made = {w.key: w for w in workloads.make("abcde", TEXT)}
    sizes = {
        key: (len(w.turns), len(w.turns[0]), w.num_prompt_tokens, w.num_new_tokens) for key, w in made.items()
    }
    assert sizes == {
        "a": (1, 1, 128, 128),
        "b": (32, 1, 32 * 128, 32 * 64),
        "c": (32, 1, 32 * (1024 + 32), 32 * 32),
        "d": (8, 6, 8 * sum(64 + turn * 96 for turn in range(6)), 8 * 6 * 32),
        "e": (1, 1, 4096, 64),
    }
    assert made["d"].longest == 6 * 96
    assert made["e"].single
    assert not made["d"].single


def test_no_two_requests_share_a_passage_but_c_s_prefix():
    made = {w.key: w for w in workloads.make("abcde", TEXT)}
    prefix = made["c"].turns[0][0][:1024]
    assert all(chat[0][:1024] == prefix for chat in made["c"].turns)
    seen = list(prefix)
    for workload in made.values():
        for chat in workload.turns:
            for turn in chat:
                seen += turn[1024:] if workload.key == "c" else turn
    assert len(seen) == len(set(seen))


def test_a_workload_does_not_depend_on_which_others_run():
    assert workloads.make("d", TEXT) == workloads.make("abd", TEXT)[2:]


@pytest.mark.parametrize(("keys", "text"), [("x", TEXT), ("", TEXT), ("e", TEXT[:1000])])
def test_bad_choices_are_refused(keys, text):
    with pytest.raises(ValueError, match=r"workloads are a, b, c, d, e|too few for the workloads"):
        workloads.make(keys, text)


class Clockwork:
    """Answers every prompt with its length, in half a second to the first token and one in all."""

    def __init__(self) -> None:
        self.sent: list[list[list[int]]] = []

    def reset(self) -> None: ...

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Any:
        from octavo.bench.engines import Reply

        self.sent.append(prompts)
        return Reply([[len(p)] * new_tokens for p in prompts], 0.5, 1.0)

    def notes(self) -> dict[str, Any]:
        return {}


def test_each_turn_sends_the_history_with_its_replies():
    workload = workloads.make("d", TEXT)[0]
    session = Clockwork()
    timings, answers = play(session, workload)
    assert [len(prompts[0]) for prompts in session.sent] == [64 + turn * 96 for turn in range(6)]
    for earlier, later in itertools.pairwise(session.sent):
        for before, after in zip(earlier, later, strict=True):
            assert after[: len(before)] == before
            assert after[len(before) : len(before) + 32] == [len(before)] * 32
    assert sum(map(len, answers)) == workload.num_new_tokens
    assert timings == {"total_s": 6.0, "first_token_s": 3.0, "tok_s": workload.num_new_tokens / 6.0}


def test_prefill_and_decode_are_told_apart_for_a_single_request():
    timings, _ = play(Clockwork(), workloads.make("e", TEXT)[0])
    assert timings["prefill_tok_s"] == 4096 / 0.5
    assert timings["decode_tok_s"] == 63 / 0.5


def test_agreement_counts_up_to_the_first_difference_of_each_chat():
    assert compare_ids([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 0, 7, 8]]) == {
        "chats_equal": 1,
        "chats": 2,
        "share_before_divergence": 5 / 8,
        "first_divergence": 1,
    }
    assert compare_ids([[1]], [[1]])["first_divergence"] is None


def test_the_median_is_of_each_engine_s_own_repeats():
    def engine(speeds: list[float], peak: int) -> dict[str, Any]:
        runs = [{"tok_s": speed, "total_s": 1 / speed, "first_token_s": 0.1} for speed in speeds]
        base = {"load_s": 1.0, "load_peak_bytes": peak, "notes": {}, "token_ids": [[1, 2]]}
        return base | {"runs": runs, "peak_bytes": peak}

    workload = workloads.make("a", TEXT)[0]
    summary = summarise(workload, {"octavo": engine([30, 20, 100], 50), "transformers": engine([10], 100)})
    assert summary["engines"]["octavo"]["repeats"] == 3
    assert summary["engines"]["transformers"]["repeats"] == 1
    assert math.isclose(summary["comparisons"]["transformers"]["speed"]["tok_s"], 3.0)
    assert summary["comparisons"]["transformers"]["memory"] == 0.5


@pytest.mark.parametrize("field", ["threads", "repeats", "peer_repeats", "slow_peer_repeats", "scale"])
def test_settings_below_one_are_refused(field, tmp_path):
    good: dict[str, Any] = {"model": "m", "text": tmp_path, "keys": "a", "threads": 1}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        Settings(**good | {field: 0})


def test_peak_memory_sees_what_came_and_went():
    forget_peak()
    before = peak_bytes()
    # A mapping of its own: the heap may hold as much that is resident already.
    with mmap.mmap(-1, 64 << 20) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
    assert peak_bytes() - before > 60 << 20
    forget_peak()
    assert peak_bytes() - before < 32 << 20
