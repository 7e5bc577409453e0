"""The frontend's app with everything behind it replaced by fakes that do exactly what a test says."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import ASGIApp

from rlt.config import ServerConfig
from rlt.text.chat import ChatTemplate
from rlt.text.reasoning import ReasoningSetting
from rlt.text.tokenizer import Tokenizer
from rlt_protocols.codec import unpack_ids
from rlt_protocols.control import PeerDown, PeerUp, Role
from rlt_protocols.engine import AbortRequest, AddRequest, engine_inbox
from rlt_protocols.params import ModelInfo
from rlt_protocols.text import TextBatch, TextDelta
from rltd.frontend.app import Api
from rltd.frontend.engine_client import EngineClient
from rltd.frontend.metrics import Metrics
from rltd.frontend.prepare import Preparer
from rltd.frontend.server import make_server
from text import small_tokenizers

TOKENIZER = Tokenizer(small_tokenizers.byte_level())
CHATML = (
    "{% for m in messages %}{{ '<|user|>' + m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant:"
    "{% if enable_thinking %}<think>{% elif enable_thinking is defined %}<think></think>{% endif %}{% endif %}"
)
INFO = ModelInfo(
    name="tiny",
    family="ouro",
    vocab_size=1000,
    max_model_len=64,
    loops=4,
    min_loops=1,
    max_loops=4,
    exit_threshold=0.5,
    eos_token_ids=(0,),
    kv_tokens=1000,
)


@dataclass
class Added:
    """A request as the engine got it."""

    header: AddRequest
    prompt: list[int]

    @property
    def id(self) -> str:
        return self.header.request_id


@dataclass
class FakeBackend:
    """Takes the frontend's messages. Unless `hold`, answers every request at once with `pieces`."""

    hold: bool = False
    pieces: Sequence[str] = ("Hel", "lo", "")
    finish_reason: Any = "stop"
    stop_reason: int | str | None = None
    error: str | None = None
    added: list[Added] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    dropped: list[tuple[Role, int, int]] = field(default_factory=list)
    client: EngineClient = field(init=False)

    def send(self, role: Role, index: int, generation: int, frames: Sequence[bytes]) -> bool:
        assert (role, generation) == ("engine", 3 + index * 10)
        message = engine_inbox.decode(frames[0])
        if isinstance(message, AbortRequest):
            self.aborted += message.request_ids
            return True
        added = Added(message, unpack_ids(frames[1]))
        self.added.append(added)
        if not self.hold:
            asyncio.get_running_loop().call_soon(self.answer, added)
        return True

    def drop(self, role: Role, index: int, generation: int) -> None:
        self.dropped.append((role, index, generation))

    def answer(self, added: Added) -> None:
        """Give one token per piece, the depths counting up from 1, the last with the finish reason."""
        for number, piece in enumerate(self.pieces):
            last = number == len(self.pieces) - 1
            self.deliver(
                added,
                text=piece,
                token_ids=(100 + number,),
                depths=(number % 4 + 1,),
                finish_reason=self.finish_reason if last else None,
                stop_reason=self.stop_reason if last else None,
                error=self.error if last else None,
                cached_tokens=1,
            )

    def deliver(self, added: Added, **fields: Any) -> None:
        self.client.on_text(TextBatch((TextDelta(added.id, **fields),)))

    async def wait_added(self, count: int = 1) -> list[Added]:
        """The first `count` requests, as soon as they are there."""
        await until(lambda: len(self.added) >= count)
        return self.added[:count]


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Served:
    backend: FakeBackend
    client: EngineClient
    app: ASGIApp
    http: httpx.AsyncClient

    def up(self, role: Role, index: int = 0, generation: int | None = None) -> None:
        if generation is None:
            generation = 3 + index * 10 if role == "engine" else 7
        self.client.on_peer_up(PeerUp(role, index, generation, INFO if role == "engine" else None))

    def down(self, role: Role, index: int = 0, generation: int | None = None) -> None:
        if generation is None:
            generation = 3 + index * 10 if role == "engine" else 7
        self.client.on_peer_down(PeerDown(role, index, generation))

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "hello"} | body)

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}]} | body
        )


@asynccontextmanager
async def served(
    *,
    up: bool = True,
    max_queue: int = 64,
    max_body_bytes: int = 1 << 20,
    tokenizer: Tokenizer | None = TOKENIZER,
    template: ChatTemplate | None = None,
    enable_thinking: bool | None = None,
    reasoning: ReasoningSetting = "auto",
    settings: Mapping[str, Any] | None = None,
    **backend_fields: Any,
) -> AsyncIterator[Served]:
    """The app on an ASGI transport; `settings` are further keys of [server]."""
    backend = FakeBackend(**backend_fields)
    metrics = Metrics()
    client = EngineClient(backend.send, 1, metrics, max_queue=max_queue, drop=backend.drop)
    backend.client = client
    chat_template = template or (ChatTemplate(CHATML) if tokenizer is not None else None)
    preparer = Preparer(
        tokenizer, chat_template, max_answers=max_queue, enable_thinking=enable_thinking, reasoning=reasoning
    )
    with ThreadPoolExecutor(1) as workers:
        server = ServerConfig(max_body_bytes=max_body_bytes, max_queue=max_queue, **(settings or {}))
        api = Api(client, preparer, metrics, workers, server)
        app = api.app()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://rlt") as http:
            result = Served(backend, client, app, http)
            if up:
                result.up("engine")
                result.up("detokenizer")
            yield result


async def answered(server: Served, request: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """Let the reader take every piece before the next one comes."""
    task = asyncio.create_task(request)
    await server.backend.wait_added()
    pieces = server.backend.pieces
    for number, piece in enumerate(pieces):
        for one in server.backend.added:
            server.backend.deliver(
                one,
                text=piece,
                token_ids=(100 + number,),
                depths=(number % 4 + 1,),
                finish_reason=server.backend.finish_reason if number == len(pieces) - 1 else None,
                cached_tokens=1,
            )
        await asyncio.sleep(0.01)
    return await task


@asynccontextmanager
async def on_socket(app: ASGIApp, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The app on a real server; yields its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    server = make_server(app, tls)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


def events(text: str) -> list[Any]:
    """The events of a stream; checks the framing byte for byte."""
    assert text.endswith("data: [DONE]\n\n")
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a JSON answer; checks its shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error
