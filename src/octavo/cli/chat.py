"""The interactive chat: turns come from a terminal or a pipe, answers stream back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from octavo.cli.answer import InterruptFlag, receive
from octavo.cli.errors import CommandError, plainly
from octavo.cli.explain import explain
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


def chat(llm: LLM, params: SamplingParams, system: str | None, plot: Path | None = None) -> None:
    """Run the chat until the end of input or /exit. Piped input is one turn a line.

    ``plot`` is written anew after each answer that ``params.attn_explain`` explains.

    Only the answers go to a stdout that is no terminal; what is said about them goes to stderr there.
    """
    console = Console(
        stderr=not sys.stdout.isatty(), highlight=False, markup=False, emoji=False, soft_wrap=True
    )
    conversation = Conversation(
        lambda messages: len(llm.tokenizer.apply_chat_template(messages)), llm.max_model_len, system
    )
    if sys.stdin.isatty():
        greeting = f"{llm.model_name} · context {llm.max_model_len:,} tokens · /help lists the commands"
        console.print(greeting, style="dim")
        lines = _typed_lines(console)
    else:
        lines = _piped_lines()
    for line in lines:
        if line.startswith("/"):
            if _command(line, conversation, console) == "exit":
                return
        elif line:
            # Around the whole turn: a Ctrl-C just after the answer must not end the program either.
            with InterruptFlag() as interrupt:
                _Turn(llm, params, conversation, console, interrupt, plot).take(line)


def _typed_lines(console: Console) -> Iterator[str]:
    with contextlib.suppress(ImportError):
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
            console.print(conversation.system or "No system prompt is set.", style="dim")
        case "/help":
            console.print(HELP, style="dim")
        case _:
            console.print(f"Unknown command {name}: /help lists them.", style="yellow")
    return None


@dataclass(frozen=True, slots=True)
class _Turn:
    """One question and its answer."""

    llm: LLM
    params: SamplingParams
    conversation: Conversation
    console: Console
    interrupt: InterruptFlag
    plot: Path | None

    def take(self, text: str) -> None:
        """Ask, stream, remember. What cannot be served is said in one line, and the chat goes on."""
        try:
            with plainly():
                dropped = self.conversation.ask(text, self.params.max_tokens or self.conversation.limit)
        except CommandError as error:
            self.console.print(str(error), style="yellow")
            return
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self.console.print(
                f"The context is full: the oldest {turns} dropped; /new starts again.", style="yellow"
            )
        try:
            with plainly():
                stream = self.llm.stream_chat(self.conversation.messages, self.params)
                answer = receive(stream, _write, self.interrupt)
        except CommandError as error:
            self.conversation.take_back()
            self.console.print(str(error), style="yellow")
            return
        print(flush=True)
        if answer.text:
            self.conversation.answered(answer.text)
        else:
            self.conversation.take_back()
        self.console.print(answer.summary(), style="dim")
        if self.params.attn_explain:
            explain(answer.output, self.console, self.plot)
        if answer.output and answer.output.outputs[0].finish_reason == "length":
            limit = "--max-tokens, or the end of the context"
            self.console.print(f"The answer was cut at its longest ({limit}).", style="dim")


def _write(piece: str) -> None:
    print(piece, end="", flush=True)
