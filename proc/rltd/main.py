"""The `rltd` program: what must be in order before the commands are even imported."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line. Ctrl-C before the supervisor takes signals over ends with code 130 and no traceback."""
    signal.signal(signal.SIGINT, _leave)
    open_standard_files()
    from rltd.cli import app

    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def open_standard_files() -> None:
    """Open /dev/null in place of standard files that the caller closed.

    Sockets would get their numbers otherwise, and the children take them for their output.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for as long as we live)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(INTERRUPTED)


def __getattr__(name: str) -> Any:
    """`app`, the Typer application, for those who look at it; imported when asked for."""
    if name == "app":
        from rltd.cli import app

        return app
    raise AttributeError(name)


if __name__ == "__main__":
    main()
