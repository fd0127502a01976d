"""The commands of ``octavo``, and the one place where an error becomes an exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from octavo.cli import bench, cache, convert, models, run, serve, train
from octavo.cli.errors import FAILURE, INTERRUPTED, USAGE, CommandError, os_sentence

# typer keeps its base class of usage errors in a private module whose name changed between
# releases; this public one derives from it.
_ClickError = cast("type[Exception]", typer.BadParameter.__mro__[2])

app = typer.Typer(
    name="octavo",
    help="Serve transformers to many users from little memory.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("pull")(models.pull)
app.command("models")(models.models)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("convert")(convert.convert)
app.command("train")(train.train)
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"octavo {version('octavo')}")
        except PackageNotFoundError:
            print("octavo (not installed: running from its source folder)")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit(2)


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit: 0, 2 for a usage error, 130 for Ctrl-C, 1 for the rest."""
    # A stream that the caller has closed is None, which nothing below expects.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - it stays open to the end
    # A byte that is not UTF-8 must reach the engine's own check, and an odd terminal must not end us.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if stream is not None:  # closed by whoever started us
            stream.reconfigure(errors=errors)  # type: ignore[union-attr]  # a TextIOWrapper
    sys.exit(exit_code(sys.argv[1:] if args is None else args))


def exit_code(args: list[str]) -> int:
    """Run the command line; returns the exit code, with the error told on stderr."""
    try:
        code = app(args=args, prog_name="octavo", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # The reader has gone: nobody is left to tell, and the flush at exit must not complain either.
        sys.stdout = None
        return 1
    except OSError as error:
        # A full disk under stdout, say. What is still in its buffer would fail again at exit.
        sys.stdout = None
        print(f"octavo: {os_sentence(error)}", file=sys.stderr)
        return FAILURE
    except CommandError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return error.exit_code
    except _ClickError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "octavo"
        print(f"octavo: {_message(error)} ({command} --help lists what is allowed)", file=sys.stderr)
        return USAGE
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        return INTERRUPTED


def _message(error: Exception) -> str:
    """typer's sentence, in one line and with one full stop at most."""
    return " ".join(str(getattr(error, "format_message", error.__str__)()).split())
