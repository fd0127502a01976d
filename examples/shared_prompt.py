"""Sixteen visitors talk to one assistant at once: one long system prompt, sixteen different questions.

The system prompt's K and V are computed once and shared, block by block, by all the chats. The table at
the end says what that took, and what one layer's attention costs each backend in operators.

    python examples/shared_prompt.py [--max-tokens 48] [--chats 16] [--attention fused]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from octavo import LLM, SamplingParams
from octavo.bench.attention import BACKENDS, Case, count_operators, prepare
from octavo.kernels.native import ThreadPool
from octavo.request import RequestOutput

SYSTEM = """\
You are the information desk of the Whaling Museum on Harbour Street. You answer visitors in two or three
short, friendly sentences. You use only the facts below, and when they do not hold the answer you say so
and point to the desk at the entrance.

Opening hours. The museum is open from Tuesday to Sunday, from ten in the morning until six in the
evening. On Thursdays it stays open until nine. It is closed on Mondays, on the first of January and on
the last week of November, when the ropes of the great ship are renewed. The last visitors are let in one
hour before closing.

Tickets. A ticket for adults costs twelve crowns, for students and pensioners eight crowns. Children below
the age of twelve enter free when an adult is with them. A family ticket for two adults and up to four
children costs twenty-six crowns. On the first Thursday of every month everybody enters free after six.
Tickets are sold at the entrance; groups of more than ten people write a week ahead and pay nine crowns
for each person.

The collection. On the ground floor stands the Pequod, a model of a three-masted whaling ship in half of
its true size, which visitors may board. Beside it hangs the skeleton of a sperm whale of seventeen metres
that came ashore in 1871. On the first floor are the harpoons, the log books and the carved teeth that
sailors made on long voyages. The second floor shows the lives of whales today: their songs, their
journeys and how they are counted from the air. The reading room under the roof holds four thousand books,
among them a first edition of Moby-Dick.

Getting here. Trams two and five stop at the museum, at the stop called Old Harbour. There are places for
bicycles in the yard. There is no car park; the nearest one is below the fish market, five minutes away on
foot.

Visiting. Every floor can be reached with the lift beside the cloakroom, and wheelchairs are lent at the
entrance. Large bags go into the lockers, which take a coin of one crown and give it back. Photographs are
welcome without flash. Dogs wait in the yard, but guide dogs come in. The café on the ground floor serves
soup until three o'clock and cake until closing. Guided tours begin at eleven and at three, last fifty
minutes and cost four crowns.
"""

QUESTIONS = (
    "When do you open on Sunday?",
    "How much is a ticket for a student?",
    "Can I bring my dog?",
    "Which tram goes to the museum?",
    "Is there a real whale to see?",
    "Where can I park my car?",
    "Do my two children, seven and nine, need a ticket?",
    "When do the guided tours start?",
    "Can I take photographs?",
    "Is the museum open on Monday?",
    "Can I eat something at the museum?",
    "I use a wheelchair. Can I see all the floors?",
    "What is in the reading room?",
    "We are a group of fifteen. What do we pay?",
    "When can I come in for free?",
    "May I go on board of the ship?",
)
SHOWN = 4


@dataclass(slots=True)
class Chat:
    """One visitor, and what has come back so far."""

    question: str
    output: RequestOutput | None = None

    @property
    def text(self) -> str:
        return self.output.outputs[0].text if self.output and self.output.outputs else ""

    @property
    def done(self) -> bool:
        return self.output is not None and self.output.finished


def main() -> None:
    args = _arguments()
    console = Console()
    console.print(f"Loading {args.model} ...", style="dim")
    llm = LLM(args.model, attention=args.attention, num_threads=args.threads, kv_cache_memory="1GiB", seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    chats = [Chat(question) for question in QUESTIONS[: args.chats]]
    start = time.monotonic()
    most_blocks = serve(llm, params, chats, console)
    took = time.monotonic() - start
    table = served_table(llm, chats, took, most_blocks)
    table.add_section()
    add_launches(table)
    console.print(table)


def serve(llm: LLM, params: SamplingParams, chats: list[Chat], console: Console) -> int:
    """Run all chats to their end, showing them; returns the most blocks that were in use at once."""
    engine = llm.engine
    by_id = {}
    for chat in chats:
        ids = llm.tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": chat.question}]
        )
        by_id[str(engine.add_request(ids, params))] = chat
    progress = Progress(
        TextColumn("serving"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("chats"),
        TimeElapsedColumn(),
        console=console,
    )
    task = progress.add_task("serving", total=len(chats))
    most_blocks = 0
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        while engine.has_unfinished():
            for output in engine.step():
                chat = by_id[output.request_id]
                chat.output = output
                if chat.done and not console.is_terminal:
                    console.print(
                        f"{sum(c.done for c in chats):>3}/{len(chats)}  {chat.question}", markup=False
                    )
            most_blocks = max(most_blocks, engine.scheduler_stats.used_blocks)
            progress.update(task, completed=sum(chat.done for chat in chats))
            if console.is_terminal:
                live.update(Group(answers(chats, height=11), progress.get_renderable()))
    console.print(answers(chats))
    console.print("A small model makes things up: look at the speed, not at the facts.", style="dim")
    return most_blocks


def answers(chats: list[Chat], height: int | None = None) -> Columns:
    """The first few chats side by side, or one under another where the window is narrow."""
    panels = [
        Panel(
            f"[bold]{chat.question}[/]\n{escape(chat.text)}",
            height=height,
            border_style="green" if chat.done else "dim",
        )
        for chat in chats[:SHOWN]
    ]
    return Columns(panels, equal=True, expand=True, width=36)


def served_table(llm: LLM, chats: list[Chat], took: float, most_blocks: int) -> Table:
    """Speed, waiting time and what the prefix cache saved."""
    outputs = [chat.output for chat in chats if chat.output is not None]
    new_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    waits = sorted(o.metrics.first_token_time - o.metrics.arrival_time for o in outputs)
    block_size = llm.engine.config.cache.block_size
    alone = sum(-(-(len(o.prompt_token_ids) + len(o.outputs[0].token_ids)) // block_size) for o in outputs)
    table = Table(title=f"{len(chats)} chats at once, one system prompt", show_header=False, min_width=60)
    table.add_row("tokens generated", f"{new_tokens} in {took:.1f} s: {new_tokens / took:.1f} tokens/s")
    table.add_row(
        "time to first token", f"mean {statistics.fmean(waits):.2f} s, p95 {_percentile(waits, 0.95):.2f} s"
    )
    table.add_row(
        "prefix cache", f"{cached} of {prompt_tokens} prompt tokens: {cached / prompt_tokens:.1%} hit"
    )
    table.add_row(
        "blocks used", f"{most_blocks} blocks of {block_size} tokens ({alone} if nothing were shared)"
    )
    return table


def add_launches(table: Table) -> None:
    """Operators that one layer's attention launches in a decode step of 8 sequences."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports its own comings and goings
    step = prepare(Case("decode", batch=8, queries=1, keys=512), ThreadPool(1), num_layers=1)
    for backend in BACKENDS:
        count = count_operators(partial(step.attend, backend, 0))
        launches = f"{count['attention']} for products and softmax, {count['other']} for the rest"
        table.add_row(f"launches per layer, {backend}", launches)


def _percentile(ordered: list[float], share: float) -> float:
    """The least value that at least ``share`` of the ordered values do not exceed."""
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--chats", type=int, choices=range(1, len(QUESTIONS) + 1), default=16, metavar="1..16"
    )
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--attention", choices=("fused", "sdpa", "bmm", "loop"), default="fused")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
