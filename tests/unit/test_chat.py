"""The chat's memory, and a streamed answer under Ctrl-C."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.answer import Answer, InterruptFlag
from octavo.cli.answer import receive as receive_under
from octavo.cli.chat import Conversation
from octavo.request import CompletionOutput, RequestOutput


def count_words(messages: list[dict[str, str]]) -> int:
    """A stand-in for the template: one token a word and two around every message."""
    return sum(len(message["content"].split()) + 2 for message in messages)


def output(text: str, tokens: int, finish: str | None = None, error: str | None = None) -> RequestOutput:
    choice = CompletionOutput(index=0, text=text, token_ids=list(range(tokens)), finish_reason=finish)
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        outputs=[choice],
        finished=finish is not None,
        error=error,
    )


def receive(stream: Iterator[RequestOutput], write: Callable[[str], None]) -> Answer:
    with InterruptFlag() as interrupt:
        return receive_under(stream, write, interrupt)


@given(
    limit=st.integers(8, 120),
    system=st.none() | st.just("be brief"),
    turns=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), max_size=30),
    room=st.integers(1, 200),
)
def test_what_is_kept_fits_and_is_the_newest(limit, system, turns, room):
    chat = Conversation(count_words, limit, system)
    said: list[str] = []
    for number, (question, answer) in enumerate(turns):
        text = " ".join([f"q{number}"] * question)
        before = list(chat.turns)
        try:
            dropped = chat.ask(text, room)
        except ValueError:
            assert chat.turns == before
            assert count_words(chat.messages[: len(chat.messages) - len(before)]) + question + 2 >= limit
            continue
        said.append(text)
        assert count_words(chat.messages) < limit
        assert chat.messages[-1] == {"role": "user", "content": text}
        assert system is None or chat.messages[0] == {"role": "system", "content": system}
        kept = [turn["content"] for turn in chat.turns]
        assert kept == said[len(said) - len(kept) :]
        assert [turn["role"] for turn in chat.turns][::2] == ["user"] * (len(kept) // 2 + 1)
        assert len(before) + 1 - 2 * dropped == len(chat.turns)
        chat.answered(" ".join(["a"] * answer))
        said.append(" ".join(["a"] * answer))


def test_a_message_that_never_fits_names_both_numbers():
    chat = Conversation(count_words, 10)
    with pytest.raises(ValueError, match=r"take 52 tokens and the context holds 10"):
        chat.ask("word " * 50, 4)


def test_pieces_add_up_to_the_text():
    pieces: list[str] = []
    steps = [output("", 1), output("Hel", 2), output("Hel", 3), output("Hello", 4, "stop")]
    answer = receive(iter(steps), pieces.append)
    assert "".join(pieces) == answer.text == "Hello"
    assert answer.num_tokens == 4
    assert not answer.interrupted
    assert answer.first_token_s is not None


def test_interrupt_stops_the_answer_closes_the_stream_and_keeps_the_text():
    closed: list[bool] = []

    def endless() -> Iterator[RequestOutput]:
        try:
            for n in range(1, 1000):
                if n == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                yield output("x" * n, n)
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGINT)
    answer = receive(endless(), lambda piece: None)
    assert answer.interrupted
    assert answer.text == "xxx"
    assert closed == [True]
    assert signal.getsignal(signal.SIGINT) is before
    assert answer.summary().endswith("stopped")


def test_a_second_interrupt_breaks_through():
    def stuck() -> Iterator[RequestOutput]:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        yield output("x", 1)

    with pytest.raises(KeyboardInterrupt):
        receive(stuck(), lambda piece: None)


def test_a_refused_request_is_an_error_in_the_engine_s_words():
    with pytest.raises(ValueError, match="too long"):
        receive(iter([output("", 0, "error", error="the prompt is too long")]), lambda piece: None)
