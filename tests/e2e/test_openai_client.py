"""The official client against the real daemon, synchronous and asynchronous, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from proc.running import Running

pytestmark = pytest.mark.e2e

PROMPT = "Q: What is 345 + 278?\nA:"
MESSAGES: Any = [{"role": "user", "content": "What is 345 + 278?"}]
#: Greedy, and long enough that there is something to stream.
FIELDS: Any = {"temperature": 0, "max_tokens": 12}
WITH_USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def asynchronous(served: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def check_usage(usage: Any, loops: int) -> None:
    """Token counts that add up, and the loops that were run for them, of a model of `loops` loops."""
    assert usage.prompt_tokens > 0
    assert 1 <= usage.completion_tokens <= 12
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    spent = usage.model_extra["loops"]
    assert 1 <= spent["mean"] <= loops
    assert spent["total"] == pytest.approx(spent["mean"] * usage.completion_tokens)


def counts(usage: Any) -> dict[str, Any]:
    """What does not depend on the prompts that came before."""
    return {name: value for name, value in usage.model_dump().items() if name != "prompt_tokens_details"}


def test_models(client: openai.OpenAI, built_in: str) -> None:
    (model,) = client.models.list().data
    assert model.id == built_in
    assert model.model_extra is not None
    assert model.model_extra["loops"] == 4
    assert client.models.retrieve(built_in) == model


def test_completions(client: openai.OpenAI, built_in: str) -> None:
    whole = client.completions.create(model=built_in, prompt=PROMPT, **FIELDS)
    assert whole.choices[0].text == " 623"
    assert whole.choices[0].finish_reason == "stop"
    check_usage(whole.usage, 4)
    with client.completions.create(model=built_in, prompt=PROMPT, **FIELDS, **WITH_USAGE) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count(None) == len(chunks) - 2
    assert chunks[-1].choices == []
    assert counts(chunks[-1].usage) == counts(whole.usage)


def test_chat(client: openai.OpenAI, built_in: str) -> None:
    whole = client.chat.completions.create(model=built_in, messages=MESSAGES, **FIELDS)
    answer = whole.choices[0].message
    assert answer.role == "assistant"
    assert answer.content == "The answer is 623."
    check_usage(whole.usage, 4)
    with client.chat.completions.create(model=built_in, messages=MESSAGES, **FIELDS, **WITH_USAGE) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer.content
    assert counts(chunks[-1].usage) == counts(whole.usage)
    # A client sends the answer back as it got it, for the next turn.
    turns = [*MESSAGES, answer.model_dump(), {"role": "user", "content": "What is 1 + 1?"}]
    assert client.chat.completions.create(model=built_in, messages=turns, **FIELDS).choices[0].message.content


def test_logprobs(client: openai.OpenAI, built_in: str) -> None:
    """Whole and streamed, in both shapes; greedy tokens are the likeliest ones."""
    whole = client.completions.create(model=built_in, prompt=PROMPT, logprobs=2, **FIELDS).choices[0].logprobs
    assert whole is not None
    assert whole.tokens is not None
    assert "".join(whole.tokens[:-1]) == " 623"
    assert whole.tokens[-1] == "<|endoftext|>"
    assert whole.text_offset == [0, 1, 2, 3, 4]
    for token, logprob, top in zip(whole.tokens, whole.token_logprobs or (), whole.top_logprobs or (), strict=True):
        assert len(top) == 2
        assert max(top.values()) == top[token] == logprob <= 0
    streamed: list[Any] = []
    with client.chat.completions.create(
        model=built_in, messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **FIELDS
    ) as stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].logprobs is not None:
                streamed += chunk.choices[0].logprobs.content or []
    chat = client.chat.completions.create(
        model=built_in, messages=MESSAGES, logprobs=True, top_logprobs=3, **FIELDS
    ).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content == streamed
    assert "".join(entry.token for entry in streamed[:-1]) == chat.message.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in streamed)


async def test_completions_asynchronously(served: Running, built_in: str) -> None:
    async with asynchronous(served) as client:
        depths = {"return_depths": True, "min_loops": 2, "max_loops": 3, "exit_threshold": 0.5}
        whole = await client.completions.create(model=built_in, prompt=PROMPT, **FIELDS, extra_body=depths)
        assert whole.usage is not None
        assert whole.choices[0].model_extra is not None
        spent = whole.choices[0].model_extra["depths"]
        assert len(spent) == whole.usage.completion_tokens
        assert spent[0] == 3, "the first token comes from full depth"
        assert set(spent) <= {2, 3}
        stream = await client.completions.create(
            model=built_in, prompt=PROMPT, **FIELDS, extra_body=depths, **WITH_USAGE
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
        streamed = [depth for chunk in chunks for c in chunk.choices for depth in (c.model_extra or {})["depths"]]
        assert streamed == spent


async def test_chat_asynchronously(served: Running, built_in: str) -> None:
    async with asynchronous(served) as client:
        whole = await client.chat.completions.create(model=built_in, messages=MESSAGES, n=2, **FIELDS)
        first, second = (choice.message.content for choice in whole.choices)
        assert first == second, "greedy answers do not depend on the seed"
        stream = await client.chat.completions.create(model=built_in, messages=MESSAGES, n=2, stream=True, **FIELDS)
        texts = {0: "", 1: ""}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == {0: first, 1: second}


def test_errors_are_the_clients_exceptions(client: openai.OpenAI, built_in: str) -> None:
    with pytest.raises(openai.BadRequestError, match="max_loops: must be between 1 and 4, got 9") as caught:
        client.completions.create(model=built_in, prompt="x", extra_body={"max_loops": 9})
    assert caught.value.param == "max_loops"
    tool: Any = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError, match="chat template does not show tools") as caught:
        client.chat.completions.create(model=built_in, messages=MESSAGES, tools=[tool])
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not served here"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=built_in, input="x")


async def test_errors_are_the_clients_exceptions_asynchronously(served: Running, built_in: str) -> None:
    async with asynchronous(served) as client:
        with pytest.raises(openai.BadRequestError, match="temperature: must be between 0 and 100"):
            await client.completions.create(model=built_in, prompt="x", temperature=101, stream=True)
