"""kill -9 of each process while 32 clients stream: everybody is told once, fast, and the daemon comes back."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from proc.running import Running, eventually, living

pytestmark = pytest.mark.e2e

STREAMS = 32
TOLD_WITHIN_S = 3.0


@dataclass
class Stream:
    """What one client saw."""

    events: list[dict] = field(default_factory=list)
    done: int = 0
    broken: bool = False
    ended_s: float = 0.0

    @property
    def finals(self) -> int:
        finished = [c for e in self.events for c in e.get("choices", []) if c["finish_reason"]]
        return len(finished) + sum("error" in event for event in self.events)


async def read(client: httpx.AsyncClient, url: str, number: int, started: asyncio.Semaphore, tokens: int) -> Stream:
    body = {
        "prompt": [3 + number % 7, 5, 8],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    stream = Stream()
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    stream.done += 1
                elif line.startswith("data: "):
                    stream.events.append(json.loads(line[6:]))
                    started.release()
    except httpx.TransportError:
        stream.broken = True
    stream.ended_s = time.monotonic()
    return stream


async def streams_while(url: str, strike, tokens: int = 450) -> tuple[list[Stream], float]:
    """Run the streams; once each has begun, call `strike`. Returns the streams and the time of the strike."""
    started = asyncio.Semaphore(0)
    limits = httpx.Limits(max_connections=STREAMS + 4)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(client, url, number, started, tokens)) for number in range(STREAMS)]
        for _ in range(4 * STREAMS):
            await started.acquire()
        strike()
        struck_s = time.monotonic()
    return [task.result() for task in tasks], struck_s


def answer(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}, timeout=20)


def idle(daemon: Running) -> bool:
    reply = daemon.status()
    return reply.requests == {"running": 0, "waiting": 0} and reply.kv.get("used") == 0


@pytest.mark.parametrize("role", ["engine", "detokenizer", "frontend"])
def test_every_stream_ends_once_and_the_daemon_recovers(start, role):
    daemon = start().ready()
    url, pid = daemon.url, daemon.pid(role)
    streams, struck_s = asyncio.run(streams_while(url, lambda: os.kill(pid, signal.SIGKILL)))
    assert max(stream.ended_s for stream in streams) - struck_s < TOLD_WITHIN_S
    for stream in streams:
        if role == "frontend":
            assert stream.broken
            assert stream.finals == 0
        else:
            assert (stream.finals, stream.done, stream.broken) == (1, 1, False)
            assert stream.events[-1]["error"]["type"] == "server_error"
            assert "Traceback" not in json.dumps(stream.events[-1])
    eventually(daemon.all_ready, "all processes are ready again")
    eventually(lambda: answer(url).status_code == 200, "answers on the same port")
    eventually(lambda: idle(daemon), "nobody's requests are gone and all pages are back")
    assert {p.role: p.restarts for p in daemon.status().processes}[role] == 1


def test_ready_is_503_while_the_engine_is_away(start):
    daemon = start().ready()
    os.kill(daemon.pid("engine"), signal.SIGKILL)
    statuses = set()

    def back() -> bool:
        refused = answer(daemon.url)
        if refused.status_code == 500:
            # It was on its way before the death was known.
            assert refused.json()["error"]["code"] == "engine_restarted"
        elif refused.status_code != 200:
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            statuses.add(httpx.get(f"{daemon.url}/ready").status_code)
        return refused.status_code == 200

    eventually(back, "the engine is back")
    assert 503 in statuses
    assert httpx.get(f"{daemon.url}/ready").status_code == 200


def test_killed_supervisor_takes_everything_with_it(start):
    daemon = start().ready()
    children = daemon.children()
    streams, struck_s = asyncio.run(streams_while(daemon.url, daemon.process.kill))
    assert max(stream.ended_s for stream in streams) - struck_s < TOLD_WITHIN_S
    assert all(stream.broken and stream.finals == 0 for stream in streams)
    eventually(lambda: not living(children), "the children end", 2)
    daemon.wait()
    assert not any(daemon.base.iterdir())


def test_sigterm_lets_streams_finish_and_leaves_nothing(start):
    daemon = start().ready()
    children = daemon.children()
    streams, _ = asyncio.run(streams_while(daemon.url, lambda: daemon.process.send_signal(signal.SIGTERM), 100))
    assert daemon.wait(40) == 0
    # Every line of the mixed output is one process's: the daemon's own, or one with its child's mark.
    daemon.line(r"^SIGTERM: finishing running requests \(at most 30 s\); again to stop at once$")
    assert all(re.match(r"rlt |ready in |SIGTERM: |\[[a-z]+ \d+\] ", line) for line in daemon.text.splitlines())
    for stream in streams:
        assert (stream.finals, stream.done, stream.broken) == (1, 1, False)
        assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
    assert not living(children)
    assert not any(daemon.base.iterdir())


def test_drain_limit_ends_streams_with_an_error(start):
    daemon = start("server.drain_timeout_s=0.3").ready()
    streams, struck_s = asyncio.run(streams_while(daemon.url, lambda: daemon.process.send_signal(signal.SIGTERM)))
    assert daemon.wait() == 0
    assert max(stream.ended_s for stream in streams) - struck_s < TOLD_WITHIN_S
    assert all((stream.finals, stream.done, stream.broken) == (1, 1, False) for stream in streams)
    assert "error" in streams[0].events[-1]


def test_second_signal_ends_at_once(start):
    daemon = start().ready()
    children = daemon.children()

    def twice() -> None:
        daemon.process.send_signal(signal.SIGTERM)
        daemon.line("finishing running requests")
        daemon.process.send_signal(signal.SIGTERM)

    streams, struck_s = asyncio.run(streams_while(daemon.url, twice))
    assert max(stream.ended_s for stream in streams) - struck_s < TOLD_WITHIN_S
    assert daemon.wait(5) != 0
    assert not living(children)
    assert not any(daemon.base.iterdir())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(start, stream):
    daemon = start().ready()

    async def leave() -> None:
        body = {"prompt": [5], "max_tokens": 450, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient(timeout=30) as client:
            task = asyncio.create_task(client.post(f"{daemon.url}/v1/completions", json=body))
            await asyncio.to_thread(eventually, lambda: daemon.status().requests["running"] == 1, "it runs")
            task.cancel()

    asyncio.run(leave())
    left_s = time.monotonic()
    eventually(lambda: idle(daemon), "the request is gone", 2)
    assert time.monotonic() - left_s < 1


def test_children_carry_role_and_pid_in_their_output(start):
    daemon = start().ready()
    answer(daemon.url)
    daemon.line(rf"^\[frontend {daemon.pid('frontend')}\] .*tokens 3")


def test_all_processes_fit(start):
    daemon = start().ready()
    answer(daemon.url)
    family = [psutil.Process(daemon.process.pid), *daemon.children()]
    assert sum(process.memory_info().rss for process in family) < 1.5e9
