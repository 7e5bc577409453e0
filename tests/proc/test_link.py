"""Frames, addresses, inboxes and outboxes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from rlt.config import LogConfig
from rltd.link.address import MAX_SOCKET_PATH_BYTES, AddressError, Peer, inbox_address, inbox_path, socket_path
from rltd.link.framing import MAX_FRAME_BYTES, FramingError, frame, read_frame, read_frame_async
from rltd.link.inbox import bind_inbox
from rltd.link.logs import JsonFormatter, configure_logging
from rltd.link.outbox import Outboxes

ENGINE = Peer("engine", 0, 3)


async def read_all(data: bytes) -> list[bytes | None]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    frames: list[bytes | None] = []
    while not frames or frames[-1] is not None:
        frames.append(await read_frame_async(reader))
    return frames


def test_frames_come_out_as_they_went_in() -> None:
    near, far = socket.socketpair()
    with near, far:
        big = bytes(range(256)) * 300
        near.sendall(frame(b"") + frame(b"a"))
        assert read_frame(far) == b""
        assert read_frame(far) == b"a"
        near.sendall(frame(big))
        assert read_frame(far) == big
        near.close()
        assert read_frame(far) is None


async def test_frames_on_an_asyncio_stream() -> None:
    assert await read_all(frame(b"one") + frame(b"two")) == [b"one", b"two", None]


@pytest.mark.parametrize("data", [b"\x01", frame(b"hello")[:-1], struct.pack("<I", MAX_FRAME_BYTES + 1)])
async def test_broken_streams_are_framing_errors(data: bytes) -> None:
    with pytest.raises(FramingError):
        await read_all(data)
    near, far = socket.socketpair()
    with far:
        with near:
            near.sendall(data)
        with pytest.raises(FramingError):
            read_frame(far)


def test_a_message_beyond_the_limit_is_refused() -> None:
    with pytest.raises(FramingError, match="limit"):
        frame(bytes(MAX_FRAME_BYTES + 1))


def test_addresses_differ_by_role_index_and_generation() -> None:
    peers = [Peer(role, i, g) for role in ("frontend", "engine", "detokenizer") for i in (0, 1) for g in (0, 1)]
    assert len({inbox_address("/run", peer) for peer in peers}) == len(peers)
    assert inbox_address("/run", ENGINE) == "ipc:///run/engine0.3"


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    room = MAX_SOCKET_PATH_BYTES - len("/s")
    assert socket_path("/" + "x" * (room - 1), "s")
    with pytest.raises(AddressError, match="108 bytes"):
        socket_path("/" + "x" * room, "s")


def test_outboxes_deliver_in_order_and_before_the_inbox_is_bound(short_dir: Path) -> None:
    with zmq.Context() as context, Outboxes(context, short_dir) as outboxes:
        assert outboxes.send("engine", 0, 3, [b"header", b"ids"])
        with bind_inbox(context, short_dir, ENGINE) as inbox:
            for number in range(100):
                outboxes.send("engine", 0, 3, [b"%d" % number])
            assert inbox.recv_multipart() == [b"header", b"ids"]
            assert [inbox.recv() for _ in range(100)] == [b"%d" % n for n in range(100)]


def test_a_dead_generation_gets_nothing_and_its_successor_everything(short_dir: Path) -> None:
    with zmq.Context() as context, Outboxes(context, short_dir) as outboxes:
        assert outboxes.send("engine", 0, 3, [b"never read"])
        outboxes.drop("engine", 0, 3)
        outboxes.drop("engine", 0, 1)  # late news change nothing
        assert not outboxes.send("engine", 0, 3, [b"late"])
        assert not outboxes.send("engine", 0, 2, [b"later"])
        assert outboxes.send("engine", 1, 0, [b"another engine"])
        assert outboxes.send("engine", 0, 4, [b"new"])
        with bind_inbox(context, short_dir, Peer("engine", 0, 4)) as inbox:
            assert inbox.recv() == b"new"


def test_a_process_that_was_announced_is_reached_without_its_files(short_dir: Path) -> None:
    with (
        zmq.Context() as context,
        Outboxes(context, short_dir) as outboxes,
        bind_inbox(context, short_dir, ENGINE) as inbox,
    ):
        outboxes.connect("engine", 0, 3)
        outboxes.send("engine", 0, 3, [b"first"])
        assert inbox.recv() == b"first"  # connected now
        inbox_path(short_dir, ENGINE).unlink()
        outboxes.connect("engine", 0, 3)
        outboxes.send("engine", 0, 3, [b"second"])
        assert inbox.recv() == b"second"
        outboxes.drop("engine", 0, 3)
        outboxes.connect("engine", 0, 3)
        assert not outboxes.send("engine", 0, 3, [b"late"])


def test_a_send_to_a_process_that_does_not_read_never_blocks(short_dir: Path) -> None:
    with zmq.Context() as context, Outboxes(context, short_dir) as outboxes:
        for _ in range(5000):
            assert outboxes.send("frontend", 0, 0, [b"x" * 100])


async def test_an_inbox_works_with_asyncio(short_dir: Path) -> None:
    peer = Peer("frontend", 0, 0)
    with (
        zmq.asyncio.Context() as context,
        zmq.Context() as plain,
        Outboxes(plain, short_dir) as outboxes,
        bind_inbox(context, short_dir, peer) as inbox,
    ):
        outboxes.send("frontend", 0, 0, [b"hello"])
        assert await inbox.recv_multipart() == [b"hello"]


def test_json_logs_are_one_object_per_line() -> None:
    record = logging.LogRecord("rlt.x", logging.ERROR, __file__, 1, "line one\nline %d", (2,), None)
    entry = json.loads(JsonFormatter("engine").format(record))
    assert entry["message"] == "line one\nline 2"
    assert (entry["level"], entry["process"], entry["logger"]) == ("error", "engine", "rlt.x")


def test_logging_follows_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers = []  # force=True closes handlers, and these are pytest's
    try:
        configure_logging(LogConfig(level="warning"), "engine")
        logging.getLogger("rlt").info("quiet")
        logging.getLogger("rlt").warning("loud")
        configure_logging(LogConfig(level="debug", format="json"), "engine")
        logging.getLogger("rlt").debug("detail")
    finally:
        root.handlers = handlers
        root.setLevel(level)
    text, line = capsys.readouterr().err.splitlines()
    assert text.endswith("WARNING rlt: loud")
    assert json.loads(line)["message"] == "detail"
