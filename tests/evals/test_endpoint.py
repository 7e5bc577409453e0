from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from evals.fake_endpoint import FakeEndpoint, completion, message, serving
from frontend.harness import on_socket, served
from rlt.evals.answers import Answer, Asked, EvalError, collect
from rlt.evals.endpoint import Endpoint, EndpointAnswerer
from rlt_protocols.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


def echo(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return completion(f"re: {body['prompt']}", loops=9)


def answerer(fake: FakeEndpoint, **settings: Any) -> EndpointAnswerer:
    return EndpointAnswerer(Endpoint(fake.url, **settings))


def ask(fake: FakeEndpoint, *prompts: Any, params: SamplingParams = GREEDY, **settings: Any) -> list[Answer]:
    return collect(answerer(fake, **settings), [Asked(prompt, params) for prompt in prompts], lambda: None)


def test_every_answer_goes_to_its_question() -> None:
    with serving(echo, delay_s=0.005) as fake:
        answers = ask(fake, *map(str, range(20)), concurrency=4)
    assert [answer.text for answer in answers] == [f"re: {i}" for i in range(20)]
    assert answers[0] == Answer("re: 0", tokens=3, loops=9, finish_reason="stop")
    assert 2 <= fake.most_running <= 4


def test_sends_what_was_set_and_nothing_else() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, stop=("\n",), max_loops=2)
    with serving(echo) as fake:
        ask(fake, "x", params=params, api_key="secret")
    assert fake.bodies == [
        {"model": "m", "prompt": "x", "temperature": 0.0, "max_tokens": 5, "stop": ["\n"], "max_loops": 2}
    ]
    assert fake.keys == ["Bearer secret"]


def test_conversations_go_to_the_chat() -> None:
    turns = [{"role": "user", "content": "x"}]
    paths = []

    def reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        paths.append(path)
        return message(None, reasoning_content="hm")

    with serving(reply) as fake:
        assert ask(fake, turns, thinking=False) == [
            Answer("", tokens=4, loops=None, finish_reason="stop", reasoning="hm")
        ]
        ask(fake, turns)
    assert paths == ["/v1/chat/completions"] * 2
    assert fake.bodies[0] == {
        "model": "m",
        "messages": turns,
        "temperature": 0.0,
        "max_tokens": 5,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert "chat_template_kwargs" not in fake.bodies[1]


@pytest.mark.parametrize(
    ("reply", "error", "refused"),
    [
        ((500, {"error": {"message": "broken"}}), "HTTP 500: broken", False),
        ((429, b"<html>busy"), "HTTP 429: <html>busy", False),
        ((400, {"error": {"message": "max_loops: no"}}), "HTTP 400: max_loops: no", True),
        ((200, b"{"), "an answer that is not a completion", False),
        ((200, {"choices": []}), "an answer that is not a completion", False),
        ((200, {"choices": [{}]}), "an answer that is not a completion", False),
        ((200, []), "an answer that is not a completion", False),
    ],
)
def test_a_failed_question_costs_only_itself(reply: tuple[int, Any], error: str, refused: bool) -> None:
    with serving(lambda path, body: reply if body["prompt"] == "bad" else echo(path, body)) as fake:
        before, bad, after = ask(fake, "a", "bad", "b")
    assert (before.text, after.text) == ("re: a", "re: b")
    assert bad.error is not None
    assert bad.error.startswith(error)
    assert bad.refused is refused


def test_a_server_that_goes_away_is_a_failure_of_each_question() -> None:
    with serving(echo) as fake:
        client = answerer(fake)
    answers = collect(client, [Asked("x", GREEDY)] * 2, lambda: None)
    assert [str(answer.error).partition(":")[0] for answer in answers] == ["ConnectError"] * 2


def test_an_answer_that_takes_too_long_is_a_failure() -> None:
    with serving(echo, delay_s=0.3) as fake:
        (answer,) = ask(fake, "x", timeout_s=0.05)
    assert str(answer.error).startswith("ReadTimeout")


def test_leaving_early_drops_what_is_under_way() -> None:
    first, release = threading.Event(), threading.Event()

    def reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if first.is_set():
            release.wait(10)
        first.set()
        return echo(path, body)

    with serving(reply) as fake:
        answers = answerer(fake, concurrency=2).answers([Asked(str(i), GREEDY) for i in range(5)])
        next(answers)
        start = time.monotonic()
        answers.close()
        assert time.monotonic() - start < 5
        release.set()
        time.sleep(0.05)
        assert len(fake.bodies) < 5


class TestModel:
    def test_the_first_one_is_taken_and_may_tell_its_loops(self) -> None:
        with serving(echo, [{"id": "a", "loops": 4}, {"id": "b"}]) as fake:
            assert (answerer(fake).model, answerer(fake).loops) == ("a", 4)
            assert (answerer(fake, model="b").model, answerer(fake, model="b").loops) == ("b", None)
            assert answerer(fake, model="other").loops is None
            assert answerer(fake).settings == {"base_url": fake.url}

    @pytest.mark.parametrize(
        ("models", "problem"),
        [
            ([], "/v1/models does not list a model; give --model"),
            ([{}], "/v1/models does not list a model; give --model"),
            (401, "/v1/models answers 401: no such path; give --model"),
        ],
    )
    def test_it_must_be_named_where_the_server_does_not(self, models: Any, problem: str) -> None:
        with serving(echo, models) as fake:
            with pytest.raises(EvalError, match=problem):
                answerer(fake)
            assert answerer(fake, model="given").model == "given"

    def test_no_server_is_an_error(self) -> None:
        with serving(echo) as fake:
            pass
        with pytest.raises(EvalError, match="no server answers there"):
            answerer(fake, model="given")


async def test_the_frontend_is_such_a_server() -> None:
    asked = [Asked("hello", GREEDY), Asked("hello", SamplingParams(max_loops=9))]
    turns: list[dict[str, str]] = [{"role": "user", "content": "hello"}]

    def together(url: str) -> tuple[EndpointAnswerer, list[Answer]]:
        client = EndpointAnswerer(Endpoint(url))
        return client, collect(client, [*asked, Asked(turns, GREEDY)], lambda: None)

    run: Callable[[str], tuple[EndpointAnswerer, list[Answer]]] = together
    async with served() as server, on_socket(server.app) as url:
        client, (text, refused, chat) = await asyncio.to_thread(run, url)
    assert (client.model, client.loops) == ("tiny", 4)
    assert text == Answer("Hello", tokens=3, loops=6, finish_reason="stop")
    assert (refused.refused, refused.error) == (True, "HTTP 400: max_loops: must be between 1 and 4, got 9")
    assert (chat.text, chat.loops) == ("Hello", 6)
