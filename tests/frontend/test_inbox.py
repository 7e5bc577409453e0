from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq

from frontend.harness import until
from rlt_protocols.codec import encode
from rlt_protocols.text import FrontendInbox, TextBatch, TextDelta
from rltd.frontend.inbox import InboxReader
from rltd.link.address import Peer
from rltd.link.inbox import bind_inbox
from rltd.link.outbox import Outboxes


def batch(name: str) -> bytes:
    return encode(TextBatch((TextDelta(name),)))


async def test_messages_come_in_order_whatever_is_between_them(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def handle(message: FrontendInbox) -> None:
        assert isinstance(message, TextBatch)
        name = message.items[0].request_id
        if name == "bad":
            raise KeyError(name)
        seen.append(name)

    caplog.set_level(logging.WARNING)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with TemporaryDirectory(prefix="rlt-") as path:
        run_dir = Path(path)
        with bind_inbox(context, run_dir, Peer("frontend", 0, 1)) as inbox, Outboxes(context, run_dir) as outboxes:
            # what comes before the reader does
            for data in (batch("first"), b"rubbish", batch("bad")):
                outboxes.send("frontend", 0, 1, [data])
            reader = InboxReader(inbox, handle)
            await until(lambda: seen == ["first"] and "KeyError" in caplog.text)
            # more than one turn's worth at once
            names = [f"{number}" for number in range(500)]
            for name in names:
                outboxes.send("frontend", 0, 1, [batch(name)])
            await until(lambda: len(seen) == 501)
            assert seen[1:] == names
            reader.close()
            outboxes.send("frontend", 0, 1, [batch("late")])
    assert "not for a frontend" in caplog.text
    assert "late" not in seen
    context.term()
