"""Entry of the engine core process."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from rlt.config import Config
from rlt.errors import ConfigError, MemoryPlanError, ModelError, RltError
from rlt_protocols.control import Progress
from rltd.engine_core.core import Command, EngineCore, EngineLike
from rltd.engine_core.wire import EngineWire
from rltd.link.child import ChildLink, LinkError
from rltd.link.logs import configure_logging

log = logging.getLogger(__name__)

#: Builds an engine and names its device.
EngineFactory = Callable[[Config, Callable[[str, float], None]], tuple[EngineLike, str]]


def load_engine(config: Config, progress: Callable[[str, float], None]) -> tuple[EngineLike, str]:
    """Build the real engine. The import is here because it brings torch."""
    from rlt.engine import Engine, choose_device

    return Engine(config, progress), str(choose_device(config.engine.device))


def main(argv: Sequence[str] | None = None, factory: EngineFactory = load_engine) -> int:
    """Run one engine core under a supervisor until told to stop; returns the exit code."""
    try:
        link = ChildLink.connect("engine", argv)
    except LinkError:
        return 1
    configure_logging(link.config.log, "engine")
    threading.excepthook = _end_process
    try:
        engine, device = factory(link.config, lambda stage, fraction: link.send(Progress(stage, fraction)))
    except RltError as error:
        log.debug("the engine cannot start", exc_info=True)
        usage = isinstance(error, ConfigError | ModelError | MemoryPlanError)
        link.fatal(str(error), usage=usage)
        return 2 if usage else 1
    commands: SimpleQueue[Command] = SimpleQueue()
    wire = EngineWire(link.run_dir, link.peer, commands, link.send)
    core = EngineCore(engine, link.peer, commands, wire.emit)
    link.watch(commands.put)
    link.ready(engine.info, device=device)
    try:
        core.run()
    except Exception:
        # The engine's state is unknown now. The supervisor starts a new one; the frontend tells the clients.
        log.exception("a tick failed; this engine ends")
        return 1
    wire.close()
    return 0


def _end_process(failure: threading.ExceptHookArgs) -> None:
    """End the whole process when a socket thread dies: it would hang silently without it."""
    log.critical("thread %s failed", failure.thread, exc_info=failure.exc_value)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
