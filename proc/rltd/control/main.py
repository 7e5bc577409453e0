"""The `rltctl` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from rlt import __version__
from rlt.errors import RltError
from rlt_protocols.control import LogLevel
from rltd.control import client

app = typer.Typer(
    help="Look at and steer a running rltd.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

cache = typer.Typer(help="The prefix cache.", no_args_is_help=True)
app.add_typer(cache, name="cache")

RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="The daemon's run directory, where more than one daemon runs.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rltctl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def status(
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show processes, requests, KV pages and loops per token."""
    try:
        reply = client.status(client.find_run_dir(run_dir))
    except RltError as error:
        _fail(error)
    if as_json:
        fields = {name: getattr(reply, name) for name in ("requests", "kv", "loops_per_token", "tokens")}
        print(json.dumps({"processes": msgspec.to_builtins(reply.processes), **msgspec.to_builtins(fields)}))
    else:
        from rltd.control.top import show

        show(reply)


@app.command()
def top(run_dir: RunDirOption = None) -> None:
    """Show the same and the rates, refreshed each second; q or Ctrl-C ends."""
    from rich.console import Console

    if not sys.stdout.isatty() or Console().is_dumb_terminal:
        _fail(client.ControlError("top needs a terminal; for programs there is: rltctl status --json"))
    from rltd.control.top import watch

    try:
        watch(client.find_run_dir(run_dir))
    except RltError as error:
        _fail(error)


@app.command()
def abort(
    answer_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="The answer's id, cmpl-… or chatcmpl-…, as in its events."),
    ],
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a running request, all its answers; its client gets an error event."""
    try:
        reply = client.abort(client.find_run_dir(run_dir), answer_id)
    except RltError as error:
        _fail(error)
    print(json.dumps({"id": answer_id, "answers": reply.count}) if as_json else reply.message)


@cache.command()
def reset(run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """Drop all cached prompt pages that no request reads; running requests keep theirs."""
    try:
        reply = client.reset_cache(client.find_run_dir(run_dir))
    except RltError as error:
        _fail(error)
    print(json.dumps({"freed_pages": reply.count}) if as_json else reply.message)


@app.command("log-level")
def log_level(
    level: Annotated[LogLevel, typer.Argument(metavar="LEVEL", help="debug, info, warning or error.")],
    run_dir: RunDirOption = None,
) -> None:
    """Set the log level of all processes until the daemon ends; log.level is that of its next start."""
    try:
        print(client.set_log_level(client.find_run_dir(run_dir), level).message)
    except RltError as error:
        _fail(error)


@app.command()
def drain(
    run_dir: RunDirOption = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds for the running requests (default: server.drain_timeout_s).")
    ] = None,
) -> None:
    """Let the running requests finish, take no new ones, then stop the daemon."""
    try:
        print(client.drain(client.find_run_dir(run_dir), timeout).message)
    except RltError as error:
        _fail(error)


def _fail(error: RltError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
