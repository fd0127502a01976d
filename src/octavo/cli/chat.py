"""The interactive chat: turns come from a terminal or a pipe, answers stream back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from octavo.cli.answer import receive
from octavo.cli.errors import CommandError, plainly
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

HELP = """\
/new           forget the conversation and start again
/system TEXT   set the system prompt and start again; without TEXT, show it
/help          this list
/exit          leave (so does the end of input, Ctrl-D)
Ctrl-C stops an answer and keeps what it has said so far."""

Message = dict[str, str]


class Conversation:
    """The messages so far, and what to leave out when they no longer fit in the context.

    ``count`` gives the length in tokens of messages under the chat template; ``limit`` is the context.
    """

    def __init__(self, count: Callable[[list[Message]], int], limit: int, system: str | None = None) -> None:
        self._count = count
        self.limit = limit
        self.system = system
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return before + self.turns

    def restart(self) -> None:
        self.turns.clear()

    def ask(self, text: str, room: int) -> int:
        """Add the user's message; drop the oldest turns until it and ``room`` tokens of answer fit.

        Returns how many turns (a question and its answer) were dropped. Raises ValueError, with the
        conversation as it was, when the message does not fit even alone.
        """
        before = list(self.turns)
        self.turns.append({"role": "user", "content": text})
        room = max(1, min(room, self.limit // 4))
        dropped = 0
        try:
            while (length := self._count(self.messages)) + room > self.limit:
                if len(self.turns) == 1:
                    if length < self.limit:
                        break  # a shorter answer is still an answer
                    raise ValueError(
                        f"this message and the system prompt take {length} tokens and the context holds "
                        f"{self.limit}: shorten it, or start with a larger --max-model-len"
                    )
                del self.turns[:2]
                dropped += 1
        except ValueError:
            self.turns = before
            raise
        return dropped

    def answered(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Remove the last question, which got no answer."""
        self.turns.pop()


def chat(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """Run the chat until the end of input or /exit. Piped input is one turn a line."""
    console = Console(highlight=False, soft_wrap=True)
    limit = llm.max_model_len
    conversation = Conversation(
        lambda messages: len(llm.tokenizer.apply_chat_template(messages)), limit, system
    )
    interactive = sys.stdin.isatty()
    if interactive:
        console.print(f"{llm.model_name} · context {limit:,} tokens · /help lists the commands", style="dim")
    for line in _typed_lines(console) if interactive else _piped_lines():
        if line.startswith("/"):
            if _command(line, conversation, console) == "exit":
                return
        elif line:
            _turn(llm, params, conversation, line, console)


def _typed_lines(console: Console) -> Iterator[str]:
    import readline  # noqa: F401  (importing it gives input() its line editing)

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D leaves", style="dim")


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()


def _command(line: str, conversation: Conversation, console: Console) -> str | None:
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/exit" | "/quit" | "/bye":
            return "exit"
        case "/new":
            conversation.restart()
            console.print("New conversation.", style="dim")
        case "/system" if rest:
            conversation.system = rest
            conversation.restart()
            console.print("System prompt set, new conversation.", style="dim")
        case "/system":
            console.print(conversation.system or "No system prompt is set.", style="dim", markup=False)
        case "/help":
            console.print(HELP, style="dim", markup=False)
        case _:
            console.print(f"Unknown command {name}: /help lists them.", style="yellow", markup=False)
    return None


def _turn(llm: LLM, params: SamplingParams, conversation: Conversation, text: str, console: Console) -> None:
    def write(piece: str) -> None:
        console.print(piece, end="", markup=False)

    try:
        with plainly():
            dropped = conversation.ask(text, params.max_tokens or conversation.limit)
    except CommandError as error:
        console.print(f"{error}", style="yellow", markup=False)
        return
    if dropped:
        turns = "turn was" if dropped == 1 else f"{dropped} turns were"
        console.print(f"The context is full: the oldest {turns} dropped; /new starts again.", style="yellow")
    try:
        with plainly():
            answer = receive(llm.stream_chat(conversation.messages, params), write)
    except CommandError as error:
        conversation.take_back()
        console.print(f"{error}", style="yellow", markup=False)
        return
    console.print()
    if answer.text:
        conversation.answered(answer.text)
    else:
        conversation.take_back()
    console.print(answer.summary(), style="dim", markup=False)
    if answer.output and answer.output.outputs[0].finish_reason == "length":
        console.print(
            "The answer was cut at its longest length (--max-tokens, or the context's end).", style="dim"
        )
