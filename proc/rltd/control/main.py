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
from rlt_protocols.control import ControlReply
from rltd.control import client

app = typer.Typer(
    help="Look at and steer a running rltd.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="The daemon's run directory, where more than one daemon runs.")
]


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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show processes, requests, KV pages and loops per token."""
    try:
        reply = client.status(client.find_run_dir(run_dir))
    except RltError as error:
        _fail(error)
    if as_json:
        fields = {name: getattr(reply, name) for name in ("requests", "kv", "loops_per_token")}
        print(json.dumps({"processes": msgspec.to_builtins(reply.processes), **msgspec.to_builtins(fields)}))
    else:
        _show(reply)


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


def _show(reply: ControlReply) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("process", "pid", "state", "restarts")
    for process in reply.processes:
        table.add_row(process.role, str(process.pid), process.state, str(process.restarts))
    console = Console(highlight=False)
    console.print(table)
    console.print("requests  " + _counts(reply.requests))
    console.print("KV pages  " + _counts(reply.kv))
    loops = "-" if reply.loops_per_token is None else f"{reply.loops_per_token:.2f}"
    console.print(f"loops per token  {loops}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "-"


def _fail(error: RltError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
