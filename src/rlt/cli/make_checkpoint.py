"""`rlt make-checkpoint`: a checkpoint of a published shape with generated weights."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlt.cli.options import Device, Json
from rlt.errors import ConfigError
from rlt.synthetic.shapes import SHAPES, Shape, find_shape

if TYPE_CHECKING:
    from rlt.synthetic.calibrate import Wanted
    from rlt.synthetic.make import Made

_SHAPES = "; ".join(
    f"{family}: {', '.join(name for known, name in SHAPES if known == family)}"
    for family in dict.fromkeys(family for family, _ in SHAPES)
)


def make_checkpoint(
    *,
    family: Annotated[str, typer.Option(help="ouro, nanbeige or huginn.")],
    shape: Annotated[str, typer.Option(help=f"{_SHAPES}.")],
    out: Annotated[Path, typer.Option(help="New or empty directory.")],
    agreement: Annotated[
        float | None, typer.Option(help="Share of tokens whose best token is the same early and at full depth.")
    ] = None,
    mean_depth: Annotated[float | None, typer.Option(help="Mean loops per token under the exit rule.")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of the files (default: as published)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
    calibration_tokens: Annotated[
        int, typer.Option(min=64, max=65536, help="Random tokens that agreement and depth are measured on.")
    ] = 512,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write a full-size checkpoint of random weights whose early agreement and exit depth can be chosen."""
    chosen = find_shape(family, shape)
    _check(chosen, agreement, mean_depth)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from rlt.config import load_config
    from rlt.engine import choose_device
    from rlt.synthetic.calibrate import Wanted
    from rlt.synthetic.make import Job, make_checkpoint

    where = choose_device(load_config(overrides={"engine": {"device": device}} if device else {}).engine.device)
    wanted = Wanted(agreement, mean_depth, calibration_tokens)
    job = Job(chosen, out.expanduser(), dtype or chosen.dtype, seed, wanted)
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing", total=1.0)

        def show(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        made = make_checkpoint(job, where, show, lambda line: console.print(line, soft_wrap=True, highlight=False))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if as_json:
        facts = {"family": family, "shape": shape, "out": str(out), "device": str(where), "peak_host_bytes": peak}
        typer.echo(json.dumps(facts | asdict(made)))
    else:
        _print(job.shape, job.directory, wanted, made, peak)


def _check(shape: Shape, agreement: float | None, mean_depth: float | None) -> None:
    """Raise `ConfigError` for what no calibration can reach."""
    problems = []
    if agreement is not None and not 0 < agreement <= 1:
        problems.append(f"--agreement must be above 0 and at most 1, got {agreement:g}")
    if mean_depth is not None and shape.family == "nanbeige":
        problems.append("--mean-depth: a nanbeige model has no exit; every token runs all loops")
    elif mean_depth is not None and not 1 < mean_depth < shape.loops:
        problems.append(f"--mean-depth must be above 1 and below the {shape.loops} loops, got {mean_depth:g}")
    if problems:
        raise ConfigError(problems)


def _print(shape: Shape, directory: Path, wanted: Wanted, made: Made, peak: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "asked", "made", title=f"{shape.family} {shape.name} in {directory}")
    table.add_row("parameters", "", f"{made.parameters:,}")
    table.add_row("tensors, files", "", f"{made.tensors}, {made.files}")
    table.add_row("on disk", "", f"{made.disk_bytes / 1e9:.2f} GB")
    table.add_row("peak host memory", "", f"{peak / 1e9:.2f} GB")
    measured = made.calibrated
    if measured is not None:
        asked = "" if wanted.agreement is None else f"{wanted.agreement:g}"
        table.add_row(f"agreement of {measured.shallow} and {shape.loops} loops", asked, f"{measured.agreement:.3f}")
        table.add_row("measured on", "", f"{measured.tokens} tokens, {measured.passes} passes")
        if measured.depths is not None and wanted.mean_depth is not None:
            table.add_row("mean depth", f"{wanted.mean_depth:g}", f"{measured.depths.mean:.3f}")
            shares = ", ".join(
                f"{depth}: {share:.0%}" for depth, share in enumerate(measured.depths.shares, 1) if share
            )
            table.add_row("tokens by depth", "", shares)
    console = Console()
    console.print(table)
    if measured is not None and measured.settings:
        console.print(
            "config.json of this family has no place for an exit rule; start the server with\n  "
            + " ".join(f"--set {setting}" for setting in measured.settings),
            soft_wrap=True,
            highlight=False,
        )
