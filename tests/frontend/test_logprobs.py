"""Log-probabilities in answers: spellings that are no whole characters, offsets, minus infinity, held-back text."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from frontend.harness import served
from rlt_protocols.text import Candidate, SpelledLogprob
from rltd.frontend.logprobs import TextOffsets, chat_logprobs, completion_logprobs


def entry(spelling: bytes, logprob: float, *top: tuple[int, float, bytes]) -> SpelledLogprob:
    return SpelledLogprob(Candidate(1, logprob, spelling), tuple(Candidate(*other) for other in top))


#: "é" in two tokens, and an alternative that cannot be generated
SPLIT = [
    entry(b"a", -0.5, (1, -0.5, b"a"), (2, -math.inf, b"")),
    entry(b"\xc3", -1.0, (3, -0.9, b"b"), (4, -1.0, b"\xc3")),
    entry(b"\xa9", -0.1),
    entry(b"z", -math.inf),
]


def test_completions() -> None:
    offsets = TextOffsets()
    first, rest = completion_logprobs(SPLIT[:1], offsets), completion_logprobs(SPLIT[1:], offsets)
    assert first.tokens + rest.tokens == ["a", r"bytes:\xc3", r"bytes:\xa9", "z"]
    assert first.token_logprobs + rest.token_logprobs == [-0.5, -1.0, -0.1, -9999.0]
    # Both halves of a character begin where it does.
    assert first.text_offset + rest.text_offset == [0, 1, 1, 2]
    assert first.top_logprobs == [{"token_id:2": -9999.0, "a": -0.5}]
    # The token itself is told even where nothing else is asked for.
    assert rest.top_logprobs == [{"b": -0.9, r"bytes:\xc3": -1.0}, {r"bytes:\xa9": -0.1}, {"z": -9999.0}]


def test_chat() -> None:
    content = chat_logprobs(SPLIT).content
    assert [one.token for one in content] == ["a", r"bytes:\xc3", r"bytes:\xa9", "z"]
    assert bytes(byte for one in content for byte in one.bytes).decode() == "aéz"
    assert [other.logprob for other in content[0].top_logprobs] == [-0.5, -9999.0]


async def test_a_request_says_how_many_it_wants_and_gets_them() -> None:
    async with served(hold=True) as server:
        for fields, asked in (({"logprobs": 0}, 0), ({"logprobs": 20}, 20), ({"logprobs": False}, None), ({}, None)):
            assert await _asked(server, server.complete(**fields)) == asked
        chat: Any = ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4), ({"logprobs": False}, None)
        for fields, asked in chat:
            assert await _asked(server, server.chat(**fields)) == asked


async def _asked(server: Any, request: Any) -> int | None:
    task = asyncio.create_task(request)
    count = len(server.backend.added)
    added = (await server.backend.wait_added(count + 1))[-1]
    server.backend.deliver(
        added, text="x", token_ids=(5,), depths=(1,), finish_reason="stop", logprobs=tuple(SPLIT[:1])
    )
    body = (await task).json()
    asked: int | None = added.header.params.logprobs
    assert (body["choices"][0]["logprobs"] is None) == (asked is None)
    return asked


async def test_tokens_whose_text_is_held_back_are_told() -> None:
    async with served(hold=True) as server:
        task = asyncio.create_task(server.complete(logprobs=0, stream=True))
        (added,) = await server.backend.wait_added()
        for number, one in enumerate(SPLIT):
            last = number == len(SPLIT) - 1
            server.backend.deliver(
                added,
                text="aéz" if last else "",
                token_ids=(number,),
                depths=(1,),
                logprobs=(one,),
                finish_reason="length" if last else None,
            )
            await asyncio.sleep(0.01)
        lines = [line[6:] for line in (await task).text.splitlines() if line.startswith("data: {")]
    told = [token for line in lines for token in json.loads(line)["choices"][0]["logprobs"]["tokens"]]
    assert told == ["a", r"bytes:\xc3", r"bytes:\xa9", "z"]
