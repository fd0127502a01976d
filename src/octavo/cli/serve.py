"""``octavo serve``: its settings from wherever they come, its start, and what it says of that."""

from __future__ import annotations

import inspect
import json
import os
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.errors import USAGE, CommandError, plainly
from octavo.cli.serve_settings import ENV_PREFIX, NAMES, SETTINGS
from octavo.startup import lasting_imports
from octavo.weights.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from octavo.engine.encoder import EncoderEngine
    from octavo.engine.engine import Engine
    from octavo.serving.server import ServerOptions


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
        if name not in NAMES:
            raise CommandError(f"{path}: {name!r:.60} is not a setting; these are: {', '.join(NAMES)}", USAGE)
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
        rich_help_panel="Configuration",
    )
    show = typer.Option(
        "--print-config",
        help="Show every setting, and from where it comes; then exit.",
        rich_help_panel="Configuration",
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
            with lasting_imports():
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
                history_budget=values["history_budget"],
                history_recall=values["history_recall"],
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
    """Every setting as a line of TOML that --config reads, with its origin; keys are not shown."""
    for name in NAMES:
        source = ctx.get_parameter_source(name)
        origin = _ORIGINS.get(source.name if source is not None else "", "default")
        value = values[name]
        if isinstance(value, tuple):
            value = ",".join(map(str, value)) or None
        if name == "api_key" and value:
            print(f"# {name} is set ({len(value)})  # {origin}")
        elif value is None:
            print(f"# {name} is not set  # {origin}")
        else:
            print(f"{name} = {json.dumps(value)}  # {origin}")
