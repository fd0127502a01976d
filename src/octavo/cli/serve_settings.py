"""The settings of ``octavo serve``: one table, read by the command line, the environment and the file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from octavo.attn_rule import MODES
from octavo.cli import options as opt
from octavo.config import ACTIVATIONS, HISTORIES, HISTORY_VALUES, WEIGHTS

ENV_PREFIX = "OCTAVO_"

#: The groups of ``--help``, in the order of :data:`SETTINGS`.
SERVER, LIMITS, LOGGING = "Server", "Limits", "Logging"
MODEL, MEMORY, PREFIXES = "Model", "KV cache", "Prefix cache"
STEPS, TOPK, HISTORY = "Scheduling", "Top-k attention", "Compact history"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: ``--name``, the variable ``OCTAVO_NAME`` and the key ``name`` of a configuration file.

    ``check`` turns a value into what is kept, or raises ``typer.BadParameter``.
    """

    name: str
    kind: Any
    default: Any
    help: str
    group: str
    metavar: str | None = None
    check: Callable[[Any], Any] | None = None

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def parameter(self) -> inspect.Parameter:
        """The setting as typer reads it from a function's signature."""
        option = typer.Option(
            "--" + self.name.replace("_", "-")
            if self.kind not in (bool, bool | None)
            else "--{0}/--no-{0}".format(self.name.replace("_", "-")),
            envvar=self.variable,
            help=self.help,
            metavar=self.metavar,
            rich_help_panel=self.group,
            callback=self.check,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[self.kind, option],
        )


def _length(value: str | None) -> int | None:
    return None if value is None else opt.parse_length(value)


def _bytes(value: str) -> int:
    from octavo.engine.resources import parse_size

    try:
        return parse_size(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _at_least(low: float) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is not None and not value >= low:
            raise typer.BadParameter(f"expected {low:g} or more, got {value}")
        return value

    return check


def _port(value: int) -> int:
    if not 0 <= value <= 65535:
        raise typer.BadParameter(f"expected a port from 0 (any that is free) to 65535, got {value}")
    return value


def _keys(values: list[str] | None) -> list[str] | None:
    if values and not all(value.strip() for value in values):
        raise typer.BadParameter("an API key must not be empty")
    return values


ONE = _at_least(1)
NOT_NEGATIVE = _at_least(0)

SETTINGS = (
    Setting("host", str, "127.0.0.1", "Address to listen on; 0.0.0.0 is every one.", SERVER),
    Setting("port", int, 8000, "Port to listen on; 0 takes any that is free.", SERVER, check=_port),
    Setting(
        "api_key",
        list[str] | None,
        None,
        "A key that clients must send; may be repeated (in the environment: separated by spaces).",
        SERVER,
        "KEY",
        _keys,
    ),
    Setting(
        "shared_cache",
        bool,
        False,
        "Let callers with different keys share cached prefixes. Without it they share nothing.",
        SERVER,
    ),
    Setting(
        "served_model_name",
        list[str] | None,
        None,
        "A name under which clients ask for the model; may be repeated. By default the model's own.",
        SERVER,
        "NAME",
    ),
    Setting(
        "cors_origin",
        list[str] | None,
        None,
        "A web page's origin that may call this server from a browser; may be repeated.",
        SERVER,
        "URL",
    ),
    Setting(
        "drain_timeout",
        float,
        30.0,
        "Seconds that running requests get to end after SIGTERM.",
        SERVER,
        check=NOT_NEGATIVE,
    ),
    Setting("max_queue", int, 256, "Sequences that may wait; more are told 429.", LIMITS, check=NOT_NEGATIVE),
    Setting("max_connections", int, 1024, "Connections at once; more are told 503.", LIMITS, check=ONE),
    Setting("max_body", str, "8MiB", "Largest body of a request.", LIMITS, "SIZE", _bytes),
    Setting(
        "body_timeout", float, 30.0, "Seconds in which a body must arrive.", LIMITS, check=_at_least(0.1)
    ),
    Setting("request_timeout", float, 3600.0, "Seconds a request may take.", LIMITS, check=_at_least(0.1)),
    Setting("keep_alive", float, 30.0, "Seconds an idle connection is kept.", LIMITS, check=ONE),
    Setting(
        "weights",
        str,
        "auto",
        f"How weights are kept: {', '.join(WEIGHTS)}; auto keeps them as stored.",
        MODEL,
        "NAME",
        opt.one_of(*WEIGHTS),
    ),
    Setting(
        "activations",
        str,
        "float32",
        opt.ACTIVATIONS_HELP,
        MODEL,
        "NAME",
        opt.one_of(*ACTIVATIONS),
    ),
    Setting(
        "attention",
        str,
        "fused",
        f"Attention backend: {', '.join(opt.ATTENTION)}.",
        MODEL,
        "NAME",
        opt.one_of(*opt.ATTENTION),
    ),
    Setting(
        "threads",
        int | None,
        None,
        "Threads; by default the CPUs this process may use.",
        MODEL,
        check=ONE,
    ),
    Setting("seed", int | None, None, "Makes the seeds of requests without one reproducible.", MODEL),
    Setting(
        "kv_cache_memory",
        str | None,
        None,
        "Memory for K and V, such as 2GiB; by default a share of what is free.",
        MEMORY,
        "SIZE",
        opt.check_size,
    ),
    Setting(
        "kv_dtype",
        str,
        "float32",
        f"How K and V are stored: {' or '.join(opt.KV_DTYPES)}.",
        MEMORY,
        "NAME",
        opt.one_of(*opt.KV_DTYPES),
    ),
    Setting("block_size", int, 16, "Tokens in a KV block.", MEMORY, check=opt.check_block_size),
    Setting(
        "max_model_len",
        str | None,
        None,
        "Longest prompt and answer together, such as 8k (8 * 1024 tokens).",
        MEMORY,
        "LENGTH",
        _length,
    ),
    Setting("history", str, "exact", opt.HISTORY_HELP, HISTORY, "NAME", opt.one_of(*HISTORIES)),
    Setting("history_window", str, "512", opt.HISTORY_WINDOW_HELP, HISTORY, "LENGTH", _length),
    Setting(
        "history_values",
        str,
        "int8",
        opt.HISTORY_VALUES_HELP,
        HISTORY,
        "NAME",
        opt.one_of(*HISTORY_VALUES),
    ),
    Setting(
        "history_tokens",
        str | None,
        None,
        "With compact history: the length of chat that memory is divided for; by default the longest.",
        HISTORY,
        "LENGTH",
        _length,
    ),
    Setting("history_budget", str | None, None, opt.HISTORY_BUDGET_HELP, HISTORY, "LENGTH|SIZE"),
    Setting("history_recall", float | None, None, opt.HISTORY_RECALL_HELP, HISTORY, "SHARE"),
    Setting("prefix_caching", bool, True, "Reuse the K and V of prompts that start alike.", PREFIXES),
    Setting(
        "cache_dir",
        str | None,
        None,
        "A folder in which sealed blocks are kept, so that a restarted server goes on where it was.",
        PREFIXES,
        "DIR",
    ),
    Setting(
        "cache_disk",
        str,
        "20GiB",
        "What --cache-dir may take on disk, such as 20GiB.",
        PREFIXES,
        "SIZE",
        opt.check_size,
    ),
    Setting("max_num_seqs", int, 64, "Sequences that run at the same time.", STEPS, check=ONE),
    Setting(
        "max_num_batched_tokens",
        str,
        "512",
        "Tokens that one step computes at most: more is a faster prefill, less a steadier stream.",
        STEPS,
        "LENGTH",
        _length,
    ),
    Setting(
        "step_ms",
        int,
        200,
        "Milliseconds that a step beside answers should take: prompts are cut to it; 0 is no aim.",
        STEPS,
        "MS",
        NOT_NEGATIVE,
    ),
    Setting(
        "attn_topk",
        str,
        "0",
        "Keys that attention keeps for each query and head, unless a request says otherwise; 0 keeps all, "
        "auto as many as matter.",
        TOPK,
        "KEYS",
        opt.parse_attn_topk,
    ),
    Setting(
        "attn_topk_mode",
        str,
        "exact",
        "How keys are found unless a request says otherwise: exact, or fast, which must be set here.",
        TOPK,
        "NAME",
        opt.one_of(*MODES),
    ),
    Setting(
        "attn_topk_tail",
        bool | None,
        None,
        "What is not kept enters by the means of its spans, unless a request says otherwise; must be set "
        "here, and is with --attn-topk auto.",
        TOPK,
    ),
    Setting(
        "topk_planes",
        bool,
        False,
        "Let requests ask for attn_topk, though it is 0 here; takes up to 0.3 of the memory of K and V.",
        TOPK,
    ),
    Setting(
        "dense_layers",
        str | None,
        None,
        "Layers that keep all keys under attn_topk, such as 0,1.",
        TOPK,
        "LAYERS",
        opt.parse_layers,
    ),
    Setting(
        "log_format",
        str,
        "console",
        "console or json.",
        LOGGING,
        "NAME",
        opt.one_of("console", "json"),
    ),
    Setting(
        "log_level",
        str,
        "info",
        "debug, info (a line for every request), warning or error.",
        LOGGING,
        "NAME",
        opt.one_of("debug", "info", "warning", "error"),
    ),
    Setting("log_prompts", bool, False, "Log what people write. Off, no prompt is ever in a log.", LOGGING),
)

#: What a configuration file may set.
NAMES = ("model", *(setting.name for setting in SETTINGS))
