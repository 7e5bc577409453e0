"""The real frontend and detokenizer processes under a fake supervisor, with a fake engine behind them."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

from rlt import __version__
from rlt.config import Config, load_config
from rlt_protocols import PROTOCOL_VERSION
from rlt_protocols.codec import encode
from rlt_protocols.control import FromChild, Hello, PeerUp, Ready, Role, Stop, ToChild, Welcome, from_child
from rlt_protocols.engine import AbortRequest, AddRequest, engine_inbox
from rlt_protocols.text import TokenBatch, Tokens, open_text
from rltd.link.address import Peer
from rltd.link.framing import frame, read_frame
from rltd.link.inbox import bind_inbox
from rltd.link.outbox import Outboxes
from text import small_tokenizers


class Process:
    """A child and our end of its link."""

    def __init__(self, role: Role, config: Config, run_dir: Path, http: socket.socket | None, generation: int) -> None:
        self.peer = Peer(role, 0, generation)
        self.link, theirs = socket.socketpair()
        self.link.settimeout(30)
        arguments = [sys.executable, "-m", f"rltd.{role}.main", "--link-fd", str(theirs.fileno())]
        fds = [theirs.fileno()]
        if http is not None:
            arguments += ["--http-fd", str(http.fileno())]
            fds.append(http.fileno())
        self.popen = subprocess.Popen(arguments, pass_fds=fds, stderr=subprocess.PIPE)
        theirs.close()
        hello = self.receive()
        assert isinstance(hello, Hello)
        assert hello.role == role
        assert hello.version == __version__
        self.send(Welcome(PROTOCOL_VERSION, role, 0, generation, str(run_dir), msgspec.msgpack.encode(config)))

    def send(self, message: ToChild) -> None:
        self.link.sendall(frame(encode(message)))

    def receive(self) -> FromChild:
        data = read_frame(self.link)
        assert data is not None, self.popen.communicate()[1].decode()
        return from_child.decode(data)

    def mapped_files(self) -> str:
        return Path(f"/proc/{self.popen.pid}/maps").read_text()

    def end(self) -> int:
        """Ask it to stop; its exit code."""
        self.send(Stop())
        return self.popen.wait(20)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate()
        self.link.close()


class FakeEngine(threading.Thread):
    """Answers every request with the ids of a text, some tokens a batch for all requests together, like ticks."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, generation: int, answer: Sequence[int]
    ) -> None:
        super().__init__(daemon=True)
        self._inbox = bind_inbox(context, run_dir, Peer("engine", 0, generation))
        self._outboxes = Outboxes(context, run_dir)
        self._answer = answer
        self._running: dict[str, tuple[AddRequest, int]] = {}
        self._stopped = threading.Event()
        self.aborted: list[str] = []
        self.added: list[str] = []
        self.pause: Callable[[], None] = lambda: None

    def run(self) -> None:
        while not self._stopped.is_set():
            if self._inbox.poll(0 if self._running else 5):
                self._take(self._inbox.recv_multipart())
                continue
            if self._running:
                self.pause()
                self._tick()
        self._outboxes.close()
        self._inbox.close()

    def stop(self) -> None:
        self._stopped.set()
        self.join(10)

    def _take(self, frames: list[bytes]) -> None:
        message = engine_inbox.decode(frames[0])
        if isinstance(message, AbortRequest):
            self.aborted += message.request_ids
            for request_id in message.request_ids:
                self._running.pop(request_id, None)
            return
        self.added.append(message.request_id)
        self._running[message.request_id] = (message, 0)
        opened = open_text(message.request_id, message.route, message.params, message.prompt_tail)
        self._send(message.route.detokenizer, TokenBatch(0, (opened,)))

    def _tick(self) -> None:
        items: dict[int, list[Tokens]] = {}
        for request_id, (message, position) in list(self._running.items()):
            last = position + 1 == message.params.max_tokens
            token = self._answer[position % len(self._answer)]
            tokens = Tokens(request_id, (token,), (2,), finish_reason="length" if last else None)
            items.setdefault(message.route.detokenizer, []).append(tokens)
            if last:
                del self._running[request_id]
            else:
                self._running[request_id] = (message, position + 1)
        for generation, batch in items.items():
            self._send(generation, TokenBatch(0, tuple(batch)))

    def _send(self, generation: int, batch: TokenBatch) -> None:
        self._outboxes.send("detokenizer", 0, generation, [encode(batch)])


class Daemon:
    """Both processes and the engine, introduced to each other."""

    def __init__(self, directory: Path, info: Any, *, answer: str, **sections: dict[str, Any]) -> None:
        model = directory / "model"
        model.mkdir()
        inner = small_tokenizers.byte_level()
        inner.save(str(model / "tokenizer.json"))
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"")
        config = load_config(overrides={"model": {"path": str(model)}} | sections)
        self.info = info
        self.config = dataclasses.replace(config)
        self.run_dir = directory
        self.http = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.http.getsockname()[1]}"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.engine = FakeEngine(self.context, directory, 3, inner.encode(answer).ids)
        self.frontend = Process("frontend", config, directory, self.http, 1)
        self.detokenizer = Process("detokenizer", config, directory, None, 7)

    def __enter__(self) -> Daemon:
        self.engine.start()
        for process in (self.frontend, self.detokenizer):
            assert isinstance(process.receive(), Ready)
        self.frontend.send(PeerUp("engine", 0, 3, self.info))
        self.frontend.send(PeerUp("detokenizer", 0, 7))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.stop()
        self.frontend.kill()
        self.detokenizer.kill()
        self.http.close()
        self.context.term()
