"""Finds the running daemon and sends it one request."""

from __future__ import annotations

import socket
from pathlib import Path

from rlt.errors import RltError
from rlt_protocols import PROTOCOL_VERSION
from rlt_protocols.codec import ProtocolError, encode
from rlt_protocols.control import (
    AbortCommand,
    CacheResetCommand,
    Command,
    ControlReply,
    ControlRequest,
    DrainCommand,
    LogLevel,
    LogLevelCommand,
    StatusCommand,
    control_reply,
)
from rltd.link.framing import FramingError, frame, read_frame
from rltd.supervisor.run_dir import CONTROL_SOCKET, live_run_dirs


class ControlError(RltError):
    """No daemon, more than one, or one that does not answer."""


def find_run_dir(given: Path | None) -> Path:
    """Return the run directory to talk to: `given` (or the only daemon below it), else the user's only daemon."""
    if given is not None:
        if (given / CONTROL_SOCKET).exists():
            return given
        found = sorted(path.parent for path in given.glob(f"*/{CONTROL_SOCKET}"))
        if not found:
            raise ControlError(f"no rltd runs in {given}: there is no {CONTROL_SOCKET}")
    else:
        found = live_run_dirs()
        if not found:
            raise ControlError("no rltd of this user is running; start one with: rltd start")
    if len(found) > 1:
        choices = "\n".join(f"  --run-dir {path}" for path in found)
        raise ControlError(f"{len(found)} daemons are running; choose one with\n{choices}")
    return found[0]


def ask(run_dir: Path, command: Command, timeout_s: float) -> ControlReply:
    """Send `command` and return the reply; raises `ControlError` when there is none, or one that says no."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(run_dir / CONTROL_SOCKET))
            sock.sendall(frame(encode(ControlRequest(PROTOCOL_VERSION, command))))
            data = read_frame(sock)
            reply = control_reply.decode(data) if data is not None else None
        except TimeoutError as error:
            raise ControlError(f"the daemon in {run_dir} did not answer within {timeout_s:g} s") from error
        except (OSError, FramingError, ProtocolError) as error:
            raise ControlError(f"the daemon in {run_dir} cannot be asked: {error}") from error
    if reply is None:
        raise ControlError(f"the daemon in {run_dir} ended without an answer")
    if not reply.ok:
        raise ControlError(reply.message)
    return reply


def status(run_dir: Path) -> ControlReply:
    return ask(run_dir, StatusCommand(), timeout_s=5.0)


def drain(run_dir: Path, limit_s: float | None) -> ControlReply:
    """Drain and stop the daemon; returns when nothing runs any more. `limit_s` None is the daemon's own limit."""
    # The daemon keeps its limit itself; an hour only bounds a wait for a daemon that hangs.
    wait_s = 3600.0 if limit_s is None else limit_s + 30
    return ask(run_dir, DrainCommand(limit_s), wait_s)


def abort(run_dir: Path, answer_id: str) -> ControlReply:
    """End the running HTTP answer with this id; an unknown one is a `ControlError`."""
    return ask(run_dir, AbortCommand(answer_id), timeout_s=5.0)


def reset_cache(run_dir: Path) -> ControlReply:
    """Empty the prefix caches; waits until every engine has ended its tick."""
    return ask(run_dir, CacheResetCommand(), timeout_s=60.0)


def set_log_level(run_dir: Path, level: LogLevel) -> ControlReply:
    return ask(run_dir, LogLevelCommand(level), timeout_s=5.0)
