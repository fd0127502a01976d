"""``octavo serve``: the settings of the server, from wherever they come, and its start."""

from __future__ import annotations

import inspect
import json
import os
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.attn_rule import MODES
from octavo.cli import options as opt
from octavo.cli.errors import USAGE, CommandError, plainly
from octavo.config import ACTIVATIONS, HISTORIES, HISTORY_VALUES, WEIGHTS
from octavo.weights.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from octavo.engine.encoder import EncoderEngine
    from octavo.engine.engine import Engine
    from octavo.serving.server import ServerOptions

ENV_PREFIX = "OCTAVO_"

SERVER, LIMITS, LOGGING, CONFIG = "Server", "Limits", "Logging", "Configuration"


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
        "attention",
        str,
        "fused",
        f"Attention backend: {', '.join(opt.ATTENTION)}.",
        opt.ENGINE,
        "NAME",
        opt.one_of(*opt.ATTENTION),
    ),
    Setting(
        "weights",
        str,
        "auto",
        f"How weights are kept: {', '.join(WEIGHTS)}; auto keeps them as stored.",
        opt.ENGINE,
        "NAME",
        opt.one_of(*WEIGHTS),
    ),
    Setting(
        "activations",
        str,
        "float32",
        opt.ACTIVATIONS_HELP,
        opt.ENGINE,
        "NAME",
        opt.one_of(*ACTIVATIONS),
    ),
    Setting(
        "kv_cache_memory",
        str | None,
        None,
        "Memory for K and V, such as 2GiB; by default a share of what is free.",
        opt.ENGINE,
        "SIZE",
        opt.check_size,
    ),
    Setting(
        "kv_dtype",
        str,
        "float32",
        f"How K and V are stored: {' or '.join(opt.KV_DTYPES)}.",
        opt.ENGINE,
        "NAME",
        opt.one_of(*opt.KV_DTYPES),
    ),
    Setting("block_size", int, 16, "Tokens in a KV block.", opt.ENGINE, check=opt.check_block_size),
    Setting(
        "max_model_len",
        str | None,
        None,
        "Longest prompt and answer together, such as 8k (8 * 1024 tokens).",
        opt.ENGINE,
        "LENGTH",
        _length,
    ),
    Setting("max_num_seqs", int, 64, "Sequences that run at the same time.", opt.ENGINE, check=ONE),
    Setting(
        "max_num_batched_tokens",
        str,
        "512",
        "Tokens that one step computes at most: more is a faster prefill, less a steadier stream.",
        opt.ENGINE,
        "LENGTH",
        _length,
    ),
    Setting(
        "attn_topk",
        str,
        "0",
        "Keys that attention keeps for each query and head, unless a request says otherwise; 0 keeps all, "
        "auto as many as matter.",
        opt.ENGINE,
        "KEYS",
        opt.parse_attn_topk,
    ),
    Setting(
        "attn_topk_mode",
        str,
        "exact",
        "How keys are found unless a request says otherwise: exact, or fast, which must be set here.",
        opt.ENGINE,
        "NAME",
        opt.one_of(*MODES),
    ),
    Setting(
        "attn_topk_tail",
        bool | None,
        None,
        "What is not kept enters by the means of its spans, unless a request says otherwise; must be set "
        "here, and is with --attn-topk auto.",
        opt.ENGINE,
    ),
    Setting(
        "topk_planes",
        bool,
        False,
        "Let requests ask for attn_topk, though it is 0 here; takes up to 0.3 of the memory of K and V.",
        opt.ENGINE,
    ),
    Setting(
        "dense_layers",
        str | None,
        None,
        "Layers that keep all keys under attn_topk, such as 0,1.",
        opt.ENGINE,
        "LAYERS",
        opt.parse_layers,
    ),
    Setting(
        "step_ms",
        int,
        200,
        "Milliseconds that a step beside answers should take: prompts are cut to it; 0 is no aim.",
        opt.ENGINE,
        "MS",
        NOT_NEGATIVE,
    ),
    Setting("prefix_caching", bool, True, "Reuse the K and V of prompts that start alike.", opt.ENGINE),
    Setting("history", str, "exact", opt.HISTORY_HELP, opt.ENGINE, "NAME", opt.one_of(*HISTORIES)),
    Setting("history_window", str, "512", opt.HISTORY_WINDOW_HELP, opt.ENGINE, "LENGTH", _length),
    Setting(
        "history_values",
        str,
        "int8",
        opt.HISTORY_VALUES_HELP,
        opt.ENGINE,
        "NAME",
        opt.one_of(*HISTORY_VALUES),
    ),
    Setting(
        "history_tokens",
        str | None,
        None,
        "With compact history: the length of chat that memory is divided for; by default the longest.",
        opt.ENGINE,
        "LENGTH",
        _length,
    ),
    Setting(
        "cache_dir",
        str | None,
        None,
        "A folder in which sealed blocks are kept, so that a restarted server goes on where it was.",
        opt.ENGINE,
        "DIR",
    ),
    Setting(
        "cache_disk",
        str,
        "20GiB",
        "What --cache-dir may take on disk, such as 20GiB.",
        opt.ENGINE,
        "SIZE",
        opt.check_size,
    ),
    Setting(
        "threads",
        int | None,
        None,
        "Threads; by default the CPUs this process may use.",
        opt.ENGINE,
        check=ONE,
    ),
    Setting("seed", int | None, None, "Makes the seeds of requests without one reproducible.", opt.ENGINE),
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

_NAMES = ("model", *(setting.name for setting in SETTINGS))


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """An eager callback: what the file says becomes the default of every other setting."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", USAGE) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} is not valid TOML: {error}", USAGE) from error
    found = {name.replace("-", "_"): value for name, value in values.items()}
    for name, value in found.items():
        if name not in _NAMES:
            raise CommandError(
                f"{path}: {name!r:.60} is not a setting; these are: {', '.join(_NAMES)}", USAGE
            )
        if isinstance(value, dict):
            raise CommandError(f"{path}: {name} must be a value, not a table", USAGE)
    ctx.default_map = found
    return path


def _signature() -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    model = typer.Argument(
        metavar="MODEL",
        envvar=ENV_PREFIX + "MODEL",
        help="A name from `octavo models`, a local folder or .gguf file, or a hub name.",
    )
    config = typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_read_config,
        envvar=ENV_PREFIX + "CONFIG",
        help="A TOML file with settings by name, such as port = 8000.",
        rich_help_panel=CONFIG,
    )
    show = typer.Option(
        "--print-config",
        help="Show every setting, and from where it comes; then exit.",
        rich_help_panel=CONFIG,
    )
    return inspect.Signature(
        [
            inspect.Parameter("ctx", keyword, annotation=typer.Context),
            inspect.Parameter("model", keyword, default=DEFAULT_MODEL, annotation=Annotated[str, model]),
            inspect.Parameter("config", keyword, default=None, annotation=Annotated[Path | None, config]),
            inspect.Parameter("print_config", keyword, default=False, annotation=Annotated[bool, show]),
            *(setting.parameter() for setting in SETTINGS),
        ]
    )


def serve(ctx: typer.Context, **values: Any) -> None:
    """Serve a model over HTTP, to any client of OpenAI's API and to a browser; an encoder gives embeddings.

    A setting is taken from the command line, else from the environment (OCTAVO_...), else from the --config
    file, else it has its default. SIGTERM or Ctrl-C lets running requests end; a second Ctrl-C does not.
    """
    if values["print_config"]:
        _print_config(ctx, values)
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with plainly():
        try:
            from octavo.serving import logs
            from octavo.serving.server import listen, run
        except ImportError as error:
            raise CommandError(f"{error.name} is missing: pip install 'octavo[serve]'") from error
        logs.configure(as_json=values["log_format"] == "json", level=values["log_level"])
        # First of all: loading a model for an address that is taken would be for nothing.
        listener = listen(values["host"], values["port"])
        start = time.perf_counter()
        engine = _load(values)
        options = _options(values)
        _announce(engine, options, time.perf_counter() - start)
        _announce_address(values, listener.getsockname()[1])
    raise typer.Exit(run(engine, options, listener))


# typer reads the options from the signature; functions take it as any attribute.
serve.__signature__ = _signature()  # type: ignore[attr-defined]  # typer reads it
serve.__annotations__ = {p.name: p.annotation for p in _signature().parameters.values()}


def _load(values: dict[str, Any]) -> Engine | EncoderEngine:
    from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
    from octavo.engine.build import build

    return build(
        EngineConfig(
            model=values["model"],
            cache=CacheConfig(
                block_size=values["block_size"],
                kv_dtype=values["kv_dtype"],
                kv_cache_memory=values["kv_cache_memory"],
                enable_prefix_caching=values["prefix_caching"],
                cache_dir=values["cache_dir"],
                cache_disk=values["cache_disk"],
                history=values["history"],
                history_window=values["history_window"],
                history_values=values["history_values"],
                history_tokens=values["history_tokens"],
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=values["max_num_seqs"],
                max_num_batched_tokens=values["max_num_batched_tokens"],
                max_model_len=values["max_model_len"],
                step_ms=values["step_ms"],
            ),
            attention=values["attention"],
            weights=values["weights"],
            activations=values["activations"],
            num_threads=values["threads"],
            seed=values["seed"],
            attn_topk=values["attn_topk"],
            attn_topk_mode=values["attn_topk_mode"],
            attn_topk_tail=values["attn_topk_tail"],
            topk_planes=values["topk_planes"],
            dense_layers=values["dense_layers"],
        )
    )


def served_names(model: str, given: list[str] | None) -> tuple[str, ...]:
    """The names that clients may use: never a path of this machine."""
    if given:
        return tuple(given)
    path = Path(model)
    if not path.exists():
        return (model,)
    return (path.stem if path.is_file() else path.resolve().name,)


def _options(values: dict[str, Any]) -> ServerOptions:
    from octavo.serving.app import Access
    from octavo.serving.server import ServerOptions

    return ServerOptions(
        models=served_names(values["model"], values["served_model_name"]),
        access=Access(
            api_keys=tuple(values["api_key"] or ()),
            shared_cache=values["shared_cache"],
            cors_origins=tuple(values["cors_origin"] or ()),
            max_body=values["max_body"],
            body_timeout=values["body_timeout"],
        ),
        max_queue=values["max_queue"],
        max_connections=values["max_connections"],
        request_timeout=values["request_timeout"],
        keep_alive=values["keep_alive"],
        drain_timeout=values["drain_timeout"],
        log_prompts=values["log_prompts"],
    )


def _announce(engine: Engine | EncoderEngine, options: ServerOptions, seconds: float) -> None:
    from octavo.engine import resources
    from octavo.engine.build import isa
    from octavo.engine.encoder import EncoderEngine

    if isinstance(engine, EncoderEngine):
        _say(
            f"{options.models[0]} loaded in {seconds:.1f} s: an encoder with vectors of "
            f"{engine.config.hidden_size} numbers, texts of up to {engine.config.max_tokens} tokens"
        )
        return
    config = engine.config
    blocks, size = config.cache.num_blocks or 0, config.cache.block_size
    attention = config.attention
    _say(
        f"{options.models[0]} loaded in {seconds:.1f} s: {attention} attention ({isa(attention)}), "
        f"K and V in {config.cache.kv_dtype}, activations in {config.activations}"
    )
    if config.cache.num_compact_blocks is None:
        room = f"{blocks} KV blocks of {size} tokens: {blocks * size} tokens at once, or"
    else:
        room = (
            f"{blocks} KV blocks of {size} tokens and {config.cache.num_compact_blocks} compact ones for "
            f"what is more than {config.cache.history_window} tokens old:"
        )
    contexts = resources.num_sequences(config, engine.max_model_len)
    _say(
        f"{room} {contexts:.1f} contexts of {engine.max_model_len}; "
        f"{config.scheduler.max_num_seqs} sequences run, {options.max_queue} more may wait"
    )
    disk = engine.disk_stats
    if disk is not None:
        _say(f"{disk.blocks} blocks on disk in {config.cache.cache_dir}, at most {config.cache.cache_disk}")


def _announce_address(values: dict[str, Any], port: int) -> None:
    host = values["host"]
    _say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
    if not values["api_key"] and host not in ("127.0.0.1", "localhost", "::1"):
        _say("without --api-key everybody who reaches this address can use it")


def _say(line: str) -> None:
    import logging

    logging.getLogger("octavo").info(line)


_ORIGINS = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "config file"}


def _print_config(ctx: typer.Context, values: dict[str, Any]) -> None:
    """Every setting as a line of TOML, with its origin; keys are not shown."""
    for name in _NAMES:
        source = ctx.get_parameter_source(name)
        origin = _ORIGINS.get(source.name if source is not None else "", "default")
        value = values[name]
        if name == "api_key" and value:
            print(f"# {name} is set ({len(value)})  # {origin}")
        elif value is None:
            print(f"# {name} is not set  # {origin}")
        else:
            print(f"{name} = {json.dumps(value)}  # {origin}")
