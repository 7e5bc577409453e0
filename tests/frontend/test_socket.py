"""The app behind its real server on a loopback socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from tokenizers import normalizers

from frontend.harness import Served, events, on_socket, served, until
from rlt.text.tokenizer import Tokenizer
from rltd.frontend import server as server_module
from text import small_tokenizers


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    assert parts.port is not None
    return await asyncio.open_connection(parts.hostname, parts.port)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if not any(header.startswith(("Content-Length", "Transfer-Encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(stream: bool) -> None:
    async with served(hold=True) as server, on_socket(server.app) as url:
        _, writer = await connect(url)
        writer.write(post("/v1/completions", json.dumps({"prompt": "x", "stream": stream, "n": 2}).encode()))
        added = await server.backend.wait_added(2)
        writer.close()
        await until(lambda: len(server.backend.aborted) == 2)
        assert server.backend.aborted == [one.id for one in added]
        assert server.client.active == 0


async def test_events_arrive_one_by_one() -> None:
    async with served(hold=True) as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        writer.write(post("/v1/completions", b'{"prompt": "x", "stream": true}'))
        (added,) = await server.backend.wait_added()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"content-type: text/event-stream" in head
        for text in ("a", "b"):
            server.backend.deliver(added, text=text, token_ids=(1,), depths=(1,))
            assert f'"text":"{text}"'.encode() in await reader.readuntil(b"\n\n")
        server.backend.deliver(added, finish_reason="stop")
        await reader.readuntil(b"data: [DONE]\n\n")
        # the connection serves the next request
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_fifty_megabytes_are_refused_and_the_client_sees_it(chunked: bool) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * (1 << 20)

    async with served() as server, on_socket(server.app) as url, httpx.AsyncClient(base_url=url) as http:
        headers = {"Content-Type": "application/json"} | ({} if chunked else {"Content-Length": str(50 << 20)})
        response = await http.post("/v1/completions", content=body(), headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_a_client_that_never_stops_sending_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_DISCARDED_BYTES", 1 << 20)
    async with served() as server, on_socket(server.app) as url:
        _, writer = await connect(url)
        writer.write(post("/v1/completions", b"", "Transfer-Encoding: chunked"))

        async def send_for_ever() -> None:
            while True:
                writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                await writer.drain()

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_for_ever(), 20)
        writer.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (post("/v1/completions", b"zz\r\n", "Transfer-Encoding: chunked"), b"400"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 140_000, b"431"),
        (b"GET /" + b"a" * 140_000, b"431"),
    ],
)
async def test_what_is_no_http_gets_a_json_error_and_harms_nobody(data: bytes, status: bytes) -> None:
    async with served() as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        for start in range(0, len(data), 50_000):
            writer.write(data[start : start + 50_000])
            await asyncio.sleep(0.001)
        answer = await reader.read()
        assert answer.split(b" ")[1] == status
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"error"}
        assert len(answer.partition(b"x-request-id: ")[2].split(b"\r\n")[0]) == 32
        writer.close()
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/health")).status_code == 200


async def test_connections_without_a_request_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_TIMEOUT_S", 0.05)
    async with served() as server, on_socket(server.app) as url:
        for data in (b"", b"GET / HT", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET"):
            reader, writer = await connect(url)
            writer.write(data)
            await asyncio.wait_for(reader.read(), 10)
            writer.close()


async def test_a_slow_reader_gets_everything_and_holds_little() -> None:
    async with served(hold=True) as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        writer.write(post("/v1/completions", b'{"prompt": "x", "stream": true}'))
        (added,) = await server.backend.wait_added()
        for _ in range(300):
            server.backend.deliver(added, text="x" * 10_000, token_ids=(1,), depths=(1,))
            await asyncio.sleep(0)
        server.backend.deliver(added, finish_reason="stop")
        await asyncio.sleep(0.05)
        data = await asyncio.wait_for(_read_all(reader), 20)
        assert data.count(b"x" * 1000) >= 1
        assert data.count(b"x") >= 3_000_000
        writer.close()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while b"data: [DONE]" not in data[-200:]:
        data += await reader.read(1 << 16)
    return bytes(data)


async def _openai_async(server: Served, url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        messages: Any = [{"role": "user", "content": "hi"}]
        answer = await api.chat.completions.create(model="tiny", messages=messages)
        assert answer.choices[0].message.content == "Hello"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        messages += [answer.choices[0].message.model_dump(), messages[0]]
        stream = await api.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
        assert chunks[-1].usage is not None
        completion = await api.completions.create(
            model="tiny", prompt=["a", "b"], extra_body={"return_depths": True, "max_loops": 2}
        )
        assert [choice.text for choice in completion.choices] == ["Hello", "Hello"]
        assert completion.choices[0].model_extra is not None
        assert completion.choices[0].model_extra["depths"] == [1, 2, 3]
        models = await api.models.list()
        assert [model.id for model in models.data] == ["tiny"]
        assert (await api.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.BadRequestError, match="not supported yet") as caught:
            await api.chat.completions.create(model="tiny", messages=messages, reasoning_effort="high")
        assert caught.value.param == "reasoning_effort"
        with pytest.raises(openai.NotFoundError):
            await api.completions.create(model="other", prompt="x")
        server.backend.finish_reason, server.backend.error = "error", "it broke"
        with pytest.raises(openai.InternalServerError, match="it broke"):
            await api.completions.create(model="tiny", prompt="x")
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in await api.completions.create(model="tiny", prompt="x", stream=True):
                pass
        server.down("engine")
        with pytest.raises(openai.InternalServerError, match="restarting"):
            await api.completions.create(model="tiny", prompt="x")


async def test_the_openai_client() -> None:
    async with served() as server, on_socket(server.app) as url:
        await _openai_async(server, url)


async def test_the_synchronous_openai_client() -> None:
    def use(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            whole = api.completions.create(model="tiny", prompt="x").choices[0].text
            with api.completions.create(model="tiny", prompt="x", stream=True) as stream:
                return whole, "".join(chunk.choices[0].text for chunk in stream)

    async with served() as server, on_socket(server.app) as url:
        assert await asyncio.to_thread(use, url) == ("Hello", "Hello")


async def test_sixty_four_streams_at_once() -> None:
    async with served(hold=True, max_queue=64) as server, on_socket(server.app) as url:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as http:
            body = {"prompt": "x", "stream": True}
            tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(64)]
            added = await server.backend.wait_added(64)
            for number in range(20):
                for one in added:
                    server.backend.deliver(one, text=f"{number} ", token_ids=(1,), depths=(2,))
                await asyncio.sleep(0.005)
            for one in added:
                server.backend.deliver(one, finish_reason="stop")
            for task in tasks:
                chunks = events((await task).text)
                whole = "".join(chunk["choices"][0]["text"] for chunk in chunks)
                assert whole == "".join(f"{number} " for number in range(20))


@pytest.mark.parametrize(("path", "status"), [("/tokenize", 200), ("/v1/completions", 400)])
async def test_a_long_text_does_not_keep_others_waiting(path: str, status: int) -> None:
    # The tokenizer has no limit on what one token stands for, so the text is tokenized to its end on both paths.
    inner = small_tokenizers.byte_level()
    inner.normalizer = normalizers.Strip()
    longest = 0.0
    async with (
        served(tokenizer=Tokenizer(inner), max_body_bytes=4 << 20) as server,
        on_socket(server.app) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        clock = asyncio.get_running_loop().time
        started = clock()
        long = asyncio.create_task(http.post(path, json={"prompt": "1 " * 400_000}))
        while not long.done():
            asked = clock()
            assert (await http.get("/health")).status_code == 200
            longest = max(longest, clock() - asked)
        assert long.result().status_code == status
        # Held by the tokenizer, the interpreter lock would make one of these wait for nearly all of it.
        assert longest < (clock() - started) / 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "1" * 10_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1" * 10_000}]}),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    async with served() as server:
        response = await server.http.post(path, json=fields)
        assert response.status_code == 400
        assert "tokens; the model's context is 64 tokens" in response.json()["error"]["message"]
        assert "has at least" in response.json()["error"]["message"]


UPGRADES = [
    ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"),
    ("Connection: keep-alive, upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
]


@pytest.mark.parametrize("headers", UPGRADES, ids=["h2c", "websocket"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_an_upgrade_is_ignored(headers: tuple[str, ...], chunked: bool, piece: int) -> None:
    body = b'{"prompt": "x"}'
    if chunked:
        headers = (*headers, "Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with served() as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        data = post("/v1/completions", body, *headers, "X-Request-Id: up-1") * 2
        for start in range(0, len(data), piece):
            writer.write(data[start : start + piece])
            await writer.drain()
        for _ in range(2):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert head.startswith(b"HTTP/1.1 200")
            assert b"x-request-id: up-1" in head
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert json.loads(await reader.readexactly(length))["choices"][0]["text"] == "Hello"
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n" + "\r\n".join(headers[:3]).encode() + b"\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_connect_is_refused() -> None:
    async with served() as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        writer.write(b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n\x16\x03")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 405")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "method_not_allowed"
        writer.close()


@pytest.mark.parametrize(
    "headers",
    [
        b"A: " + b"a" * 10_000 + b"\r\n",
        b"a:\r\n" * 3_000,
        b"Connection: upgrade\r\nUpgrade: " + b"a" * 10_000 + b"\r\n",
    ],
)
async def test_headers_that_come_in_one_piece_are_limited_too(headers: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # a small limit: the real one is more than a socket surely takes at once
    monkeypatch.setattr(server_module, "MAX_HEADER_BYTES", 8 << 10)
    async with served() as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 431")
        assert answer.count(b"HTTP/1.1") == 1
        writer.close()


async def test_a_refused_request_keeps_its_id() -> None:
    async with served() as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        writer.write(b"GET /version HTTP/1.1\r\nX-Request-Id: me-1\r\nContent-Length: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"\r\nx-request-id: me-1\r\n" in answer
        writer.close()


@pytest.mark.parametrize("keep_alive", [False, True])
async def test_a_stream_for_http_1_0_ends_with_the_connection(keep_alive: bool) -> None:
    async with served() as server, on_socket(server.app) as url:
        for stream in (True, False):
            reader, writer = await connect(url)
            data = post("/v1/completions", json.dumps({"prompt": "x", "stream": stream}).encode())
            wish = b"Connection: keep-alive\r\n" if keep_alive else b""
            writer.write(data.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n" + wish, 1))
            head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            if stream:
                assert "".join(chunk["choices"][0]["text"] for chunk in events(body.decode())) == "Hello"
            else:
                assert json.loads(body)["choices"][0]["text"] == "Hello"
            writer.close()


@pytest.mark.parametrize(("path", "length"), [("/nothing", 100), ("/v1/completions", 100_000_000)])
async def test_the_rest_of_a_body_that_nobody_reads_has_its_time(
    path: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DISCARD_TIMEOUT_S", 0.1)
    async with served() as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        writer.write(post(path, b"", f"Content-Length: {length}"))
        assert (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1] in (b"404", b"413")

        async def drip() -> None:
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 10)
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        writer.close()


async def test_a_body_that_ends_in_time_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "DISCARD_TIMEOUT_S", 0.3)
    async with served() as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        writer.write(post("/nothing", b"", "Content-Length: 10"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        writer.write(b" " * 10)
        await asyncio.sleep(0.5)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1 200" in await reader.readuntil(b"\r\n\r\n")
        writer.close()


async def test_bytes_between_requests_do_not_hold_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_TIMEOUT_S", 0.1)
    async with served() as server, on_socket(server.app) as url:
        reader, writer = await connect(url)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\r\n")
        await asyncio.wait_for(reader.read(), 10)
        writer.close()
