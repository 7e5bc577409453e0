"""What a command shows while its model is loaded, on stderr: answers and JSON have stdout to themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from rlt.progress import Progress, ProgressLines


@contextmanager
def loading() -> Iterator[Progress]:
    """A bar that goes when the model is there; a line every few seconds where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(lambda line: typer.echo(line, err=True))
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=1.0)
        yield lambda stage, share: bar.update(task, description=f"loading {stage}", completed=share)
