"""Every accepted request has exactly one end, whoever dies, leaves, drains or is slow."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from frontend.harness import Added, Served, error_of, events, served, until
from rltd.frontend.job import Failure


async def _streams(server: Served, count: int) -> list[asyncio.Task[Any]]:
    """Running streams with one token each."""
    tasks = [asyncio.create_task(server.complete(stream=True)) for _ in range(count)]
    for added in await server.backend.wait_added(count):
        server.backend.deliver(added, text="a", token_ids=(1,), depths=(1,))
    await asyncio.sleep(0.01)
    return tasks


async def test_an_error_in_the_middle_of_a_stream_is_one_event() -> None:
    async with served(hold=True) as server:
        (task,) = await _streams(server, 1)
        added = server.backend.added[0]
        for _ in range(2):
            server.backend.deliver(added, text="lost", finish_reason="error", error="it broke")
        first, last = events((await task).text)
    assert first["choices"][0]["text"] == "a"
    assert last == {"error": {"message": "it broke", "type": "server_error", "param": None, "code": "internal_error"}}


@pytest.mark.parametrize("role", ["engine", "detokenizer"])
async def test_death_of_a_process_ends_its_requests_once(role: Any) -> None:
    async with served(hold=True) as server:
        streams = await _streams(server, 3)
        whole = asyncio.create_task(server.complete())
        added = await server.backend.wait_added(4)
        server.down(role)
        for one in added:
            server.backend.deliver(one, text="late", finish_reason="stop")
        for stream in streams:
            _, last = events((await stream).text)
            assert last["error"]["code"] == f"{role}_restarted"
        response = await whole
        assert response.status_code == 500
        assert error_of(response)["code"] == f"{role}_restarted"
        assert sorted(server.backend.aborted) == (sorted(one.id for one in added) if role == "detokenizer" else [])
        assert server.client.active == 0
        assert server.backend.dropped == [(role, 0, 3 if role == "engine" else 7)]

        assert (await server.http.get("/health")).status_code == 503
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.complete()).status_code == 503
        assert (await server.http.get("/v1/models")).status_code == 200
        server.backend.hold = False
        server.up(role)
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.complete()).status_code == 200


async def test_an_operator_ends_one_answer_with_all_its_choices() -> None:
    async with served(hold=True) as server:
        (other,) = await _streams(server, 1)
        stream = asyncio.create_task(server.complete(stream=True, n=2))
        _, *added = await server.backend.wait_added(3)
        answer_id = added[0].id.removesuffix("-0")
        server.backend.deliver(added[1], text="b", token_ids=(1,), depths=(1,))
        await asyncio.sleep(0.01)
        failure = Failure("somebody stopped it", "aborted")
        assert server.client.end_answer(answer_id[:-1], failure) == 0
        assert server.client.end_answer(answer_id, failure) == 2
        assert server.client.end_answer(answer_id, failure) == 0
        server.backend.deliver(added[1], text="late", finish_reason="stop")
        first, last = events((await stream).text)
        assert (first["id"], first["choices"][0]["text"]) == (answer_id, "b")
        assert last["error"] == {
            "message": "somebody stopped it",
            "type": "server_error",
            "param": None,
            "code": "aborted",
        }
        assert server.backend.aborted == [one.id for one in added]
        assert server.client.active == 1
        server.backend.deliver(server.backend.added[0], finish_reason="length")
        assert "error" not in events((await other).text)[-1]


async def test_an_operator_ends_an_answer_that_is_no_stream() -> None:
    async with served(hold=True) as server:
        whole = asyncio.create_task(server.chat())
        (added,) = await server.backend.wait_added()
        assert server.client.end_answer(added.id.removesuffix("-0"), Failure("somebody stopped it", "aborted")) == 1
        response = await whole
        assert (response.status_code, error_of(response)["code"]) == (500, "aborted")


async def test_a_successor_without_a_death_notice_ends_the_old_requests() -> None:
    async with served(hold=True) as server:
        (stream,) = await _streams(server, 1)
        server.up("detokenizer", generation=8)
        _, last = events((await stream).text)
        assert last["error"]["code"] == "detokenizer_restarted"
        assert (await server.http.get("/health")).status_code == 200


async def test_a_late_death_notice_of_an_older_life_changes_nothing() -> None:
    async with served(hold=True) as server:
        (stream,) = await _streams(server, 1)
        server.down("engine", generation=2)
        assert server.client.healthy
        server.backend.deliver(server.backend.added[0], finish_reason="length")
        assert events((await stream).text)[-1]["choices"][0]["finish_reason"] == "length"


async def test_requests_are_spread_and_only_the_dead_engines_are_lost() -> None:
    async with served(hold=True) as server:
        server.up("engine", 1)
        streams = await _streams(server, 4)
        routes = [(one.header.route.frontend, one.header.route.engine) for one in server.backend.added]
        assert routes == [(1, 3), (1, 13), (1, 3), (1, 13)]
        server.down("engine", 1)
        for one in server.backend.added:
            server.backend.deliver(one, finish_reason="stop")
        ends = [events((await stream).text)[-1] for stream in streams]
        assert [("error" in end) for end in ends] == [False, True, False, True]
        assert (await server.http.get("/ready")).status_code == 200


async def test_one_broken_answer_ends_the_others_of_its_request() -> None:
    async with served(hold=True) as server:
        task = asyncio.create_task(server.complete(stream=True, n=3))
        added = await server.backend.wait_added(3)
        server.backend.deliver(added[0], text="x", token_ids=(1,), depths=(1,), finish_reason="stop")
        server.backend.deliver(added[1], finish_reason="error", error="broken")
        chunks = events((await task).text)
        assert [("error" in chunk) for chunk in chunks] == [False, True]
        assert server.backend.aborted == [added[2].id]


async def test_a_bug_while_writing_is_one_event_and_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(hold=True) as server:
        (stream,) = await _streams(server, 1)
        monkeypatch.setattr("rltd.frontend.shapes.CompletionShape._chunk", lambda *_: 1 / 0)
        server.backend.deliver(server.backend.added[0], text="b", token_ids=(1,), depths=(1,))
        assert events((await stream).text)[-1]["error"]["code"] == "internal_error"
        assert server.backend.aborted == [server.backend.added[0].id]


async def test_drain_lets_requests_finish() -> None:
    async with served(hold=True) as server:
        (stream,) = await _streams(server, 1)
        drain = asyncio.create_task(server.client.drain(10))
        await asyncio.sleep(0.01)
        response = await server.complete()
        assert response.status_code == 503
        assert error_of(response)["code"] == "draining"
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200
        assert not drain.done()
        server.backend.deliver(server.backend.added[0], finish_reason="stop")
        await drain
        assert "error" not in events((await stream).text)[-1]


async def test_drain_ends_what_takes_too_long() -> None:
    async with served(hold=True) as server:
        (stream,) = await _streams(server, 1)
        await server.client.drain(0.02)
        assert events((await stream).text)[-1]["error"]["code"] == "draining"
        assert server.backend.aborted == [server.backend.added[0].id]


async def test_drain_of_an_idle_server_is_over_at_once() -> None:
    async with served() as server:
        await asyncio.wait_for(server.client.drain(60), 1)


async def test_deltas_for_unknown_requests_are_dropped() -> None:
    async with served() as server:
        header = type("Header", (), {"request_id": "nobody"})()
        server.backend.deliver(Added(header, []), text="x", finish_reason="stop")
        assert (await server.complete()).status_code == 200


async def test_one_line_in_the_log_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rltd.frontend")
    async with served() as server:
        await server.http.post("/v1/completions", json={"prompt": "hello"}, headers={"X-Request-Id": "mine"})
    (line,) = [record.getMessage() for record in caplog.records if "cmpl-" in record.getMessage()]
    assert "(mine): done" in line
    assert "tokens 3" in line
    assert "loops 2.00" in line
    assert "reasons stop" in line


async def test_pending_text_of_a_client_that_does_not_read_is_merged() -> None:
    async with served(hold=True) as server:
        task = asyncio.create_task(server.complete(stream=True, return_token_ids=True))
        (added,) = await server.backend.wait_added()
        for number in range(1000):
            server.backend.deliver(added, text="x", token_ids=(number,), depths=(1,))
        server.backend.deliver(added, finish_reason="length")
        (chunk,) = events((await task).text)
        assert chunk["choices"][0]["text"] == "x" * 1000
        assert chunk["choices"][0]["token_ids"] == list(range(1000))
        await until(lambda: server.client.active == 0)
