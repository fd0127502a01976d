"""The offline API. Case ids are in the test names."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from octavo import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def llm(tiny) -> LLM:
    return LLM.from_engine(tiny(num_blocks=128, max_model_len=200).engine)


def texts(outputs) -> list[str]:
    return [o.outputs[0].text for o in outputs]


def test_text_ids_and_mixed_lists_give_the_same(llm):
    ids = llm.tokenizer.encode("hello")
    (text,) = llm.generate("hello", GREEDY, use_tqdm=False)
    (from_ids,) = llm.generate(ids, GREEDY, use_tqdm=False)
    mixed = llm.generate(["hello", ids, "other"], GREEDY, use_tqdm=False)
    assert text.prompt == "hello"
    assert text.prompt_token_ids == ids
    assert from_ids.prompt is None
    assert texts([text, from_ids]) == texts(mixed[:2])
    assert [o.prompt_token_ids for o in mixed] == [ids, ids, llm.tokenizer.encode("other")]
    assert all(o.finished and o.error is None for o in mixed)


def test_each_prompt_has_its_own_parameters(llm):
    outputs = llm.generate(
        ["a", "b"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5)], use_tqdm=False
    )
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="priority has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 2, 3])


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_params": []},
        {"sampling_params": [1, 2]},
        {"sampling_params": "greedy"},
        {"priority": ["high", "low"]},
        {"cache_salt": [1, 2]},
        {"cache_salt": []},
    ],
)
def test_what_cannot_go_with_the_prompts_is_refused_and_the_next_call_is_served(llm, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        llm.generate(["a", "b"], use_tqdm=False, **options)
    assert not llm.engine.has_unfinished()
    assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False)) == 2


def test_the_defaults_are_those_of_sampling_params(llm):
    (output,) = llm.generate("abc", use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize("bad", ["", [], [-1], [10**6], "x" * 300, "\ud800"])
def test_s01_s02_s15_t09_a_bad_prompt_alone_raises_and_among_others_costs_only_itself(llm, bad):
    if bad != []:  # a list without prompts is no prompt
        with pytest.raises(ValueError) as error:
            llm.generate(bad, GREEDY, use_tqdm=False)
        assert "\n" not in str(error.value)
    first, refused, last = llm.generate(["ab", bad, "cd"], GREEDY, use_tqdm=False)
    assert refused.error
    assert refused.finished
    assert refused.outputs == []
    assert texts([first, last]) == texts(llm.generate(["ab", "cd"], GREEDY, use_tqdm=False))
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("bad", [b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), [b"bytes"]])
def test_bytes_are_not_taken_for_token_ids(llm, bad):
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(bad, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="prompt"):
        list(llm.stream(bad, GREEDY))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"sampling_params": bad} for bad in [[], 5, "x", {"temperature": 0}, [None], [5], SamplingParams]),
        *({"priority": bad} for bad in [[], 1.5, "x", [None], ["x"], [[1]], True, float("nan")]),
        *({"cache_salt": bad} for bad in [[], 5, b"x", [None], [5]]),
    ],
    ids=str,
)
def test_what_goes_with_a_prompt_is_checked_before_it_is_queued(llm, wrong):
    (field,) = wrong
    with pytest.raises(ValueError, match=field):
        llm.generate(["hi"], use_tqdm=False, **wrong)
    with pytest.raises(ValueError, match=field):
        list(llm.stream("hi", **wrong))
    assert not llm.engine.has_unfinished()
    assert llm.generate("hi", GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize("bad", [None, 5, 1.5, ["a", 5], ["a", None], [b"bytes"]])
def test_what_is_no_prompt_is_refused_before_anything_runs(llm, bad):
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(bad, GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished()


def test_chat_takes_one_conversation_or_many(llm):
    one = [{"role": "user", "content": "hi"}]
    (single,) = llm.chat(one, GREEDY, use_tqdm=False)
    many = llm.chat([one, [*one, {"role": "assistant", "content": ""}]], GREEDY, use_tqdm=False)
    assert single.prompt_token_ids == llm.tokenizer.apply_chat_template(one)
    assert texts([single]) == texts(many[:1])
    assert len(many) == 2


@pytest.mark.parametrize("bad", [[], [{"role": "user"}], "hello", [["no mapping"]]])
def test_t06_bad_messages_are_refused_in_one_sentence(llm, bad):
    with pytest.raises(ValueError) as error:
        llm.chat(bad, GREEDY, use_tqdm=False)
    assert "\n" not in str(error.value)


def test_p04_the_next_turn_reuses_prompt_and_reply(llm):
    messages = [{"role": "user", "content": "tell me something long enough"}]
    (first,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), False)
    ids = first.prompt_token_ids + first.outputs[0].token_ids
    (second,) = llm.generate([[*ids, 70, 71]], GREEDY, use_tqdm=False)
    # everything but the last generated token, whose K and V were never needed
    assert second.num_cached_tokens == len(ids) - 1


def test_p03_a_prompt_is_shared_within_a_salt_only(llm):
    cached = [
        llm.generate("a prompt of some length", GREEDY, use_tqdm=False, cache_salt=salt)[0].num_cached_tokens
        for salt in ("a", "b", "a", "b", "")
    ]
    assert cached[:2] == [0, 0]
    assert min(cached[2:4]) > 0
    assert cached[4] == 0


def test_reset_prefix_cache_forgets(llm):
    llm.generate("a prompt of some length", GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    (output,) = llm.generate("a prompt of some length", GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_a_stream_yields_growing_outputs_and_ends_finished(llm):
    outputs = list(llm.stream("hello", GREEDY))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3, 4, 5]
    assert [o.finished for o in outputs] == [False] * 4 + [True]
    for before, after in itertools.pairwise(outputs):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
    (whole,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert outputs[-1].outputs == whole.outputs


def test_s12_closing_a_stream_early_aborts_its_request(llm):
    stream = llm.stream("hello", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert llm.engine.has_unfinished()
    stream.close()
    assert not llm.engine.has_unfinished()
    assert llm.engine.scheduler_stats.used_blocks == 0
    assert not llm._inbox


def test_streams_and_generate_may_be_open_at_once(llm):
    prompts = ["first", "second"]
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    a, b = (llm.stream(p, GREEDY) for p in prompts)
    seen_a = [next(a)]
    (between,) = llm.generate("first", GREEDY, use_tqdm=False)
    seen_b = list(b)
    seen_a += a
    assert [len(s) for s in (seen_a, seen_b)] == [5, 5]
    assert texts([seen_a[-1], seen_b[-1]]) == texts(expected)
    assert texts([between]) == texts(expected[:1])


def test_a_bad_prompt_raises_at_the_first_item_of_a_stream(llm):
    with pytest.raises(ValueError, match="empty"):
        next(llm.stream("", GREEDY))
    with pytest.raises(ValueError, match="empty"):
        next(llm.stream_chat([], GREEDY))


def test_h11_an_error_in_mid_stream_is_in_the_last_output(tiny):
    t = tiny()
    stream = LLM.from_engine(t.engine).stream("hello", GREEDY)
    next(stream)
    t.model.fail_on = set(range(300))
    last = next(stream)
    assert last.finished
    assert "cannot be computed" in last.error
    assert last.outputs[0].finish_reason == "error"
    assert next(stream, None) is None


def test_an_interrupted_generate_leaves_nothing_behind(llm, monkeypatch):
    steps = iter(range(3))

    def step(real=llm.engine.step):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    assert not llm.engine.has_unfinished()
    assert not llm._inbox


def test_the_progress_bar_shows_tokens_per_second_on_a_terminal(llm, capsys, monkeypatch):
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "10 tokens" in shown
    assert "tok/s" in shown


def test_metrics_are_a_copy(llm):
    before = llm.metrics()
    llm.generate("abc", GREEDY, use_tqdm=False)
    assert before.generation_tokens == 0
    assert llm.metrics().generation_tokens == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/no/such/file.gguf"}, ["/no/such/file.gguf"]),
        ({"num_threads": 0}, ["num_threads"]),
        ({"kv_dtype": "int3"}, ["kv_dtype", "int3"]),
    ],
)
def test_options_that_cannot_be_served_are_refused_in_one_sentence(options, words):
    with pytest.raises(ValueError) as error:
        LLM(**({"model": "/no/such/file.gguf"} | options))
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_importing_octavo_does_not_import_torch():
    code = "import sys, octavo; print('torch' in sys.modules, octavo.SamplingParams.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "SamplingParams"]


def test_an_unknown_name_is_an_attribute_error():
    import octavo

    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = octavo.nothing_like_this
