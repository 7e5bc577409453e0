"""An OpenAI-compatible server on a thread, which answers what a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: from a request's path and body to a status and the answer
Reply = Callable[[str, dict[str, Any]], tuple[int, Any]]


class FakeEndpoint:
    def __init__(self, reply: Reply, models: Any, delay_s: float) -> None:
        self.reply, self.models, self.delay_s = reply, models, delay_s
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.url = ""


@contextmanager
def serving(reply: Reply, models: Any = None, delay_s: float = 0.0) -> Iterator[FakeEndpoint]:
    """`models` are the cards of /v1/models, by default one named m; a status instead is the answer's."""
    fake = FakeEndpoint(reply, [{"id": "m"}] if models is None else models, delay_s)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            fake.keys.append(self.headers.get("Authorization"))
            if isinstance(fake.models, int):
                self.send(fake.models, {"error": {"message": "no such path"}})
            else:
                self.send(200, {"data": fake.models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                fake.bodies.append(body)
                fake.running += 1
                fake.most_running = max(fake.most_running, fake.running)
            time.sleep(fake.delay_s)
            status, answer = fake.reply(self.path, body)
            with fake.lock:
                fake.running -= 1
            self.send(status, answer)

        def send(self, status: int, answer: Any) -> None:
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text: str, *, tokens: int = 3, loops: int | None = None, finish: str = "stop") -> tuple[int, Any]:
    usage: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    if loops is not None:
        usage["loops"] = {"mean": loops / tokens, "total": loops}
    return 200, {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": usage}


def message(content: str | None, **more: Any) -> tuple[int, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **more}, "finish_reason": "stop"}
    return 200, {"choices": [choice], "usage": {"completion_tokens": 4}}
