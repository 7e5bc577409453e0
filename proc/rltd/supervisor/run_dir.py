"""The private directory of one daemon: its inboxes and its control socket live there."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlt.errors import RltError
from rltd.link.address import AddressError, Peer, inbox_path, socket_path

CONTROL_SOCKET = "control.sock"
#: The daemon holds an flock on this file as long as it lives: process ids mean nothing across containers.
LOCK_FILE = "lock"

_NAME = re.compile(r"\d+(\.\d+)?")


class RunDirError(RltError):
    """The run directory cannot be used."""


class RunDir:
    """The run directory of this process, and the lock that says that it lives."""

    def __init__(self, path: Path) -> None:
        """Make the directory; it must not exist."""
        path.mkdir(mode=0o700)
        self.path = path
        self._lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def is_own(self) -> bool:
        """Whether the directory is still there and not another daemon's."""
        try:
            return os.path.samestat(os.stat(self.path / LOCK_FILE), os.fstat(self._lock))
        except OSError:
            return False

    def remove(self) -> None:
        if self.is_own():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def base_directories() -> list[Path]:
    """Where run directories may be, best first: a daemon and `rltctl` may run with different environments."""
    bases = [Path(f"/tmp/rltd-{os.getuid()}")]
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and Path(session).is_dir():
        bases.insert(0, Path(session) / "rltd")
    return bases


def create_run_dir() -> RunDir:
    """Make `<base>/<pid>` with mode 0700 and remove what dead daemons left beside it.

    A daemon with the same process id may live in another container: then it is `<base>/<pid>.1`.
    """
    base = base_directories()[0]
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        _check_private(base)
        with _locked(base):
            remove_stale(base)
            pid = os.getpid()
            names = itertools.chain([f"{pid}"], (f"{pid}.{number}" for number in itertools.count(1)))
            path = next(base / name for name in names if not (base / name).exists())
            # The longest name that will be needed, so that a path that is too long shows now and not at a restart.
            inbox_path(path, Peer("frontend", 99, 99999))
            return RunDir(path)
    except OSError as error:
        raise RunDirError(f"the run directory {base} cannot be made: {error.strerror}") from error
    except AddressError as error:
        raise RunDirError(str(error)) from error


def control_path(run_dir: Path) -> Path:
    return socket_path(run_dir, CONTROL_SOCKET)


def live_run_dirs() -> list[Path]:
    """The run directories of this user's running daemons."""
    return [
        entry
        for base in base_directories()
        if base.is_dir()
        for entry in sorted(base.iterdir())
        if _NAME.fullmatch(entry.name) and _alive(entry) and (entry / CONTROL_SOCKET).exists()
    ]


def remove_stale(base: Path) -> None:
    for entry in base.iterdir():
        if _NAME.fullmatch(entry.name) and not _alive(entry):
            shutil.rmtree(entry, ignore_errors=True)


def _alive(run_dir: Path) -> bool:
    """Whether a daemon holds the directory's lock. What cannot be found out counts as alive."""
    try:
        lock = os.open(run_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        # Shared, so that two who ask do not take each other for the daemon.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Keep other daemons that start out, so that none takes our directory for a dead one's before it is locked."""
    directory = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _check_private(base: Path) -> None:
    """In /tmp anyone could have made the directory first."""
    facts = base.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise RunDirError(f"{base} exists and is not a directory of this user; remove it or set XDG_RUNTIME_DIR")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise RunDirError(f"{base} is open to other users; run: chmod 700 {base}")
