"""The server's bench: what it replays, what it adds up, and a quick run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_checkpoint import write_tiny_model

from octavo.bench import serve, serve_report
from octavo.bench.serve_client import Reply, ServerProcess
from octavo.bench.serve_load import Chat, read_chats, system_prompt


def chunk(text: str) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text}]}, separators=(",", ":")).encode()


def reply(start: float, times: list[float], cached: int = 0) -> Reply:
    """A turn of 10 tokens of prompt whose tokens came at ``times``."""
    events = [(when, chunk("x")) for when in times]
    used = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": cached}}
    end = times[-1]
    events += [(end, json.dumps({"choices": [], "usage": used}).encode()), (end, b"[DONE]")]
    return Reply(start, 200, events=events)


def test_a_summary_of_turns():
    quick = reply(0.0, [0.1, 0.2, 0.3], cached=5)
    late = reply(0.0, [serve.FIRST_TOKEN_LIMIT_S + 1, serve.FIRST_TOKEN_LIMIT_S + 1.1])
    slow = reply(0.0, [0.1, 0.1 + 2 * serve.GAP_LIMIT_S])
    cut = Reply(0.0, 200, events=[(0.4, chunk("x"))])
    refused = Reply(0.0, 429)
    found = serve.summary([quick, late, slow, cut, refused], seconds=2.0)
    assert (found["turns_begun"], found["turns_ended"], found["refused"]) == (5, 3, 1)
    assert found["turns_per_s"] == 1.5
    assert found["good_turns_per_s"] == 0.5
    assert found["output_tokens_per_s"] == 8 / 2
    assert found["cached_share"] == round(5 / 30, 4)
    assert found["time_to_first_token_ms"] == {"p50": 100.0, "p95": 3000.0, "p99": 3000.0}
    assert found["inter_token_ms"]["p50"] == 100.0


def test_percentiles_are_values_that_were_measured():
    values = [i / 1000 for i in range(1, 101)]
    assert serve.percentiles(values) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert serve.percentiles([0.007]) == {"p50": 7.0, "p95": 7.0, "p99": 7.0}
    assert serve.percentiles([]) == {"p50": None, "p95": None, "p99": None}


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_the_share_of_a_system_prompt_is_a_common_prefix(share):
    chats = [Chat(((f"word{i} and more", 3),)) for i in range(50)]
    one, other = (system_prompt(chats, share, number, 100).split() for number in (1, 2))
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), 100)
    assert len(one) == len(other) == 100
    assert 100 * share <= common <= 100 * share + 5
    assert system_prompt(chats, share, 1, 100).split() == one


def test_chats_are_pairs_of_a_question_and_the_length_of_its_answer(tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    path.write_text('["a b", "one two three four", "c", "d", "unanswered"]\n["alone"]\n')
    assert read_chats(path, 6) == [Chat((("a b", 5), ("c", 1)))]
    assert read_chats(path, 1) == [Chat((("a b", 5),))]
    for text, words in (("[1]", "line 1"), ("{", "line 1"), ('["a"]', "no chat")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_chats(path, 6)
    with pytest.raises(ValueError, match="No such file"):
        read_chats(tmp_path / "none", 6)


def test_sections_are_named():
    with pytest.raises(ValueError, match="'rate' is not a section; these are: rates"):
        serve.check_sections(["rate"])
    with pytest.raises(ValueError, match="name a section"):
        serve.check_sections([])


def test_sections_of_an_earlier_run_stay_beside_those_of_this_one(tmp_path: Path):
    same = {"model": "m", "data": "d", "server_options": [], "machine": {}}
    first = serve.joined({}, same | {"http": {"cost": 0.5}, "long": [1]}, "one")
    assert first["commands"] == {"http": "one", "long": "one"}
    second = serve.joined(first, same | {"long": [2], "rates": []}, "two")
    assert (second["http"], second["long"], second["rates"]) == ({"cost": 0.5}, [2], [])
    assert second["commands"] == {"http": "one", "long": "two", "rates": "two"}
    other = serve.joined(first, same | {"model": "other", "rates": []}, "two")
    assert "http" not in other
    assert other["commands"] == {"rates": "two"}
    path = tmp_path / "serve.json"
    assert serve.read_earlier(path) == {}
    path.write_text("{")
    assert serve.read_earlier(path) == {}
    path.write_text(json.dumps(second))
    assert serve.read_earlier(path) == second


def test_a_server_that_does_not_start_says_why(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"did not start: .*nothing-here"):
        ServerProcess(str(tmp_path / "nothing-here"))


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path):
    model = tmp_path / "tiny"
    write_tiny_model(model)
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps(["How are you?", "Fine, and you?", "Me too", "Good"]) + "\n")
    settings = serve.Settings(
        model=str(model),
        data=data,
        seconds=1.0,
        repeats=1,
        rates=(4.0,),
        streams=(2,),
        shares=(0.0, 0.9),
        step_ms=(20,),
        long_prompt=256,
        quiet_s=0.5,
        sections=serve.SECTIONS,
        options=("--threads", "1", "--kv-cache-memory", "8MiB"),
    )
    saved: list[str] = []
    result = serve.run(settings, report=print, save=lambda so_far: saved.append(json.dumps(so_far)))
    assert saved[-1] == json.dumps(result)
    for name in ("rates", "streams", "shares"):
        for row in result[name]:
            assert row["refused"] == 0
            assert row["turns_ended"] > 0
    assert result["streams"][0]["most_open"] == 2
    none, most = result["shares"]
    assert most["cached_share"] > none["cached_share"]
    assert result["http"]["same_answers"] is True
    assert 0 < result["http"]["event_loop_cpu_share"] < 1
    (row,) = result["long"]
    assert row["time_to_first_token_s"] > 0
    assert row["before_ms"]["p50"] > 0
    assert serve_report.plot(result, tmp_path / "serve.png")
    assert not serve_report.plot({"http": result["http"]}, tmp_path / "none.png")
    assert (tmp_path / "serve.png").stat().st_size > 10_000
    assert [table.row_count for table in serve_report.tables(result)] == [1, 1, 2, 1, 1]
