"""What bounds a client's use of the server beyond single fields, and what errors tell about its inside."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from frontend.harness import error_of, events, on_socket, served, until
from frontend.test_socket import connect, post
from rltd.frontend import body as body_module
from rltd.frontend import server as server_module
from rltd.frontend.prepare import Preparer
from rltd.frontend.shapes import CompletionShape


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_its_time(stream: bool) -> None:
    async with served(hold=True, settings={"request_timeout_s": 0.2}) as server:
        task = asyncio.create_task(server.complete(stream=stream, n=2))
        first, second = await server.backend.wait_added(2)
        server.backend.deliver(first, text="a", token_ids=(1,), depths=(1,), finish_reason="stop")
        response = await task
        error = events(response.text)[-1]["error"] if stream else error_of(response)
        assert error["code"] == "request_timeout"
        assert "0.2 seconds" in error["message"]
        assert response.status_code == (200 if stream else 503)
        assert server.backend.aborted == [second.id]
        assert server.client.active == 0
        server.backend.hold = False
        assert (await server.complete(stream=stream)).status_code == 200


async def test_time_counts_from_the_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(hold=True, settings={"request_timeout_s": 60.0}) as server:
        early = SimpleNamespace(monotonic=lambda: time.monotonic() - 59.9)
        monkeypatch.setattr("rltd.frontend.app.time", early)
        assert error_of(await asyncio.wait_for(server.complete(), 10))["code"] == "request_timeout"


async def test_bodies_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "MAX_BODIES_BYTES", 10_000)
    async with served(max_body_bytes=6000) as server, on_socket(server.app) as url:
        _, writer = await connect(url)
        writer.write(post("/v1/completions", b" " * 5000, "Content-Length: 6000"))
        async with httpx.AsyncClient(base_url=url) as http:
            json = {"prompt": "x", "user": "u" * 5500}
            await asyncio.sleep(0.05)
            refused = await http.post("/v1/completions", json=json)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
            writer.close()
            async with asyncio.timeout(10):
                while (await http.post("/v1/completions", json=json)).status_code != 200:
                    await asyncio.sleep(0.01)


async def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_TIMEOUT_S", 0.2)
    async with served(hold=True) as server, on_socket(server.app) as url:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", httpx.URL(url).port or 0))
            await loop.sock_sendall(client, post("/v1/completions", b'{"prompt": "x", "stream": true}'))
            (added,) = await server.backend.wait_added()
            for _ in range(20):
                server.backend.deliver(added, text="x" * 1_000_000, token_ids=(1,), depths=(1,))
                await asyncio.sleep(0)
            await until(lambda: server.client.active == 0)
        assert server.backend.aborted == [added.id]


async def test_a_client_that_reads_slowly_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_TIMEOUT_S", 0.5)
    size = 12_000_000
    async with served(hold=True) as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        writer.write(post("/v1/completions", b'{"prompt": "x", "stream": true}'))
        (added,) = await server.backend.wait_added()
        server.backend.deliver(added, text="x" * size, token_ids=(1,), depths=(1,), finish_reason="stop")
        started_s = asyncio.get_running_loop().time()
        data = bytearray()
        while b"data: [DONE]" not in data[-200:]:
            piece = await reader.read(1 << 20)
            assert piece, "cut off"
            data += piece
            await asyncio.sleep(0.02)
        assert data.count(b"x") >= size
        assert asyncio.get_running_loop().time() - started_s > 1, "longer than the limit"
        writer.close()


async def test_equal_ids_of_clients_do_not_collide() -> None:
    async with served(hold=True) as server:
        headers = {"X-Request-Id": "mine"}
        tasks = [
            asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers))
            for _ in range(2)
        ]
        first, second = await server.backend.wait_added(2)
        assert first.id != second.id
        assert "mine" not in first.id + second.id
        for one, text in ((second, "two"), (first, "one")):
            server.backend.deliver(one, text=text, token_ids=(1,), depths=(1,), finish_reason="stop")
        answers = [await task for task in tasks]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == ["one", "two"]
        assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]


SECRET = "/home/secret/weights.py line 7"


def _breaks(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError(SECRET)


@pytest.mark.parametrize(
    ("owner", "name", "stream"),
    [
        (Preparer, "completion", False),
        (CompletionShape, "whole", False),
        (CompletionShape, "chunk", True),
        (CompletionShape, "usage_chunk", True),
    ],
)
async def test_an_internal_error_tells_nothing_but_its_id(
    owner: type, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with served() as server, on_socket(server.app) as url, httpx.AsyncClient(base_url=url) as http:
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(owner, name, _breaks)
            response = await http.post("/v1/completions", json={"prompt": "x"} | options)
        request_id = response.headers["x-request-id"]
        error = events(response.text)[-1]["error"] if stream else error_of(response)
        assert response.status_code == (200 if stream else 500)
        assert error == {
            "message": f"internal error; the request id is {request_id}",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert "secret" not in response.text
        assert "Traceback" not in response.text
        assert SECRET in caplog.text, "the log has what the client does not get"
        assert server.client.active == 0
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
