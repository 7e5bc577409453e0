from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from rlt.bench import serve
from rlt.bench.numbers import percentile, spread_ms, tails_ms
from rlt.bench.serve import BenchError, Load, Timing, measure, summary
from rlt.bench.workload import random_prompts, task_prompts
from rlt.cli.main import main
from rlt.cli.options import command_line

Reply = Callable[[dict[str, Any]], tuple[int, list[str]]]


class Server:
    """A server on a free port that answers completions with what `reply(body)` gives: a status and raw lines."""

    def __init__(self, reply: Reply, models: bytes, delay_s: float) -> None:
        self.reply, self.models, self.delay_s = reply, models, delay_s
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.running = self.most_running = 0
        self.url = ""
        self.tasks: list[asyncio.Task[Any]] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        with suppress(ConnectionError):
            await self.answer(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(h.split(":")[1]) for h in head.split("\r\n") if h.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length) or b"{}")
        self.headers.append(head)
        if head.startswith("GET"):
            status, lines = 200 if self.models else 404, [self.models.decode()]
        else:
            self.bodies.append(body)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            status, lines = self.reply(body)
        writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\n\r\n".encode())
        for line in lines:
            await asyncio.sleep(self.delay_s)
            writer.write(f"{line}\n".encode())
            await writer.drain()
        self.running -= not head.startswith("GET")


@asynccontextmanager
async def serving(
    reply: Reply, models: bytes = b'{"data": [{"id": "m"}]}', delay_s: float = 0.0
) -> AsyncIterator[Server]:
    server = Server(reply, models, delay_s)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield server
        await asyncio.gather(*server.tasks)


def event(text: str | None = None, finish: str | None = None, **more: Any) -> str:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return "data: " + json.dumps({"id": "c", "choices": choices, **more})


USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def three_tokens(body: dict[str, Any]) -> tuple[int, list[str]]:
    usage = {**USAGE, "loops": {"mean": 2.0, "total": 6}}
    return 200, [event("a"), "", event("b"), ": ping", event("c", "length"), event(usage=usage), "data: [DONE]"]


def load(server: Server, **settings: Any) -> Load:
    values: dict[str, Any] = {"model": None, "prompts": ["x"] * 4, "max_tokens": 3, "concurrency": 2}
    return Load(base_url=server.url, **values | settings)


async def test_counts_tokens_times_and_loops() -> None:
    async with serving(three_tokens, delay_s=0.01) as server:
        result = await measure(load(server))
    assert result["model"] == "m"
    assert (result["requests"], result["failed"]) == (4, 0)
    assert (result["prompt_tokens"], result["output_tokens"], result["mean_loops"]) == (20, 12, 2.0)
    assert server.most_running == 2
    assert result["tokens_per_s"] == pytest.approx(12 / result["wall_s"], rel=0.05)
    # Tokens come 20 ms after the one before, with a line between them.
    assert result["itl_ms"]["p99"] > 15
    assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"] <= result["e2e_ms"]["p99"]


async def test_sends_what_it_was_told_to() -> None:
    async with serving(three_tokens) as server:
        fields = {"temperature": 0, "max_loops": 2}
        await measure(load(server, model="given", prompts=[[5, 6]], fields=fields, api_key="secret"))
    assert server.bodies == [
        {
            "model": "given",
            "prompt": [5, 6],
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_loops": 2,
        }
    ]
    assert "authorization: bearer secret" in server.headers[0].lower()


async def test_a_rate_spreads_the_arrivals() -> None:
    async with serving(three_tokens) as server:
        result = await measure(load(server, prompts=["x"] * 10, rate=100.0, concurrency=None))
    assert result["failed"] == 0
    assert 0.02 < result["wall_s"] < 5


async def test_time_in_the_queue_counts_when_arrivals_do_not_wait() -> None:
    async with serving(three_tokens, delay_s=0.01) as server:
        result = await measure(load(server, prompts=["x"] * 6, rate=1e6, concurrency=1))
    # One request takes 60 ms or more, so the last of six waits for at least five of them.
    assert result["ttft_ms"]["p99"] > 250


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((429, ['{"error": {"message": "busy"}}']), "HTTP 429: busy"),
        ((502, ["<html>"]), "HTTP 502: <html>"),
        ((200, [event("a"), 'data: {"error": {"message": "engine died"}}', "data: [DONE]"]), "engine died"),
        ((200, [event("a")]), "the stream ended before the completion did"),
        ((200, ["data: {"]), "an answer that is not a streamed completion"),
        ((200, ["data: []"]), "an answer that is not a streamed completion"),
        ((200, [event("a", "stop", usage={"prompt_tokens": 1})]), "an answer that is not a streamed completion"),
    ],
)
async def test_a_failed_request_is_counted_apart(reply: tuple[int, list[str]], error: str) -> None:
    async with serving(lambda body: reply if body["prompt"] == "bad" else three_tokens(body)) as server:
        result = await measure(load(server, prompts=["x", "bad", "x"]))
    assert (result["requests"], result["failed"], result["output_tokens"]) == (3, 1, 6)
    assert result["first_error"].startswith(error)


async def test_a_server_that_goes_away_is_a_failed_request() -> None:
    async with serving(three_tokens) as server:
        pass
    result = await measure(load(server, model="m", prompts=["x"]))
    assert result["failed"] == 1
    assert result["first_error"].startswith("ConnectError")
    assert "ttft_ms" not in result


async def test_no_server_at_all_is_an_error() -> None:
    async with serving(three_tokens) as server:
        pass
    with pytest.raises(BenchError, match="no server answers there"):
        await measure(load(server))


@pytest.mark.parametrize(
    ("models", "error"),
    [(b"", "/v1/models answers 404: nothing; give --model"), (b"{}", "/v1/models does not list a model; give --model")],
)
async def test_the_model_is_asked_for_when_the_server_does_not_say(models: bytes, error: str) -> None:
    async with serving(three_tokens, models=models) as server:
        with pytest.raises(BenchError, match=error):
            await measure(load(server))


def test_a_summary_leaves_out_what_it_cannot_know() -> None:
    result = summary([Timing(sent_s=0.0, first_s=0.5, last_s=0.5, tokens=1)], 2.0)
    assert result["ttft_ms"] == {"p50": 500.0, "p99": 500.0}
    assert "itl_ms" not in result
    assert "mean_loops" not in result
    assert "first_error" not in result


def test_random_prompts_are_a_function_of_the_seed() -> None:
    prompts = random_prompts(3, 8, seed=1)
    assert prompts == random_prompts(3, 8, seed=1) != random_prompts(3, 8, seed=2)
    assert [len(prompt) for prompt in prompts] == [8, 8, 8]
    assert all(3 <= token < 250 for prompt in prompts for token in prompt)


def test_task_prompts_mix_the_tasks() -> None:
    prompts = task_prompts(12, seed=3)
    assert prompts == task_prompts(12, seed=3) != task_prompts(12, seed=4)
    assert len(prompts) == 12
    assert all(prompt.startswith("Q: ") and prompt.endswith("\nA:") for prompt in prompts)


def test_percentiles_interpolate() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert percentile([1.0, 2.0], 100) == 2.0
    assert math.isnan(percentile([], 50))
    assert tails_ms([0.001, 0.003]) == {"p50": 2.0, "p99": 2.98}
    assert spread_ms([0.001, 0.002, 0.003]) == {"median": 2.0, "p10": 1.2, "p90": 2.8}


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", *words])
    return int(caught.value.code or 0)


class TestCommand:
    @pytest.fixture
    def sent(self, monkeypatch: pytest.MonkeyPatch) -> list[Load]:
        loads: list[Load] = []

        async def fake(load: Load) -> dict[str, Any]:
            loads.append(load)
            failed = 1 if load.model == "bad" else 0
            error = {"first_error": "HTTP 500: x"} if failed else {}
            return {"model": "m", "requests": 2, "failed": failed, "ttft_ms": {"p50": 1.0, "p99": 2.0}, **error}

        monkeypatch.setattr(serve, "measure", fake)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        return loads

    def test_prints_what_was_measured(self, sent: list[Load], capsys: pytest.CaptureFixture[str]) -> None:
        assert command("--requests", "2", "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["ttft_ms"] == {"p50": 1.0, "p99": 2.0}
        assert {"config", "env", "command"} <= result.keys()
        assert "torch" not in result["env"]
        assert (sent[0].base_url, sent[0].concurrency, sent[0].rate) == ("http://127.0.0.1:8000", 8, None)
        assert isinstance(sent[0].prompts[0], str)
        assert command("--requests", "2") == 0
        assert "p99 2.0" in capsys.readouterr().out

    def test_takes_lengths_rates_and_depths(self, sent: list[Load]) -> None:
        words = "--requests 3 --rate 5 --prompt-tokens 16 --max-tokens 9 --ignore-eos --loops 2 --api-key k"
        assert command(*words.split(), "--base-url", "http://h:1/v1/") == 0
        load = sent[0]
        assert (load.base_url, load.concurrency, load.rate, load.max_tokens) == ("http://h:1", None, 5.0, 9)
        assert [len(prompt) for prompt in load.prompts] == [16, 16, 16]
        assert load.api_key == "k"
        assert load.fields == {
            "temperature": 0.0,
            "ignore_eos": True,
            "max_loops": 2,
            "min_loops": 2,
        }

    def test_failed_requests_fail_the_command(self, sent: list[Load], capsys: pytest.CaptureFixture[str]) -> None:
        assert command("--requests", "2", "--model", "bad", "--json") == 1
        captured = capsys.readouterr()
        assert json.loads(captured.out)["failed"] == 1
        assert captured.err == "rlt: 1 of 2 requests failed; the first: HTTP 500: x\n"


def test_a_result_never_holds_a_key() -> None:
    words = ["bench", "serve", "--api-key", "s e cret", "--api-key=secret", "--seed", "1"]
    assert command_line(words) == "rlt bench serve --api-key ... --api-key=... --seed 1"
