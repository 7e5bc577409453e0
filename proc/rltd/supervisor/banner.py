"""The few lines that a person sees when the daemon starts."""

from __future__ import annotations

import sys

from rlt import __version__


def starting(model: str, url: str) -> list[str]:
    return _styled([f"[bold]rlt {__version__}[/]  starting {model} at {url}"])


def ready(model: str, device: str, url: str, seconds: float) -> list[str]:
    where = f" on {device}" if device else ""
    return _styled(
        [
            f"[bold]rlt {__version__}[/]  [bold]{model}[/]{where}  [cyan]{url}[/]",
            f"ready in {seconds:.1f} s; rltctl status shows what it does, Ctrl-C stops it",
        ]
    )


def _styled(lines: list[str]) -> list[str]:
    """Render rich's markup: in colour on a terminal, as plain text elsewhere."""
    from rich.console import Console

    console = Console(no_color=not sys.stdout.isatty(), soft_wrap=True, highlight=False)
    with console.capture() as capture:
        for line in lines:
            console.print(line)
    return capture.get().splitlines()
