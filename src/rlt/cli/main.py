"""The `rlt` program: commands, error lines and exit codes (0 fine, 1 failed, 2 bad usage or configuration)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

import rlt
from rlt.cli import bench, evaluate, generate, make_checkpoint
from rlt.errors import ConfigError, RltError
from rlt_protocols.params import ParamError

app = typer.Typer(
    name="rlt",
    help="Run, measure and evaluate looped transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("make-checkpoint")(make_checkpoint.make_checkpoint)
app.add_typer(bench.app, name="bench")
app.add_typer(evaluate.app, name="eval")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlt {rlt.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors; may stand anywhere.")] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (of the process, if none is given) and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        app([word for word in words if word != "--debug"], prog_name="rlt")
    except (RltError, ParamError) as error:
        if debug:
            raise
        typer.echo(f"rlt: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError | ParamError) else 1)
    sys.exit(0)
