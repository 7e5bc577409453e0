"""How far a model is loaded, for people: a bar on a terminal, a line now and then elsewhere. No torch here."""

from __future__ import annotations

import time
from collections.abc import Callable

#: without a terminal, a line at most as often as this: nothing where loading is quicker
LINE_EVERY_S = 5.0

#: (weight file that is read, share of the model's bytes that is done, 0 to 1)
Progress = Callable[[str, float], None]


class ProgressLines:
    """A `Progress` that says whole lines, for logs."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._next_s = clock() + LINE_EVERY_S

    def __call__(self, stage: str, share: float) -> None:
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + LINE_EVERY_S
            self._say(f"loading {stage}, {share:.0%} of the model is done")


def bar_line(stage: str, share: float, columns: int) -> str:
    """A progress bar and its text as one line for a terminal that is `columns` wide; NO_COLOR is followed."""
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    console = Console(force_terminal=True, width=columns, highlight=False)
    row = Table.grid(padding=(0, 1))
    row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(Text(f"loading {stage}"), ProgressBar(total=1.0, completed=share, width=30), f"{share:.0%}")
    with console.capture() as capture:
        console.print(row)
    return capture.get().splitlines()[0].rstrip()
