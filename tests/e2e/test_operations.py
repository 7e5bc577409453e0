"""What an operator does to a running daemon: abort, cache reset, log level."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import httpx
import pytest

from proc.running import Running, eventually
from rltd.control import client
from rltd.control.client import ControlError

pytestmark = pytest.mark.e2e

LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 450, "ignore_eos": True}


def cached_tokens(daemon: Running, prompt: list[int]) -> int:
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=20).json()
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_an_abort_ends_one_stream_with_one_error_and_the_engine_drops_it(start):
    daemon = start().ready()
    ids: list[str] = []
    begun = threading.Event()
    events: list[dict] = []
    done: list[int] = []

    def read() -> None:
        body = LONG | {"stream": True, "n": 2}
        with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=30) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done.append(1)
                elif line.startswith("data: "):
                    events.append(json.loads(line[6:]))
                    ids.append(events[-1].get("id", ""))
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(20)
    assert client.abort(daemon.run_dir, ids[0]).count == 2
    reader.join(20)
    assert not reader.is_alive()
    errors = [event["error"] for event in events if "error" in event]
    message = "the operator of the server aborted this request"
    assert errors == [{"message": message, "type": "server_error", "param": None, "code": "aborted"}]
    assert "error" in events[-1]
    assert done == [1]
    assert not any(c["finish_reason"] for event in events for c in event.get("choices", []))
    eventually(lambda: daemon.status().requests == {"running": 0, "waiting": 0}, "the engine has dropped it", 5)
    with pytest.raises(ControlError, match=f"no running request has the id '{ids[0]}'"):
        client.abort(daemon.run_dir, ids[0])
    assert daemon.all_ready()


def test_a_cache_reset_frees_the_cached_pages(start):
    daemon = start("kv.page_size=16").ready()
    prompt = list(range(3, 60))
    assert [cached_tokens(daemon, prompt) for _ in range(2)] == [0, 48]
    before = daemon.status().kv
    assert before["cached"] > 0
    assert client.reset_cache(daemon.run_dir).count == before["cached"]
    after = daemon.status().kv
    assert after == {"free": before["free"] + before["cached"], "used": 0, "cached": 0}
    assert client.reset_cache(daemon.run_dir).message == "0 pages of the prefix cache freed"
    assert cached_tokens(daemon, prompt) == 0


def test_a_log_level_reaches_every_process_and_those_started_later(start):
    daemon = start("log.level=error").ready()

    def busy() -> None:
        httpx.post(f"{daemon.url}/v1/completions", json=LONG | {"max_tokens": 3}, timeout=20)
        client.reset_cache(daemon.run_dir)

    busy()
    client.set_log_level(daemon.run_dir, "info")
    busy()
    daemon.line(r"^\[frontend \d+\] .*tokens 3")
    daemon.line(r"^\[engine \d+\] .*the prefix cache was reset")
    assert daemon.text.count("tokens 3") == daemon.text.count("the prefix cache was reset") == 1
    os.kill(daemon.pid("engine"), signal.SIGKILL)
    daemon.line("all processes are ready again")
    busy()
    daemon.line(r"^\[engine \d+\] .*the prefix cache was reset", count=2)
