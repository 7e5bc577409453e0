"""The Unix socket: who may open it, what it replaces, when it goes."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from rlt.config import ServerConfig
from rlt.errors import ConfigError
from rltd.supervisor.listen import bind_uds, check_listen, http_socket, url_of


def problem(path: Path) -> str:
    """Why one cannot listen there; `check_listen` may not object to more than the start does."""
    with pytest.raises(ConfigError) as caught, http_socket(ServerConfig(uds=str(path))):
        pass
    (line,) = caught.value.problems
    return line


def checked(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_listen(ServerConfig(uds=str(path)))
    (line,) = caught.value.problems
    return line


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


def test_only_the_owner_may_open_it_and_it_goes_at_the_end(short_dir: Path) -> None:
    path = short_dir / "rlt.sock"
    mask = os.umask(0)
    try:
        with http_socket(ServerConfig(uds=str(path))) as listener:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert url_of(listener) == f"unix:{path}"
            assert connects(path)
    finally:
        assert os.umask(mask) == 0, "the mask is as before"
    assert list(short_dir.iterdir()) == []


def test_a_relative_path_is_from_here(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short_dir)
    with http_socket(ServerConfig(uds="rlt.sock")) as listener:
        assert url_of(listener) == f"unix:{short_dir}/rlt.sock"


def test_what_a_dead_daemon_left_is_replaced(short_dir: Path) -> None:
    path = short_dir / "rlt.sock"
    bind_uds(path).close()
    assert not connects(path)
    check_listen(ServerConfig(uds=str(path)))
    with http_socket(ServerConfig(uds=str(path))):
        assert connects(path)


def test_a_living_server_is_left_alone(short_dir: Path) -> None:
    path = short_dir / "rlt.sock"
    with bind_uds(path):
        assert problem(path) == (
            f"cannot listen on {path} (server.uds): another program listens there; stop it or choose another path"
        )
        assert connects(path)


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_never_removed(kind: str, short_dir: Path) -> None:
    path = short_dir / "precious"
    if kind == "file":
        path.write_text("data")
    elif kind == "directory":
        path.mkdir()
    else:
        bind_uds(short_dir / "other").close()
        path.symlink_to(short_dir / "other")
    assert "it exists and is not a socket" in problem(path)
    assert "it exists and is not a socket" in checked(path)
    assert os.path.lexists(path)


def test_places_where_no_socket_can_be(short_dir: Path) -> None:
    assert problem(short_dir / "no" / "rlt.sock").endswith("(server.uds): No such file or directory")
    assert checked(short_dir / "no" / "rlt.sock").endswith(f"{short_dir}/no is not a directory")
    assert problem(short_dir / ("x" * 120)).endswith("(server.uds): AF_UNIX path too long")


def test_a_file_that_another_daemon_made_meanwhile_stays(short_dir: Path) -> None:
    path = short_dir / "rlt.sock"
    with http_socket(ServerConfig(uds=str(path))):
        path.unlink()
        other = bind_uds(path)
    assert connects(path)
    other.close()


def test_the_url_of_https() -> None:
    with http_socket(ServerConfig(port=0)) as listener:
        assert url_of(listener, tls=True) == f"https://127.0.0.1:{listener.getsockname()[1]}"
