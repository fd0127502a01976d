"""The options that commands share, and the small languages that their values are written in."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from octavo.attn_rule import ADAPTIVE, MODES
from octavo.config import ACTIVATIONS, HISTORIES, HISTORY_VALUES, WEIGHTS
from octavo.request import MAX_ATTN_TOPK

#: The backends by name, as ``octavo.kernels.api`` has them; that module imports torch.
ATTENTION = ("fused", "sdpa", "bmm", "loop", "reference")
KV_DTYPES = ("float32", "float16")

_LENGTH = re.compile(r"(\d{1,15})([kK]?)")


def parse_length(text: str | int) -> int:
    """A number of tokens: ``4096``, or ``4k`` for 4 * 1024. At least 1."""
    match = _LENGTH.fullmatch(str(text).strip())
    value = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if value < 1:
        raise typer.BadParameter(f"expected a number of tokens such as 4096 or 8k, got {text!r:.100}")
    return value


def check_size(text: str | None) -> str | None:
    """An option callback that accepts what the engine takes as a size, such as 2GiB."""
    if text is not None:
        from octavo.engine.resources import parse_size

        try:
            parse_size(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return text


def parse_layers(text: str | None) -> tuple[int, ...]:
    """Layers by number, such as ``0,1``."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise typer.BadParameter(f"expected layers by number such as 0,1, got {text!r:.100}")
    return tuple(int(part) for part in parts)


def parse_attn_topk(value: int | str) -> int | str:
    """A number of keys, or a name of ``ADAPTIVE``."""
    text = str(value)
    if text in ADAPTIVE:
        return text
    if not text.isdecimal() or int(text) > MAX_ATTN_TOPK:
        names = " or ".join(ADAPTIVE)
        raise typer.BadParameter(
            f"expected a number of keys from 0 to {MAX_ATTN_TOPK}, or {names}, got {text!r:.100}"
        )
    return int(text)


def check_block_size(value: int) -> int:
    """An option callback that accepts the block sizes of the engine."""
    if not 1 <= value <= 256 or value & (value - 1):
        raise typer.BadParameter(f"expected a power of two from 1 to 256, got {value}")
    return value


def one_of(*allowed: str) -> Any:
    """An option callback that accepts only these words."""

    def check(value: str) -> str:
        if value not in allowed:
            raise typer.BadParameter(f"expected one of {', '.join(allowed)}, got {value!r}")
        return value

    return check


SAMPLING = "Sampling"
ENGINE = "Engine"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A name from `octavo models`, a local folder or .gguf file, or a hub name."
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        callback=one_of(*ATTENTION),
        metavar="NAME",
        help=f"Attention backend: {', '.join(ATTENTION)}.",
        rich_help_panel=ENGINE,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        callback=one_of(*WEIGHTS),
        metavar="NAME",
        help=f"How weights are kept: {', '.join(WEIGHTS)}; auto keeps them as stored.",
        rich_help_panel=ENGINE,
    ),
]
ACTIVATIONS_HELP = (
    f"What is multiplied with the weights: {' or '.join(ACTIVATIONS)} (faster, other numbers; "
    "needs quantised weights)."
)
Activations = Annotated[
    str,
    typer.Option(
        callback=one_of(*ACTIVATIONS), metavar="NAME", help=ACTIVATIONS_HELP, rich_help_panel=ENGINE
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, help="Threads; by default the CPUs that this process may use.", rich_help_panel=ENGINE
    ),
]
KVDtype = Annotated[
    str,
    typer.Option(
        callback=one_of(*KV_DTYPES),
        metavar="NAME",
        help=f"How K and V are stored: {' or '.join(KV_DTYPES)}.",
        rich_help_panel=ENGINE,
    ),
]
KVCacheMemory = Annotated[
    str | None,
    typer.Option(
        callback=check_size,
        metavar="SIZE",
        help="Memory for K and V, such as 2GiB or 512MiB; by default a share of what is free.",
        rich_help_panel=ENGINE,
    ),
]
BlockSize = Annotated[
    int,
    typer.Option(
        callback=check_block_size,
        help="Tokens in a block of K and V: a power of two from 1 to 256.",
        rich_help_panel=ENGINE,
    ),
]
AttnTopk = Annotated[
    str,
    typer.Option(
        callback=parse_attn_topk,
        metavar="KEYS",
        help="Keys that attention keeps for each query and head, half of them the most recent; 0 keeps all, "
        "auto as many as matter, lean fewer of these.",
        rich_help_panel=ENGINE,
    ),
]
AttnTopkMode = Annotated[
    str,
    typer.Option(
        callback=one_of(*MODES),
        metavar="NAME",
        help="With --attn-topk: exact, or fast, which looks only into the spans that rank highest.",
        rich_help_panel=ENGINE,
    ),
]
AttnTopkTail = Annotated[
    bool | None,
    typer.Option(
        help="With --attn-topk: what is not kept enters by the means of its spans; default: with auto only.",
        rich_help_panel=ENGINE,
    ),
]
DenseLayers = Annotated[
    str | None,
    typer.Option(
        metavar="LAYERS",
        help="With --attn-topk: layers that keep all keys, such as 0,1.",
        rich_help_panel=ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        parser=parse_length,
        metavar="LENGTH",
        help="Longest context in tokens, such as 4096 or 8k (8 * 1024).",
        rich_help_panel=ENGINE,
    ),
]
HISTORY_HELP = (
    f"What old history is read as: {' or '.join(HISTORIES)} (a third of float32's memory, "
    "slightly other numbers)."
)
HISTORY_WINDOW_HELP = "With compact history: tokens that are always read as stored, such as 512 or 1k."
HISTORY_VALUES_HELP = f"With compact history: how values are held, {' or '.join(HISTORY_VALUES)}."
HISTORY_BUDGET_HELP = (
    "With compact history: what a conversation may have of blocks, such as 4k tokens or 256MiB; "
    "what is older is read as summaries, which is worse."
)
History = Annotated[
    str,
    typer.Option(callback=one_of(*HISTORIES), metavar="NAME", help=HISTORY_HELP, rich_help_panel=ENGINE),
]
HistoryWindow = Annotated[
    int,
    typer.Option(parser=parse_length, metavar="LENGTH", help=HISTORY_WINDOW_HELP, rich_help_panel=ENGINE),
]
HistoryValues = Annotated[
    str,
    typer.Option(
        callback=one_of(*HISTORY_VALUES), metavar="NAME", help=HISTORY_VALUES_HELP, rich_help_panel=ENGINE
    ),
]
HistoryBudget = Annotated[
    str | None, typer.Option(metavar="LENGTH|SIZE", help=HISTORY_BUDGET_HELP, rich_help_panel=ENGINE)
]
HISTORY_RECALL_HELP = (
    "With --history-budget: a summary that draws more than this share of a query's attention is read as the "
    "blocks that it stands for, such as 0.01."
)
HistoryRecall = Annotated[
    float | None, typer.Option(metavar="SHARE", help=HISTORY_RECALL_HELP, rich_help_panel=ENGINE)
]
Temperature = Annotated[
    float, typer.Option(help="0 always takes the most probable token.", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        help="Keep the most probable tokens that add up to this, in (0, 1].", rich_help_panel=SAMPLING
    ),
]
TopK = Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.", rich_help_panel=SAMPLING)]
MinP = Annotated[
    float,
    typer.Option(
        help="Drop tokens less probable than this share of the best one, in [0, 1].", rich_help_panel=SAMPLING
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Longest answer in tokens.", rich_help_panel=SAMPLING)]
Seed = Annotated[
    int | None,
    typer.Option(help="Makes the answer reproducible; drawn when left out.", rich_help_panel=SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="End the answer before this text; may be repeated.", rich_help_panel=SAMPLING
    ),
]
