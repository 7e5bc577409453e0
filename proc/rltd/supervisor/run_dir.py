"""The private directory of one daemon: its inboxes and its control socket live there."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from rlt.errors import RltError
from rltd.link.address import AddressError, Peer, inbox_path, socket_path

CONTROL_SOCKET = "control.sock"


class RunDirError(RltError):
    """The run directory cannot be used."""


def base_directories() -> list[Path]:
    """Where run directories may be, best first: a daemon and `rltctl` may run with different environments."""
    bases = [Path(f"/tmp/rltd-{os.getuid()}")]
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and Path(session).is_dir():
        bases.insert(0, Path(session) / "rltd")
    return bases


def create_run_dir() -> Path:
    """Make `<base>/<pid>` with mode 0700 and remove what dead daemons left beside it."""
    base = base_directories()[0]
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        _check_private(base)
        remove_stale(base)
        run_dir = base / str(os.getpid())
        # A directory of our own pid is from an earlier process with that pid.
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(mode=0o700)
        # The longest name that will be needed, so that a path that is too long shows now and not at a restart.
        inbox_path(run_dir, Peer("frontend", 99, 99999))
    except OSError as error:
        raise RunDirError(f"the run directory {base} cannot be made: {error.strerror}") from error
    except AddressError as error:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise RunDirError(str(error)) from error
    return run_dir


def control_path(run_dir: Path) -> Path:
    return socket_path(run_dir, CONTROL_SOCKET)


def live_run_dirs() -> list[Path]:
    """The run directories of this user's running daemons."""
    return [
        entry
        for base in base_directories()
        if base.is_dir()
        for entry in sorted(base.iterdir())
        if entry.name.isdigit() and _alive(int(entry.name)) and (entry / CONTROL_SOCKET).exists()
    ]


def remove_stale(base: Path) -> None:
    for entry in base.iterdir():
        if entry.name.isdigit() and not _alive(int(entry.name)):
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # exists, of another user
    return True


def _check_private(base: Path) -> None:
    """In /tmp anyone could have made the directory first."""
    facts = base.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise RunDirError(f"{base} exists and is not a directory of this user; remove it or set XDG_RUNTIME_DIR")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise RunDirError(f"{base} is open to other users; run: chmod 700 {base}")
