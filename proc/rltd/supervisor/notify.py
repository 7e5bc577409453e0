"""sd_notify: tells systemd about readiness, stopping and health."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress


class Notifier:
    """Sends states to `NOTIFY_SOCKET`; does nothing without one."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        #: systemd kills the service when it hears nothing for this long; None: no watchdog
        self.watchdog_s = watchdog_s
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            # '@' stands for the NUL byte of an abstract socket
            self._address = "\0" + address[1:] if address.startswith("@") else address

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Notifier:
        """Read systemd's variables and remove them, so that no child speaks in the service's name."""
        address = environment.pop("NOTIFY_SOCKET", None)
        usec = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", str(os.getpid()))
        watched = address is not None and usec.isdigit() and int(usec) > 0 and pid == str(os.getpid())
        return cls(address, int(usec) / 1e6 if watched else None)

    def send(self, *states: str) -> None:
        """Send states such as `READY=1`; a service manager that does not listen is no error."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendto("\n".join(states).encode(), self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
