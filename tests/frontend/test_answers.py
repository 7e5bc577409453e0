"""What answers look like, whole and in chunks."""

from __future__ import annotations

import pytest

from frontend.harness import TOKENIZER, answered, events, served

USAGE = {
    "prompt_tokens": len(TOKENIZER.encode("hello")),
    "completion_tokens": 3,
    "total_tokens": len(TOKENIZER.encode("hello")) + 3,
    "prompt_tokens_details": {"cached_tokens": 1},
    "loops": {"mean": 2.0, "total": 6},
}


async def test_a_whole_completion() -> None:
    async with served() as server:
        response = await server.complete(return_depths=True, return_token_ids=True)
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [100, 101, 102],
                "depths": [1, 2, 3],
                "prompt_token_ids": TOKENIZER.encode("hello"),
            }
        ],
        "usage": USAGE,
    }


async def test_a_whole_chat_answer() -> None:
    async with served(stop_reason="END") as server:
        body = (await server.chat()).json()
        prompt = server.backend.added[0].prompt
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
        }
    ]
    assert body["usage"]["prompt_tokens"] == len(prompt)
    text = TOKENIZER.decode(prompt, skip_special_tokens=False)
    assert text == "<|user|>user: hello\n<|user|>assistant:"


async def test_a_streamed_completion() -> None:
    async with served(hold=True) as server:
        task = server.complete(stream=True, stream_options={"include_usage": True}, return_depths=True)
        chunks = events((await answered(server, task)).text)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["Hel", "lo", ""]
    assert [chunk["choices"][0]["depths"] for chunk in chunks[:-1]] == [[1], [2], [3]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, "stop"]
    assert [chunk["usage"] for chunk in chunks] == [None, None, None, USAGE]
    assert chunks[-1]["choices"] == []
    assert "token_ids" not in chunks[0]["choices"][0]


async def test_a_streamed_chat_answer() -> None:
    async with served(hold=True) as server:
        response = await answered(server, server.chat(stream=True, n=2))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["delta"] for choice in own] == [
            {"role": "assistant", "content": "Hel"},
            {"content": "lo"},
            {},
        ]
        assert [choice["finish_reason"] for choice in own] == [None, None, "stop"]


async def test_what_a_slow_client_missed_comes_in_one_chunk() -> None:
    async with served() as server:
        chunks = events((await server.complete(stream=True)).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello"]


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": True}])
async def test_text_that_is_held_back_makes_no_chunk_unless_ids_are_asked_for(asked: dict[str, bool]) -> None:
    async with served(hold=True, pieces=("", "", "x")) as server:
        chunks = events((await answered(server, server.complete(stream=True, **asked))).text)
    assert len(chunks) == (3 if asked else 1)


async def test_a_model_without_a_tokenizer_sends_a_chunk_per_update() -> None:
    async with served(hold=True, tokenizer=None, pieces=("", "", "")) as server:
        chunks = events((await answered(server, server.complete(prompt=[5], stream=True))).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["", "", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]


async def test_prompt_ids_come_once_at_the_place_that_each_api_has_for_them() -> None:
    async with served(hold=True) as server:
        prompt = TOKENIZER.encode("hello")
        response = await answered(server, server.complete(stream=True, return_token_ids=True))
        choices = [chunk["choices"][0] for chunk in events(response.text)]
        assert [choice.get("prompt_token_ids") for choice in choices] == [prompt, None, None]
        server.backend.added.clear()
        response = await answered(server, server.chat(stream=True, return_token_ids=True))
        prompt = server.backend.added[0].prompt
        assert [chunk.get("prompt_token_ids") for chunk in events(response.text)] == [prompt, None, None]
        server.backend.hold = False
        assert (await server.chat(return_token_ids=True)).json()["prompt_token_ids"] == prompt


async def test_several_prompts_with_several_answers() -> None:
    async with served() as server:
        body = (await server.complete(prompt=["hello", "world"], n=2, seed=5)).json()
        added = server.backend.added
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [TOKENIZER.decode(one.prompt) for one in added] == ["hello", "hello", "world", "world"]
    assert [one.header.params.seed for one in added] == [5, 6, 5, 6]
    assert len({one.id for one in added}) == 4
    prompts = len(TOKENIZER.encode("hello")) + len(TOKENIZER.encode("world"))
    assert body["usage"]["prompt_tokens"] == prompts
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_answers_without_a_seed_have_seeds_of_their_own() -> None:
    async with served() as server:
        await server.complete(n=4)
        assert len({one.header.params.seed for one in server.backend.added}) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo(stream: bool, as_ids: bool) -> None:
    prompt = TOKENIZER.encode("hello") if as_ids else "hello"
    async with served() as server:
        response = await server.complete(prompt=prompt, echo=True, stream=stream)
    choices = [chunk["choices"][0] for chunk in (events(response.text) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == "helloHello"


async def test_token_id_prompts() -> None:
    async with served() as server:
        await server.complete(prompt=[5, 6, 7, 8])
        await server.complete(prompt=[[5], [6, 7]])
        assert [one.prompt for one in server.backend.added] == [[5, 6, 7, 8], [5], [6, 7]]
        assert server.backend.added[0].header.prompt_tail == (6, 7, 8)


async def test_parameters_reach_the_engine() -> None:
    sent = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 42,
        "stop": ["a", "b"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop_token_ids": [9],
        "min_loops": 2,
        "max_loops": 3,
        "exit_threshold": 0.25,
        "user": "someone",
    }
    async with served() as server:
        await server.complete(**sent)
        params = server.backend.added[0].header.params
    wanted = {name: value for name, value in sent.items() if name not in {"user", "stop", "stop_token_ids"}}
    assert {name: getattr(params, name) for name in wanted} == wanted
    assert params.stop == ("a", "b")
    assert params.end_token_ids == (0, 9)


async def test_defaults_reach_the_engine() -> None:
    async with served() as server:
        await server.complete(ignore_eos=True, stop="x", n=None, stream=None, stop_token_ids=None)
        params = server.backend.added[0].header.params
    assert params.end_token_ids == ()
    assert params.stop == ("x",)
    assert params.max_tokens == 64 - len(TOKENIZER.encode("hello"))


async def test_both_names_of_max_tokens() -> None:
    async with served() as server:
        await server.chat(max_completion_tokens=3)
        await server.chat(max_completion_tokens=4, max_tokens=4)
        assert [one.header.params.max_tokens for one in server.backend.added] == [3, 4]


async def test_messages_of_all_forms() -> None:
    async with served() as server:
        await server.http.post(
            "/v1/chat/completions",
            json={
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                    {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
                ],
                "chat_template_kwargs": {"enable_thinking": False},
                "enable_thinking": True,
            },
        )
        text = TOKENIZER.decode(server.backend.added[0].prompt, skip_special_tokens=False)
    assert text == "<|user|>system: a\nb\n<|user|>assistant: \n<|user|>assistant:<think>"
