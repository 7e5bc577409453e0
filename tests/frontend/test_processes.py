"""The two processes as the supervisor starts them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from frontend.harness import INFO, events
from frontend.processes import Daemon
from rlt_protocols.control import Drain, Drained, PeerDown, StatusQuery, StatusReply

TEXT = "hello world, hello there! "


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with TemporaryDirectory(prefix="rlt-") as path, Daemon(Path(path), INFO, answer=TEXT) as daemon:
        yield daemon


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def wait_ready(http: httpx.Client) -> None:
    wait_until(lambda: http.get("/ready").status_code == 200)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, rltd.frontend.main, rltd.detokenizer.main\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_life(daemon: Daemon) -> None:
    with httpx.Client(base_url=daemon.url, timeout=20) as http:
        wait_ready(http)
        body = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 12, "return_depths": True}).json()
        choice = body["choices"][0]
        assert TEXT.startswith(choice["text"][:10])
        assert choice["depths"] == [2] * 12
        assert choice["finish_reason"] == "length"
        response = http.post("/v1/completions", json={"prompt": "hello", "stop": "there", "stream": True})
        chunks = events(response.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world, hello "
        assert chunks[-1]["choices"][0]["stop_reason"] == "there"
        wait_until(lambda: daemon.engine.aborted == [chunks[0]["id"] + "-0"])
        for process in (daemon.frontend, daemon.detokenizer):
            process.send(StatusQuery(5))
            assert process.receive() == StatusReply(5, {"active": 0.0})
            assert "torch" not in process.mapped_files()

        daemon.engine.pause = lambda: time.sleep(0.05)
        with ThreadPoolExecutor() as pool:
            late = pool.submit(http.post, "/v1/completions", json={"prompt": "a", "max_tokens": 10, "stream": True})
            wait_until(lambda: len(daemon.engine.added) == 3)
            daemon.frontend.send(Drain(20))
            assert "error" not in events(late.result().text)[-1]
    assert daemon.frontend.receive() == Drained()
    assert daemon.frontend.end() == 0
    assert daemon.detokenizer.end() == 0


def test_a_client_that_leaves(daemon: Daemon) -> None:
    daemon.engine.pause = lambda: time.sleep(0.02)
    with httpx.Client(base_url=daemon.url, timeout=20) as http:
        wait_ready(http)
        with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            next(response.iter_lines())
        wait_until(lambda: daemon.engine.aborted == daemon.engine.added)


def test_stop_ends_what_runs(daemon: Daemon) -> None:
    daemon.engine.pause = lambda: time.sleep(0.2)
    with httpx.Client(base_url=daemon.url, timeout=20) as http, ThreadPoolExecutor() as pool:
        wait_ready(http)
        late = pool.submit(http.post, "/v1/completions", json={"prompt": "a", "stream": True})
        wait_until(lambda: bool(daemon.engine.added))
        assert daemon.frontend.end() == 0
        assert events(late.result().text)[-1]["error"]["code"] == "draining"


def test_an_engine_that_dies(daemon: Daemon) -> None:
    daemon.engine.pause = lambda: time.sleep(0.2)
    with httpx.Client(base_url=daemon.url, timeout=20) as http, ThreadPoolExecutor() as pool:
        wait_ready(http)
        streams = [pool.submit(http.post, "/v1/completions", json={"prompt": "a", "stream": True}) for _ in range(3)]
        wait_until(lambda: len(daemon.engine.added) == 3)
        for process in (daemon.frontend, daemon.detokenizer):
            process.send(PeerDown("engine", 0, 3))
        for stream in streams:
            assert [("error" in chunk) for chunk in events(stream.result().text)][-1]
        assert http.get("/health").status_code == 503


def test_a_model_that_cannot_be_used_is_told_to_the_supervisor() -> None:
    with TemporaryDirectory(prefix="rlt-") as path:
        from frontend.processes import Process
        from rlt.config import load_config
        from rlt_protocols.control import Fatal

        config = load_config(overrides={"model": {"path": str(Path(path) / "none")}})
        for role in ("frontend", "detokenizer"):
            process = Process(role, config, Path(path), None, 1)  # type: ignore[arg-type]
            message = process.receive()
            assert isinstance(message, Fatal)
            assert message.usage
            assert process.popen.wait(10) == 2
            process.kill()
