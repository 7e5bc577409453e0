"""What a client is told that sends nonsense to the real daemon, and that the next client does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from proc.running import Running

pytestmark = pytest.mark.e2e

MIB = 1 << 20
JSON = {"content-type": "application/json"}
TOO_LARGE = "the body is larger than the limit of 4194304 bytes"
NO_PROMPT = "prompt: is empty; at least one token is needed"
NO_JSON = "the body is not valid JSON: "


@pytest.fixture(autouse=True)
def goes_on(served_ids: Running) -> Iterator[None]:
    """After every test the same processes answer normally."""
    pids = [process.pid for process in served_ids.status().processes]
    yield
    body = {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}
    answer = httpx.post(f"{served_ids.url}/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2
    reply = served_ids.status()
    assert [process.pid for process in reply.processes] == pids
    assert reply.requests == {"running": 0, "waiting": 0}
    assert "Traceback" not in served_ids.text


def refused(response: httpx.Response) -> tuple[int, str | None, str | None, str]:
    """Status, field, code and message of an error answer."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return response.status_code, error["param"], error["code"], error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": [5, 256]}, "prompt", "prompt: token id 256 at index 1 is outside the vocabulary of 256"),
        ({"prompt": [-1]}, "prompt", "prompt: token id -1 at index 0 is outside the vocabulary of 256"),
        ({"prompt": [[5], [2**63]]}, "prompt", f"prompt: token id {2**63} at index 0 is outside the vocabulary of 256"),
        ({"prompt": []}, "prompt", NO_PROMPT),
        ({"prompt": [[]]}, "prompt", NO_PROMPT),
        ({"prompt": [7] * 512}, "prompt", "prompt: has 512 tokens; the model's context is 512 tokens with the output"),
        (
            {"prompt": [7] * 200_000},
            "prompt",
            "prompt: has 200000 tokens; the model's context is 512 tokens with the output",
        ),
        (
            {"prompt": [7] * 10, "max_tokens": 503},
            "max_tokens",
            "max_tokens: 503 with a prompt of 10 tokens is more than the limit of 512 tokens",
        ),
        (
            {"prompt": [1.5]},
            "prompt",
            "prompt: must be a text, a list of texts, a list of token ids or a list of such lists",
        ),
        ({"prompt": "hi"}, "prompt", "prompt: the model has no tokenizer; send token ids to /v1/completions"),
        ({"prompt": [5], "temperature": "NaN"}, "temperature", "temperature: Expected `float | null`, got `str`"),
        ({"prompt": [5], "temperature": -1}, "temperature", "temperature: must be between 0 and 100, got -1.0"),
        ({"prompt": [5], "max_loops": 5}, "max_loops", "max_loops: must be between 1 and 4, got 5"),
        (
            {"prompt": [5], "min_loops": 3, "max_loops": 2},
            "min_loops",
            "min_loops: must be between 1 and 2, got 3",
        ),
        (
            {"prompt": [5], "exit_threshold": -1},
            "exit_threshold",
            "exit_threshold: must be between 0 and 1000000 with exit rule ouro, got -1.0",
        ),
        ({"max_tokens": 5}, "prompt", "prompt: is required"),
    ],
)
def test_a_bad_value_is_400(served_ids: Running, fields: dict[str, Any], param: str, message: str) -> None:
    for stream in (False, True):
        response = httpx.post(f"{served_ids.url}/v1/completions", json=fields | {"stream": stream})
        assert refused(response) == (400, param, None, message)


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"tempreature": 1}, "tempreature", "unknown_field", "unknown field tempreature; did you mean temperature?"),
        ({"foo": None}, "foo", "unknown_field", "unknown field foo"),
        ({"best_of": 3}, "best_of", "unsupported_parameter", "best_of is not supported yet"),
    ],
)
def test_a_field_that_is_not_served_is_400(
    served_ids: Running, fields: dict[str, Any], param: str, code: str, message: str
) -> None:
    response = httpx.post(f"{served_ids.url}/v1/completions", json={"prompt": [5]} | fields)
    assert refused(response) == (400, param, code, message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": [5],', NO_JSON),
        (b'{"prompt": [5], "temperature": NaN}', NO_JSON),
        (b'{"prompt": [5], "temperature": -Infinity}', NO_JSON),
        (b'{"prompt": [5], "temperature": 1e999}', NO_JSON),
        (b'{"prompt": "\xff"}', NO_JSON),
        (b"", NO_JSON),
        (b"[5]", "the body must be a JSON object"),
        (b"[" * 100_000, "the body is nested too deep"),
    ],
    ids=lambda value: value[:40] if isinstance(value, bytes) else "",
)
def test_a_body_that_is_no_json_object_is_400(served_ids: Running, body: bytes, message: str) -> None:
    response = httpx.post(f"{served_ids.url}/v1/completions", content=body, headers=JSON)
    status, param, code, text = refused(response)
    assert (status, param, code) == (400, None, None)
    # What is wrong with the JSON, and where, is in the decoder's words.
    assert text == message or (message == NO_JSON and text.startswith(NO_JSON) and len(text) > len(NO_JSON))


def test_a_body_of_50_mb_is_413(served_ids: Running) -> None:
    url = f"{served_ids.url}/v1/completions"

    def in_pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * MIB

    for content in (b" " * 50 * MIB, in_pieces()):
        response = httpx.post(url, content=content, headers=JSON, timeout=30)
        assert refused(response) == (413, None, "body_too_large", TOO_LARGE)


def test_other_ways_to_be_wrong(served_ids: Running) -> None:
    with httpx.Client(base_url=served_ids.url) as http:
        assert refused(http.post("/v1/completions", content=b'{"prompt": [5]}')) == (
            415,
            None,
            "unsupported_media_type",
            "the Content-Type must be application/json",
        )
        assert refused(http.post("/v1/complete", json={})) == (
            404,
            None,
            "not_found",
            "there is nothing at /v1/complete",
        )
        assert refused(http.get("/v1/completions")) == (
            405,
            None,
            "method_not_allowed",
            "GET is not allowed at /v1/completions",
        )
        assert refused(http.post("/v1/completions", json={"prompt": [5], "model": "gpt"})) == (
            404,
            "model",
            "model_not_found",
            "the model 'gpt' is not served here; 'ouro-tiny' is",
        )
        assert refused(http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})) == (
            400,
            "messages",
            None,
            "messages: the model has no chat template; set model.chat_template to a file",
        )


def test_empty_and_endless_texts(served: Running) -> None:
    with httpx.Client(base_url=served.url, timeout=30) as http:
        context = http.get("/v1/models").json()["data"][0]["max_model_len"]
        assert refused(http.post("/v1/completions", json={"prompt": ""})) == (400, "prompt", None, NO_PROMPT)
        text = "hops " * context
        tokens = http.post("/tokenize", json={"prompt": text}).json()["count"]
        assert refused(http.post("/v1/completions", json={"prompt": text})) == (
            400,
            "prompt",
            None,
            f"prompt: has {tokens} tokens; the model's context is {context} tokens with the output",
        )
        assert refused(http.post("/v1/chat/completions", json={"messages": []})) == (
            400,
            "messages",
            None,
            "messages: is empty; at least one message is needed",
        )
        long = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
        assert refused(long)[:3] == (400, "messages", None)
        good = http.post("/v1/completions", json={"prompt": "Q: 2 + 3 = ?\nA:", "max_tokens": 4})
        assert good.status_code == 200
