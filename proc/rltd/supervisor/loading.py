"""What the daemon shows while its engine loads the model."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from rlt.progress import ProgressLines, bar_line
from rltd.supervisor.output import Printer


class Loading:
    """A bar as the terminal's last line, or plain lines where the printer has no terminal."""

    def __init__(self, printer: Printer, clock: Callable[[], float] = time.monotonic) -> None:
        self._printer = printer
        self._clock = clock
        self._lines: ProgressLines | None = None

    def show(self, stage: str, share: float) -> None:
        """The engine is at `stage`, and `share` (0 to 1) of the model is loaded."""
        if self._printer.has_terminal:
            self._printer.show_status(bar_line(stage, share, shutil.get_terminal_size().columns))
            return
        if self._lines is None:
            self._lines = ProgressLines(self._printer.say, self._clock)
        self._lines(stage, share)

    def end(self) -> None:
        """The engine is ready, or dead."""
        self._lines = None
        self._printer.show_status("")
