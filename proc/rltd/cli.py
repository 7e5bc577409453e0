"""The commands of `rltd`; `rltd.main` is the program."""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from rlt import __version__
from rlt.config import Config, load_config
from rlt.errors import ConfigError, MemoryPlanError, ModelError, RltError

app = typer.Typer(
    help="The rlt daemon: serves a looped transformer over HTTP.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rltd {__version__}")
        raise typer.Exit


#: command-line short forms of keys, as section -> key -> value; None is "not given"
Flags = dict[str, dict[str, Any]]

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file; see docs for the keys.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Built-in name, directory or Hub id (model.path).")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:<index> (engine.device).")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set any key.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Log more, and show tracebacks.")]


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def start(
    *,
    config: ConfigOption = None,
    model: ModelOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (server.host).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for any (server.port).")] = None,
    device: DeviceOption = None,
    assignments: SetOption = None,
    debug: DebugOption = False,
) -> None:
    """Start the daemon in the foreground."""
    from rltd.supervisor.main import serve

    flags: Flags = {"server": {"host": host, "port": port}, "model": {"path": model}, "engine": {"device": device}}
    try:
        code = serve(_load(config, flags, assignments, debug))
    except RltError as error:
        code = _explain(error, debug)
    raise typer.Exit(code)


@app.command()
def check(
    *,
    config: ConfigOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    assignments: SetOption = None,
    debug: DebugOption = False,
) -> None:
    """Read the configuration and the model's files, print what they mean, start nothing."""
    from rlt.models.checkpoint import read_spec
    from rlt.models.directory import resolve_model
    from rltd.check import check_text, kv_bytes_per_token, model_size, plan_memory
    from rltd.supervisor.listen import check_listen

    try:
        resolved = _load(config, {"model": {"path": model}, "engine": {"device": device}}, assignments, debug)
        directory = resolve_model(resolved.model.path, resolved.model.revision, resolved.model.load_format)
        spec = read_spec(directory)
        check_listen(resolved.server)
        check_text(resolved, directory)
        memory = plan_memory(resolved, directory, spec)
    except RltError as error:
        raise typer.Exit(_explain(error, debug)) from error
    for section in dataclasses.fields(resolved):
        _print_section(section.name, getattr(resolved, section.name))
    print(f"# the model in {directory}")
    _print_section("facts", spec)
    _print_section("size", model_size(spec))
    _print_section("memory", memory)
    # What publications state is in bfloat16.
    for dtype in dict.fromkeys((memory.dtype, "bfloat16")):
        print(f"[kv_bytes_per_token.{dtype}]")
        for layout, size in kv_bytes_per_token(resolved, spec, dtype).items():
            print(f"{json.dumps(layout)} = {size}")
        print()


def _load(config: Path | None, flags: Flags, assignments: list[str] | None, debug: bool) -> Config:
    """Read the configuration; flags are short for keys and win over the file."""
    overrides = {
        section: {key: value for key, value in entries.items() if value is not None}
        for section, entries in flags.items()
    }
    extra = ["log.level=debug"] if debug else []
    return load_config(config, overrides=overrides, assignments=[*(assignments or []), *extra])


def _explain(error: RltError, debug: bool) -> int:
    """Print an error for the user and return the exit code."""
    if debug:
        traceback.print_exception(error)
    for line in error.problems if isinstance(error, ConfigError) else str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError | ModelError | MemoryPlanError) else 1


def _print_section(name: str, values: Any) -> None:
    """Print a frozen dataclass as a TOML table; a key without a value is decided at the start."""
    print(f"[{name}]")
    for key in dataclasses.fields(values):
        value = getattr(values, key.name)
        print(f"# {key.name} is chosen at start" if value is None else f"{key.name} = {json.dumps(value)}")
    print()
