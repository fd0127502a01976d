"""The throughput bench: what is sent, what is counted, what is compared, and what is said of what fails."""

import itertools
import json
import math
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import goals, own_process, throughput_report, variants, workloads
from octavo.bench.throughput import Settings, compare_ids, summarise
from octavo.bench.worker import Reply, forget_peak, peak_bytes, play, tree

TEXT = list(range(80_000))
KEYS = ["a", "b", "c", "d", "e", "e8k"]


def test_the_workloads_are_those_announced():
    made = {w.key: w for w in workloads.make(KEYS, TEXT)}
    sizes = {
        key: (len(w.turns), len(w.turns[0]), w.num_prompt_tokens, w.num_new_tokens) for key, w in made.items()
    }
    assert sizes == {
        "a": (1, 1, 128, 128),
        "b": (32, 1, 32 * 128, 32 * 64),
        "c": (32, 1, 32 * (1024 + 32), 32 * 32),
        "d": (8, 6, 8 * sum(64 + turn * 96 for turn in range(6)), 8 * 6 * 32),
        "e": (1, 1, 4096, 64),
        "e8k": (1, 1, 8000, 64),
    }


def test_no_two_requests_share_a_passage_but_c_s_prefix():
    made = {w.key: w for w in workloads.make(KEYS, TEXT)}
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
    with pytest.raises(ValueError, match=r"workloads are a, b, c, d, e, e8k, got|too few for the workloads"):
        workloads.make(keys, text)


class Clockwork:
    """Answers every prompt with its length, in half a second to the first token and one in all."""

    def __init__(self) -> None:
        self.sent: list[list[list[int]]] = []

    def reset(self) -> None: ...

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Reply:
        self.sent.append(prompts)
        return [[len(p)] * new_tokens for p in prompts], 0.5, 1.0

    def notes(self) -> dict[str, Any]:
        return {}


def test_each_turn_sends_the_history_with_its_replies():
    workload = workloads.make("d", TEXT)[0]
    session = Clockwork()
    timings, answers = play(session, workload.turns, workload.new_tokens)
    assert [len(prompts[0]) for prompts in session.sent] == [64 + turn * 96 for turn in range(6)]
    for earlier, later in itertools.pairwise(session.sent):
        for before, after in zip(earlier, later, strict=True):
            assert after[: len(before)] == before
            assert after[len(before) : len(before) + 32] == [len(before)] * 32
    assert sum(map(len, answers)) == workload.num_new_tokens
    assert timings == {"total_s": 6.0, "first_token_s": 3.0, "tok_s": workload.num_new_tokens / 6.0}


def test_prefill_and_decode_are_told_apart_for_a_single_request():
    workload = workloads.make("e", TEXT)[0]
    timings, _ = play(Clockwork(), workload.turns, workload.new_tokens)
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


def test_an_engine_that_stops_early_is_refused():
    class Short(Clockwork):
        def generate(self, prompts: list[list[int]], new_tokens: int) -> Reply:
            return super().generate(prompts, new_tokens - 1)

    with pytest.raises(ValueError, match=r"asked for 1 answers of 128 tokens, got 1 of \[127\]"):
        play(Short(), [[[1, 2, 3]]], 128)


READY = {"load_s": 1.0, "start_up_s": 2.0, "load_peak_bytes": 1, "versions": {"x": "1"}}


def measured(speeds: list[float], peak: int, **more: Any) -> dict[str, Any]:
    """What a row's process said, as ``own_process.measure`` returns it."""
    runs = [
        {
            "timings": {"tok_s": speed, "total_s": 1 / speed, "first_token_s": 0.1},
            "token_ids": [[1, 2]],
            "peak_bytes": peak,
            "notes": {},
        }
        for speed in speeds
    ]
    return READY | {"runs": runs} | more


STOPPED = measured([], 1, stopped_s=10, peak_bytes=5)


def summary_of(key: str, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return summarise(workloads.make([key], TEXT)[0], rows)


def test_the_median_is_of_each_row_s_own_repeats():
    summary = summary_of(
        "a", {"octavo-fp32": measured([30, 20, 100], 50), "llama.cpp-f32": measured([10], 100)}
    )
    engines = summary["engines"]
    assert (engines["octavo-fp32"]["repeats"], engines["llama.cpp-f32"]["repeats"]) == (3, 1)
    assert engines["octavo-fp32"]["median"]["tok_s"] == 30
    assert engines["llama.cpp-f32"]["tokens"]["beside"] == "octavo-fp32"
    speed, memory = summary["goals"]
    assert (speed["measure"], speed["goal"], speed["met"]) == ("tok_s", 1.0, True)
    assert math.isclose(speed["ratio"], 3.0)
    assert (memory["measure"], memory["ratio"], memory["met"]) == ("peak_bytes", 0.5, True)


@pytest.mark.parametrize(("extra", "met"), [(0, True), (300 * 10**6, True), (300 * 10**6 + 1, False)])
def test_memory_may_be_above_llama_cpp_s_by_300_mb(extra, met):
    rows = {"octavo-q8_0": measured([1], 1000 + extra), "llama.cpp-q8_0": measured([1], 1000)}
    (goal,) = (row for row in summary_of("b", rows)["goals"] if row["measure"] == "peak_bytes")
    assert goal["met"] is met


@pytest.mark.parametrize(("speed", "met"), [(7.99, False), (8.0, True)])
def test_a_ratio_at_the_goal_meets_it_and_one_below_does_not(speed, met):
    rows = {"octavo-fp32": measured([speed], 1), "transformers-fp32": measured([1.0], 1)}
    (goal,) = summary_of("c", rows)["goals"]
    assert goal["met"] is met


@pytest.mark.parametrize(("speed", "met"), [(1024 / 10 * 8.1, True), (1024 / 10 * 7.9, None)])
def test_a_peer_stopped_at_the_limit_can_show_a_goal_met_but_never_missed(speed, met):
    rows = {
        "octavo-fp32": measured([speed], 1),
        "transformers-fp32": measured([], 1, stopped_s=10, peak_bytes=5),
    }
    summary = summary_of("c", rows)
    (goal,) = summary["goals"]
    assert (goal["bound"], goal["met"]) == (True, met)
    assert summary["engines"]["transformers-fp32"]["stopped_s"] == 10


def test_a_row_that_failed_is_in_the_report_with_its_reason():
    rows = {"octavo-fp32": measured([5.0], 1), "vllm-fp32": measured([], 1, failed="ImportError: no torch")}
    summary = summary_of("c", rows)
    (goal,) = summary["goals"]
    assert (goal["ratio"], goal["met"], goal["why"]) == (None, None, "vllm-fp32 did not run")
    result = {"missing": {"openvino-fp32": "not installed"}, "workloads": {"c": summary}}
    assert throughput_report.not_run(result) == [
        ("openvino-fp32", "all", "not installed"),
        ("vllm-fp32", "c", "ImportError: no torch"),
    ]


def test_every_goal_is_about_rows_workloads_and_measures_that_exist():
    for goal in goals.GOALS:
        assert {goal.ours, goal.peer} <= set(variants.VARIANTS)
        assert goal.workload in workloads.SHAPES
        assert goal.measure in throughput_report.MEASURES
        assert goal.ours != goal.peer
    assert len(set(goals.GOALS)) == len(goals.GOALS)


def test_every_row_has_an_engine_and_a_colour():
    sessions = Path(own_process.__file__).parent / "sessions"
    for row in variants.VARIANTS.values():
        assert (sessions / f"{row.engine}.py").is_file()
        assert row.family in variants.FAMILIES
        assert row.family in throughput_report.COLOURS


def test_a_family_names_all_its_rows_and_a_row_itself():
    def names(*chosen: str) -> list[str]:
        return [row.name for row in variants.choose(chosen, ours=False)]

    assert names("vllm", "openvino") == ["openvino-fp32", "openvino-int8", "vllm-fp32"]
    assert names("llama.cpp-q4_1", "llama.cpp") == ["llama.cpp-f32", "llama.cpp-q8_0", "llama.cpp-q4_1"]
    with pytest.raises(ValueError, match=r"peers are transformers, .*got 'octavo'"):
        names("octavo")


def test_a_peer_that_is_not_installed_is_named_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match=r"not installed: there is no vllm/bin/python \(`make peers`"):
        variants.python_of("vllm", tmp_path)
    assert variants.python_of("octavo", tmp_path) == Path(sys.executable)


@pytest.mark.parametrize("field", ["threads", "repeats", "peer_repeats", "limit_s", "scale"])
def test_settings_below_one_are_refused(field, tmp_path):
    good: dict[str, Any] = {"model": "m", "text": tmp_path, "keys": "a", "threads": 1, "peers_dir": tmp_path}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        Settings(**good | {field: 0})


def test_the_worker_starts_in_an_interpreter_that_has_nothing_installed():
    job = {"engine": "octavo", "model": "", "threads": 1, "options": {}, "repeats": 1}
    job |= {"turns": [[[1, 2]]], "new_tokens": 2, "spawned": 0.0}
    done = subprocess.run(
        [sys.executable, "-I", "-S", own_process.WORKER],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout) == {
        "event": "error",
        "what": "ModuleNotFoundError: No module named 'octavo'",
    }


#: Stands in for the worker; what it does comes from the job.
ACTOR = """
import json, os, subprocess, sys, time
job = json.load(sys.stdin)
def say(**event): print(json.dumps(event), flush=True)
if job["act"] == "crash":
    print("out of luck", file=sys.stderr); os._exit(3)
say(event="ready", **job["ready"])
if job["act"] == "raise":
    say(event="error", what="KeyError: 'x'"); sys.exit(1)
for number in range(2):
    say(event="start")
    if job["act"] == "hang" and number:
        child = subprocess.Popen(["sleep", "600"])
        open(job["pids"], "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    say(event="run", timings={"total_s": 1.0}, token_ids=[[1]], peak_bytes=1, notes={})
say(event="end")
"""


@pytest.fixture
def act(tmp_path, monkeypatch):
    actor = tmp_path / "actor.py"
    actor.write_text(ACTOR)
    monkeypatch.setattr(own_process, "WORKER", actor)

    def perform(name: str, limit_s: float = 60) -> dict[str, Any]:
        job = {"act": name, "ready": READY, "pids": str(tmp_path / "pids")}
        return own_process.measure(Path(sys.executable), job, limit_s, os.environ)

    return perform


def test_a_process_that_reaches_its_end_gives_its_runs(act):
    found = act("play")
    assert len(found["runs"]) == 2
    assert found["start_up_s"] == 2.0
    assert not {"failed", "stopped_s"} & set(found)


@pytest.mark.parametrize(
    ("name", "why"), [("crash", "the process ended with 3: out of luck"), ("raise", "KeyError: 'x'")]
)
def test_a_process_that_dies_says_why(act, name, why):
    assert act(name)["failed"] == why


def test_a_run_over_the_limit_is_stopped_with_all_that_it_started(act, tmp_path):
    start = time.monotonic()
    found = act("hang", limit_s=1)
    assert time.monotonic() - start < 20
    assert (found["stopped_s"], len(found["runs"])) == (1, 1)
    assert found["peak_bytes"] > 1 << 20
    assert all_gone(tmp_path / "pids")


def test_a_bench_that_is_terminated_takes_what_it_started_with_it(act, tmp_path):
    job = {"act": "hang", "ready": READY, "pids": str(tmp_path / "pids")}
    code = (
        "import json, os, sys; from pathlib import Path; from octavo.bench import own_process as o;"
        "o.WORKER, job = Path(sys.argv[1]), json.loads(sys.argv[2]);"
        "o.measure(Path(sys.executable), job, 600, os.environ)"
    )
    bench = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "actor.py"), json.dumps(job)])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    bench.terminate()
    assert bench.wait(30) == 128 + 15
    assert all_gone(tmp_path / "pids")


def all_gone(pids: Path) -> bool:
    """Neither running nor anything but a zombie that its parent has not looked at."""

    def gone(pid: str) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if all(gone(pid) for pid in pids.read_text().split()):
            return True
        time.sleep(0.02)
    return False


def test_the_tree_of_a_process_holds_its_children():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert child.pid in tree()
        assert tree()[0] == os.getpid()
        assert peak_bytes(tree()) > peak_bytes()
    finally:
        child.kill()
        child.wait()


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
