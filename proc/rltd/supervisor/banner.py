"""The few lines that a person sees when the daemon starts."""

from __future__ import annotations

import sys

from rich.markup import escape

from rlt import __version__


def starting(model: str, url: str, *, plain: bool = False) -> list[str]:
    return _rendered(plain, [f"[bold]rlt {__version__}[/]  starting {escape(model)} at {url}"])


def ready(model: str, device: str, url: str, seconds: float, *, plain: bool = False) -> list[str]:
    where = f" on {device}" if device else ""
    return _rendered(
        plain,
        [
            f"[bold]rlt {__version__}[/]  [bold]{escape(model)}[/]{where}  [cyan]{url}[/]",
            f"ready in {seconds:.1f} s; rltctl status shows what it does, Ctrl-C stops it",
        ],
    )


def _rendered(plain: bool, lines: list[str]) -> list[str]:
    """Render rich's markup: in colour on a terminal, as plain text elsewhere and if `plain`."""
    from rich.console import Console

    styled = sys.stdout.isatty() and not plain
    console = Console(force_terminal=styled, soft_wrap=True, highlight=False)
    with console.capture() as capture:
        for line in lines:
            console.print(line)
    return capture.get().splitlines()
