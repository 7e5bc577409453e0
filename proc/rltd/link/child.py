"""A child's end of the socket pair to the supervisor."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property

import msgspec

from rlt import __version__
from rlt.config import Config
from rlt_protocols import PROTOCOL_VERSION
from rlt_protocols.codec import ProtocolError, encode
from rlt_protocols.control import (
    AbortAnswer,
    Drain,
    Fatal,
    FromChild,
    Hello,
    PeerDown,
    PeerUp,
    Ready,
    Refused,
    ResetCache,
    Role,
    SetLogLevel,
    StatusQuery,
    Stop,
    Welcome,
    to_child,
)
from rlt_protocols.params import ModelInfo
from rltd.link.address import Peer
from rltd.link.framing import FramingError, frame, read_frame

log = logging.getLogger(__name__)

#: What a handler given to `ChildLink.watch` can receive.
Order = PeerUp | PeerDown | Drain | Stop | StatusQuery | AbortAnswer | ResetCache


class LinkError(Exception):
    """The supervisor did not accept this process, or is gone."""


class ChildLink:
    """Hello, orders and reports. `send` may be called from any thread.

    From the welcome on, a daemon thread reads the pipe. Its end means that the supervisor is gone, by whatever signal:
    the thread then removes the run directory and ends the process at once, also while the main thread computes.
    """

    def __init__(self, sock: socket.socket, welcome: Welcome, *, http_fd: int | None = None) -> None:
        self._sock = sock
        self.welcome = welcome
        #: the listening HTTP socket, frontend only
        self.http_fd = http_fd
        self._send_lock = threading.Lock()
        self._watch_lock = threading.Lock()
        self._handler: Callable[[Order], None] | None = None
        self._backlog: list[Order] = []
        self._closing = False
        self._stopping = False
        threading.Thread(target=self._read_until_end, name="supervisor-link", daemon=True).start()

    @classmethod
    def connect(cls, role: Role, argv: Sequence[str] | None = None) -> ChildLink:
        """Say hello on the descriptor named in `argv` (default: the command line) and wait for the welcome."""
        parser = argparse.ArgumentParser(description=f"rltd {role} process; started by `rltd start` only")
        parser.add_argument("--link-fd", type=int, required=True)
        parser.add_argument("--http-fd", type=int)
        arguments = parser.parse_args(argv)
        sock = socket.socket(fileno=arguments.link_fd)
        try:
            sock.sendall(frame(encode(Hello(PROTOCOL_VERSION, __version__, role, os.getpid()))))
            answer = _receive(sock)
        except (OSError, FramingError, ProtocolError) as error:
            sock.close()
            raise LinkError(f"no welcome from the supervisor: {error}") from error
        if isinstance(answer, Welcome):
            return cls(sock, answer, http_fd=arguments.http_fd)
        sock.close()
        raise LinkError(answer.reason if isinstance(answer, Refused) else "no welcome from the supervisor")

    @property
    def peer(self) -> Peer:
        """Who this process is; names its inbox."""
        return Peer(self.welcome.role, self.welcome.index, self.welcome.generation)

    @property
    def run_dir(self) -> str:
        return self.welcome.run_dir

    @cached_property
    def config(self) -> Config:
        return msgspec.msgpack.decode(self.welcome.config, type=Config)

    def send(self, message: FromChild) -> None:
        """Send to the supervisor. Does nothing when it is gone; the reader thread then ends the process."""
        with self._send_lock, suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(frame(encode(message)))

    def ready(self, info: ModelInfo | None = None, *, device: str = "") -> None:
        """Say that the inbox is bound and requests can come."""
        self.send(Ready(info, device))

    def fatal(self, message: str, *, usage: bool) -> None:
        """Say why this process cannot start; the supervisor shows `message` to the user. Leave afterwards."""
        self.send(Fatal(message, usage))

    def watch(self, handler: Callable[[Order], None]) -> None:
        """Give every order, those that came earlier included, to `handler`, which runs on the reader thread.

        A `Stop` is the last one.
        """
        with self._watch_lock:
            for order in self._backlog:
                handler(order)
            self._stopping = any(isinstance(order, Stop) for order in self._backlog)
            self._backlog.clear()
            self._handler = handler

    def close(self) -> None:
        """End the link from this side, without ending the process."""
        self._closing = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read_until_end(self) -> None:
        try:
            self._read()
        except Exception:  # whatever broke, without this thread the process could outlive the supervisor
            if not self._closing:
                log.exception("reading orders from the supervisor failed")
        if not self._closing:
            self._leave()

    def _read(self) -> None:
        while (order := _receive(self._sock)) is not None:
            if isinstance(order, Welcome | Refused):
                raise ProtocolError(f"unexpected {type(order).__name__}")
            if isinstance(order, SetLogLevel):
                logging.getLogger().setLevel(order.level.upper())
                continue
            with self._watch_lock:
                if self._handler is None:
                    self._backlog.append(order)
                elif not self._stopping:
                    self._handler(order)
                    # The process leaves now: who took the orders, e.g. an event loop, may be closed at the next one.
                    self._stopping = isinstance(order, Stop)

    def _leave(self) -> None:
        shutil.rmtree(self.welcome.run_dir, ignore_errors=True)
        sys.stderr.flush()
        os._exit(1)


def _receive(sock: socket.socket) -> Welcome | Refused | SetLogLevel | Order | None:
    data = read_frame(sock)
    return None if data is None else to_child.decode(data)
