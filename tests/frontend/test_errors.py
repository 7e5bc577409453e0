"""Every way in which a request can be wrong, and what its client is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from frontend.harness import TOKENIZER, error_of, served
from rlt.text.chat import ChatTemplate
from rlt_protocols.openai import MESSAGE_OFF, OFF, GenerationRequest

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", "float"),
        ({"temperature": -1}, "temperature", "between 0 and"),
        ({"temperature": 1000}, "temperature", "between 0 and"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.5}, "top_p", "at most 1"),
        ({"top_k": -2}, "top_k", "at least -1"),
        ({"top_k": 1.5}, "top_k", "int"),
        ({"min_p": 2}, "min_p", "between 0 and 1"),
        ({"seed": 10**30}, "seed", "64 bits"),
        ({"seed": True}, "seed", "int"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 64}, "max_tokens", "limit of 64"),
        ({"max_tokens": 10**40}, "max_tokens", "limit of 64"),
        ({"max_completion_tokens": 64}, "max_completion_tokens", "limit of 64"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens", "differs"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "between 0 and 4"),
        ({"n": 0}, "n", "between 1 and 128"),
        ({"n": 129}, "n", "between 1 and 128"),
        ({"n": 100}, "n", "at most 64"),
        ({"prompt": ["x"] * 65}, "prompt", "at most 64"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": [""]}, "stop", "empty"),
        ({"cache_salt": "x" * 1025}, "cache_salt", "has 1025 characters; at most 1024"),
        ({"stop": [1]}, "stop", "str"),
        ({"stop": "x" * 2000}, "stop", "at most 1024"),
        ({"stop_token_ids": [1000]}, "stop_token_ids", "outside the vocabulary"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids", "at most 16"),
        ({"min_loops": 0}, "min_loops", "between 1 and 4"),
        ({"max_loops": 5}, "max_loops", "between 1 and 4"),
        ({"min_loops": 3, "max_loops": 2}, "min_loops", "between 1 and 2"),
        ({"exit_threshold": -0.1}, "exit_threshold", "between 0 and 1000000"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream true"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options", "what"),
        ({"stream": "yes"}, "stream", "bool"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": None}, "prompt", "prompt: is required"),
        ({"prompt": {"a": 1}}, "prompt", "object"),
        ({"prompt": [1, "a"]}, "prompt", "list of texts"),
        ({"prompt": [True]}, "prompt", "list of texts"),
        ({"prompt": [1.5]}, "prompt", "list of texts"),
        ({"prompt": [5, 1000]}, "prompt", "token id 1000 at index 1"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [10**30]}, "prompt", "outside the vocabulary"),
        ({"prompt": [7] * 64}, "prompt", "64 tokens"),
        ({"prompt": "d " * 100}, "prompt", "context is 64 tokens"),
        ({"prompt": [999], "echo": True}, "prompt", "not in the tokenizer"),
        ({"tempreature": 1}, "tempreature", "did you mean temperature"),
        ({"foo": None}, "foo", "unknown field foo"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"logprobs": -1}, "logprobs", "between 0 and 20"),
        ({"logprobs": True}, "logprobs", "true is for chat"),
        ({"logprobs": 1, "echo": True}, "logprobs", "not supported yet"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported yet"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported yet"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"repetition_penalty": 1001}, "repetition_penalty", "at most 1000"),
        ({"presence_penalty": True}, "presence_penalty", "got `bool`"),
        ({"presence_penalty": 2.5}, "presence_penalty", "between -2 and 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "between -2 and 2"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "token id 5 must be between -100 and 100"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias", "'1_0' is not a token id"),
        ({"logit_bias": {"1000": 1}}, "logit_bias", "outside the vocabulary"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "is not a token id"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
        ({"best_of": 2}, "best_of", "not supported yet"),
        ({"suffix": "x"}, "suffix", "not supported yet"),
    ],
)
async def test_a_bad_field_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    async with served() as server:
        response = await server.complete(**fields)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]
        assert param in error["message"] or param == "n"
        assert server.backend.added == []


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": ["hi"]}, "messages[0]", "must be an object"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]", "wizard"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]", "content"),
        ({"messages": [*HI, {"role": "user", "content": "x", "foo": 1}]}, "messages[1].foo", "unknown field"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "only text"),
        ({"messages": [{"role": "user", "content": "d " * 100}]}, "messages", "context is 64"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "no option 'messages'"),
        ({"chat_template_kwargs": {"range": 5}}, "chat_template_kwargs", "no option 'range'"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs", "no option 'thinking'"),
        ({"tool_choice": "required"}, "tool_choice", "not supported yet"),
        ({"top_logprobs": 3}, "top_logprobs", "goes with logprobs true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"logprobs": 2}, "logprobs", "bool"),
        ({"echo": True}, "echo", "unknown field"),
        ({"prompt": "x"}, "prompt", "unknown field"),
    ],
)
async def test_a_bad_field_of_a_chat_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    async with served() as server:
        response = await server.chat(**fields)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == param
        assert words in error["message"]
        assert server.backend.added == []


async def test_values_that_switch_a_field_off_are_accepted() -> None:
    async with served() as server:
        for number in range(max(map(len, OFF.values()))):
            fields = {name: values[min(number, len(values) - 1)] for name, values in OFF.items()}
            response = await server.chat(
                **fields, messages=[HI[0] | {name: MESSAGE_OFF[name][0] for name in MESSAGE_OFF}]
            )
            assert response.status_code == 200, response.text


async def test_missing_required_fields() -> None:
    async with served() as server:
        for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
            response = await server.http.post(path, json={"model": "tiny"})
            assert response.status_code == 400
            assert error_of(response)["param"] == field


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"temperature": NaN}', b'{"a": 1e999}', b"\xff{}", b"[" * 100_000, b"{}x"],
)
async def test_a_body_that_is_no_json_object(body: bytes) -> None:
    async with served() as server:
        headers = {"Content-Type": "application/json"}
        response = await server.http.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == 400
        assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("media_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_other_media_types(media_type: str | None) -> None:
    async with served() as server:
        headers = {} if media_type is None else {"Content-Type": media_type}
        response = await server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert response.status_code == 415
        assert error_of(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Content-Type": "application/json; charset=utf-16"}, "utf-16"),
        ({"Content-Type": 'application/json; a=b; Charset="latin-1"'}, "latin-1"),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, "gzip"),
        ({"Content-Type": "application/json", "Content-Encoding": "x" * 5000}, "xxx"),
    ],
)
async def test_other_encodings_of_a_body(headers: dict[str, str], words: str) -> None:
    async with served() as server:
        response = await server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert response.status_code == 415
        assert error_of(response)["code"] == "unsupported_media_type"
        assert words in error_of(response)["message"]
        assert len(response.content) < 500


@pytest.mark.parametrize(
    "media_type",
    ["application/json; charset=utf-8", "Application/JSON", "application/x+json", 'application/json;charset="UTF-8"'],
)
async def test_json_media_types(media_type: str) -> None:
    async with served() as server:
        headers = {"Content-Type": media_type}
        response = await server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert response.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_not_read_to_its_end(chunked: bool) -> None:
    pieces = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal pieces
        for _ in range(1000):
            pieces += 1
            yield b" " * 1000

    async with served(max_body_bytes=10_000) as server:
        headers = {"Content-Type": "application/json"} | ({} if chunked else {"Content-Length": "1000000"})
        response = await server.http.post("/v1/completions", content=body(), headers=headers)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert pieces <= (12 if chunked else 1)


async def test_unknown_paths_and_methods() -> None:
    async with served() as server:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("POST", "/v1/completions/", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("POST", "/health", 405),
        ):
            response = await server.http.request(method, path)
            assert response.status_code == status
            assert path in error_of(response)["message"]
        assert (await server.http.get("/v1/completions")).headers["allow"] == "POST"


async def test_an_unknown_model() -> None:
    async with served() as server:
        for response in (
            await server.complete(model="other"),
            await server.chat(model="other"),
            await server.http.get("/v1/models/other"),
            await server.http.get("/v1/models/org/other"),
        ):
            assert response.status_code == 404
            assert error_of(response)["code"] == "model_not_found"
            assert error_of(response)["param"] == "model"
        assert (await server.complete(model="tiny")).status_code == 200


async def test_the_queue_is_bounded() -> None:
    async with served(hold=True, max_queue=2) as server:
        waiting = asyncio.create_task(server.complete(n=2))
        added = await server.backend.wait_added(2)
        response = await server.complete()
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert error_of(response) | {"message": ""} == {
            "message": "",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
        server.backend.answer(added[0])
        again = asyncio.create_task(server.complete())
        server.backend.answer((await server.backend.wait_added(3))[2])
        assert (await again).status_code == 200
        server.backend.answer(added[1])
        assert (await waiting).status_code == 200
        assert server.client.active == 0


async def test_bodies_that_are_being_read_are_bounded_too() -> None:
    go_on = asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        await go_on.wait()
        yield b'{"prompt": "x"}'

    async with served(max_queue=1) as server:
        headers = {"Content-Type": "application/json"}
        slow = asyncio.create_task(server.http.post("/v1/completions", content=slow_body(), headers=headers))
        await asyncio.sleep(0.01)
        assert (await server.complete()).status_code == 429
        go_on.set()
        assert (await slow).status_code == 200
        assert (await server.complete()).status_code == 200


async def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    monkeypatch.setattr("rltd.frontend.body.BODY_TIMEOUT_S", 0.02)
    async with served() as server:
        headers = {"Content-Type": "application/json"}
        response = await server.http.post("/v1/completions", content=endless(), headers=headers)
        assert response.status_code == 408
        assert error_of(response)["code"] == "body_timeout"


async def test_before_the_model_is_loaded() -> None:
    async with served(up=False) as server:
        for response in (
            await server.complete(),
            await server.chat(),
            await server.http.get("/ready"),
            await server.http.get("/v1/models"),
            await server.http.post("/tokenize", json={"prompt": "x"}),
        ):
            assert response.status_code == 503
            assert response.headers["retry-after"] == "5"
            assert error_of(response)["code"] == "not_ready"
        assert (await server.http.get("/health")).status_code == 200
        server.up("engine")
        assert (await server.complete()).status_code == 503
        server.up("detokenizer")
        assert (await server.complete()).status_code == 200


async def test_a_model_without_a_tokenizer_serves_token_ids() -> None:
    async with served(tokenizer=None) as server:
        assert (await server.complete(prompt=[1, 2])).status_code == 200
        for response, param in (
            (await server.complete(), "prompt"),
            (await server.complete(prompt=[1], stop="x"), "stop"),
            (await server.complete(prompt=[1], echo=True), "prompt"),
            (await server.chat(), "messages"),
            (await server.http.post("/tokenize", json={"prompt": "x"}), "prompt"),
            (await server.http.post("/detokenize", json={"tokens": [1]}), "tokens"),
        ):
            assert response.status_code == 400
            assert error_of(response)["param"] == param


async def test_a_template_that_refuses() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    async with served(template=template) as server:
        response = await server.chat()
        assert response.status_code == 400
        assert "roles must alternate" in error_of(response)["message"]
        assert error_of(response)["param"] == "messages"


async def test_an_error_of_the_engine() -> None:
    async with served(pieces=("a", ""), finish_reason="error", error="the logits are not finite") as server:
        response = await server.complete()
        assert response.status_code == 500
        assert error_of(response)["message"] == "the logits are not finite"
        assert error_of(response)["type"] == "server_error"


async def test_our_own_bugs_show_the_request_id_only(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as server:
        server.client.submit = None  # type: ignore[assignment, method-assign]
        response = await server.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "me-1"})
        assert response.status_code == 500
        assert "me-1" in error_of(response)["message"]
        assert "NoneType" not in response.text
        assert response.headers["x-request-id"] == "me-1"


async def test_tokenize_and_detokenize() -> None:
    async with served() as server:
        body = (await server.http.post("/tokenize", json={"prompt": "hello", "model": "tiny"})).json()
        ids = TOKENIZER.encode("hello")
        assert body == {"tokens": ids, "count": len(ids), "max_model_len": 64}
        body = (await server.http.post("/detokenize", json={"tokens": ids})).json()
        assert body == {"prompt": "hello"}
        body = (await server.http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False})).json()
        assert TOKENIZER.decode(body["tokens"], skip_special_tokens=False) == "<|user|>user: hi\n"
        for path, json, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
            ("/tokenize", {"prompt": "x", "enable_thinking": True}, "enable_thinking"),
            ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
            ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/detokenize", {"tokens": [9999]}, "tokens"),
            ("/detokenize", {"tokens": [ids[0], 10**30]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [], "logprobs": None}, "logprobs"),
        ):
            response = await server.http.post(path, json=json)
            assert response.status_code == 400
            assert error_of(response)["param"] == param
            if ids[0] in json.get("tokens", ()):
                assert "at index 1 is not in the tokenizer" in error_of(response)["message"]


@pytest.mark.parametrize("size", [400, 4000, 6000])
@pytest.mark.parametrize("sign", ["", "-"])
async def test_integers_of_any_size(size: int, sign: str) -> None:
    number = sign + "1" + "0" * size
    async with served() as server:
        kinds = {field.name: field.type for field in msgspec.structs.fields(GenerationRequest)}
        names = [name for name, kind in kinds.items() if kind in (int | None, float | None)]
        assert len(names) >= 12
        bodies = {name: f'{{"prompt": "x", "{name}": {number}}}' for name in names}
        bodies |= {
            "prompt": f'{{"prompt": [{number}]}}',
            "stop_token_ids": f'{{"prompt": "x", "stop_token_ids": [{number}]}}',
        }
        for name, body in bodies.items():
            headers = {"Content-Type": "application/json"}
            response = await server.http.post("/v1/completions", content=body, headers=headers)
            if name == "top_k" and not sign and response.status_code == 200:
                continue
            assert response.status_code == 400, (name, response.text)
            # Python reads no number of more than 4300 digits, and then the field has no name yet.
            assert error_of(response)["param"] == (name if size < 4300 else None)
            assert len(error_of(response)["message"]) < 6000
        response = await server.http.post("/detokenize", content=f'{{"tokens": [{number}]}}', headers=headers)
        assert response.status_code == 400


async def test_an_option_that_the_template_does_not_have_can_only_be_off() -> None:
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    async with served(template=plain) as server:
        for fields, param in (
            ({"enable_thinking": True}, "enable_thinking"),
            ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ):
            error = (await server.chat(**fields)).json()["error"]
            assert error["param"] == param
            assert "has no" in error["message"]
            tokenized = await server.http.post("/tokenize", json={"messages": HI, **fields})
            assert tokenized.json()["error"]["param"] == param
        for fields in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False, "x": None}}):
            assert (await server.chat(**fields)).status_code == 200


async def test_errors_do_not_repeat_what_is_long() -> None:
    long = "x" * 500_000
    async with served() as server:
        for response in (
            await server.complete(**{long: 1}),
            await server.complete(model=long),
            await server.chat(messages=[{"role": "user", "content": "x", long: 1}]),
            await server.chat(messages=[{"role": "user", "content": [{"type": long}]}]),
            await server.chat(messages=[{"role": long, "content": "x"}]),
            await server.chat(chat_template_kwargs={long: 1}),
            await server.complete(stream=True, stream_options={long: 1}),
            await server.http.get("/" + "x" * 50_000),
        ):
            assert response.status_code in (200, 400, 404)
            assert len(response.content) < 1000


async def test_prompts_are_counted_before_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(value: object) -> list[Any]:
        raise AssertionError

    monkeypatch.setattr("rltd.frontend.prepare.prompts_of", look)
    async with served() as server:
        for prompts in ([""] * 65, [[]] * 65, ["x", 1] * 40):
            response = await server.complete(prompt=prompts)
            assert response.status_code == 400
            assert "at most 64 can be queued" in error_of(response)["message"]


async def test_request_ids() -> None:
    async with served() as server:
        response = await server.http.get("/version", headers={"X-Request-Id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
        for bad in ("a b", "x" * 200, 'a"b', ""):
            response = await server.http.get("/version", headers={"X-Request-Id": bad})
            assert response.headers["x-request-id"] != bad
            assert len(response.headers["x-request-id"]) == 32
        response = await server.http.get("/nothing")
        assert response.headers["x-request-id"]
