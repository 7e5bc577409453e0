"""A child's end of the pipe to its supervisor; what happens at the pipe's end is tested with whole processes."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue

import msgspec
import pytest

from rlt import __version__
from rlt.config import load_config
from rlt_protocols import PROTOCOL_VERSION
from rlt_protocols.codec import encode
from rlt_protocols.control import (
    Drain,
    Fatal,
    Hello,
    PeerDown,
    PeerUp,
    Progress,
    Ready,
    Refused,
    SetLogLevel,
    StatusQuery,
    StatusReply,
    Stop,
    ToChild,
    Welcome,
    from_child,
)
from rltd.link.address import Peer
from rltd.link.child import ChildLink, LinkError, Order
from rltd.link.framing import frame, read_frame

CONFIG = load_config(assignments=["kv.pages=12", "model.path=somewhere"])
WELCOME = Welcome(PROTOCOL_VERSION, "engine", 0, 4, "/run/rlt-test", msgspec.msgpack.encode(CONFIG))


def connect(answer: Callable[[socket.socket], None]) -> tuple[ChildLink, socket.socket]:
    """Connect a link to a socket on which `answer` plays the supervisor, on a thread."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=answer, args=(ours,))
    thread.start()
    try:
        return ChildLink.connect("engine", ["--link-fd", str(theirs.detach()), "--http-fd", "99"]), ours
    except LinkError:
        ours.close()
        raise
    finally:
        thread.join()


def send(sock: socket.socket, *messages: ToChild) -> None:
    sock.sendall(b"".join(frame(encode(message)) for message in messages))


def receive(sock: socket.socket) -> object:
    data = read_frame(sock)
    assert data is not None
    return from_child.decode(data)


def test_hello_welcome_and_reports() -> None:
    hellos: list[object] = []
    link, supervisor = connect(lambda sock: (hellos.append(receive(sock)), send(sock, WELCOME))[0])
    with supervisor:
        assert hellos == [Hello(PROTOCOL_VERSION, __version__, "engine", os.getpid())]
        assert (link.peer, link.run_dir, link.http_fd) == (Peer("engine", 0, 4), "/run/rlt-test", 99)
        assert link.config == CONFIG
        link.send(Progress("loading", 0.5))
        link.ready(device="cuda:0")
        link.fatal("no", usage=True)
        link.send(StatusReply(1, {"running": 3, "kv": {"free": 2.0}}))
        assert receive(supervisor) == Progress("loading", 0.5)
        assert receive(supervisor) == Ready(None, "cuda:0")
        assert receive(supervisor) == Fatal("no", True)
        assert receive(supervisor) == StatusReply(1, {"running": 3.0, "kv": {"free": 2.0}})
        link.close()
        assert read_frame(supervisor) is None
        link.close()


def test_orders_that_came_before_the_watch_come_first() -> None:
    early = [PeerUp("frontend", 0, 0), PeerDown("frontend", 0, 0)]
    link, supervisor = connect(lambda sock: send(sock, WELCOME, *early))
    with supervisor:
        orders: SimpleQueue[Order] = SimpleQueue()
        link.watch(orders.put)
        late = [Drain(1.5), Stop()]
        send(supervisor, *late)
        assert [orders.get(timeout=10) for _ in range(4)] == [*early, *late]
        link.close()


@pytest.mark.parametrize("early", [True, False])
def test_the_link_itself_sets_the_log_level(early: bool) -> None:
    root = logging.getLogger()
    before = root.level
    link, supervisor = connect(lambda sock: send(sock, WELCOME))
    with supervisor:
        orders: SimpleQueue[Order] = SimpleQueue()
        if not early:
            link.watch(orders.put)
        try:
            send(supervisor, SetLogLevel("error"), StatusQuery(1))
            if early:
                link.watch(orders.put)
            assert orders.get(timeout=10) == StatusQuery(1)
            assert root.level == logging.ERROR
        finally:
            link.close()
            root.setLevel(before)


def test_nothing_follows_a_stop() -> None:
    """An order that comes while the process leaves must not reach an event loop that is closed."""
    for early in (True, False):
        link, supervisor = connect(lambda sock: send(sock, WELCOME))
        with supervisor:
            orders: list[Order] = []
            told = threading.Event()

            def take(order: Order, orders: list[Order] = orders, told: threading.Event = told) -> None:
                orders.append(order)
                told.set()

            if early:
                send(supervisor, Stop(), StatusQuery(1))
            link.watch(take)
            if not early:
                send(supervisor, Stop(), StatusQuery(1))
            assert told.wait(10)
            send(supervisor, StatusQuery(2))
            link.close()
            assert orders == [Stop()]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda sock: send(sock, Refused("install one version")), "install one version"),
        (lambda sock: send(sock, Stop()), "no welcome"),
        (lambda sock: sock.sendall(frame(b"\xc1")), "no welcome"),
        (lambda sock: sock.shutdown(socket.SHUT_RDWR), "no welcome"),
    ],
)
def test_without_a_welcome_there_is_no_link(answer: Callable[[socket.socket], None], message: str) -> None:
    with pytest.raises(LinkError, match=message):
        connect(answer)


def test_a_process_started_by_hand_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        ChildLink.connect("engine", [])
    assert error.value.code == 2
    assert "--link-fd" in capsys.readouterr().err
