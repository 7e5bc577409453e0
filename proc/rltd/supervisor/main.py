"""Runs the daemon from its configuration to its exit code: sockets and directories first, then the supervisor."""

from __future__ import annotations

import asyncio

from rlt.config import Config
from rltd.supervisor import banner
from rltd.supervisor.control_server import ControlServer
from rltd.supervisor.listen import http_socket, url_of
from rltd.supervisor.notify import Notifier
from rltd.supervisor.output import Printer
from rltd.supervisor.restart import Limits
from rltd.supervisor.run_dir import create_run_dir
from rltd.supervisor.slot import COMMANDS, Commands
from rltd.supervisor.supervisor import Supervisor


def serve(config: Config, *, commands: Commands = COMMANDS, limits: Limits | None = None) -> int:
    """Run the daemon in the foreground and return its exit code.

    Raises `ConfigError` when the HTTP address cannot be bound or the certificate cannot be used, and `RunDirError` when
    there is no private directory; nothing has been started then.
    """
    with http_socket(config.server) as http:
        run_dir = create_run_dir()
        url = url_of(http, tls=config.server.tls_cert is not None)
        as_json = config.log.format == "json"
        printer = Printer(json_lines=as_json)
        notifier = Notifier.from_environment()

        async def run() -> int:
            supervisor = Supervisor(
                config,
                http,
                url,
                run_dir,
                printer=printer,
                notifier=notifier,
                commands=commands,
                limits=limits or Limits(),
            )
            async with ControlServer(supervisor):
                return await supervisor.run()

        try:
            for line in banner.starting(config.model.path, url, plain=as_json):
                printer.say(line)
            return asyncio.run(run())
        finally:
            run_dir.remove()
            notifier.close()
            printer.close()
