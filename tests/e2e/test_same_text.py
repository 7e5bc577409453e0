"""What an answer says does not depend on its neighbours: alone, among 63 others, or in another process (float32)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from proc.running import Running
from rlt import LLM, SamplingParams
from rlt.bench.workload import task_prompts

pytestmark = pytest.mark.e2e

STREAMS = 64
PROMPTS = task_prompts(STREAMS, seed=7)
#: With a threshold in the middle, so that rows of one tick are at different loops and leave at different depths.
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "stop": ["\n"], "exit_threshold": 0.6}

Answer = tuple[str, list[int]]


async def stream(client: httpx.AsyncClient, prompt: str) -> Answer:
    """Text and depths of one streamed answer."""
    text, depths = "", []
    body = FIELDS | {"prompt": prompt, "stream": True, "return_depths": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
                depths += choice["depths"]
    return text, depths


async def answers(url: str, together: int) -> list[Answer]:
    """All answers, `together` at a time."""
    gate = asyncio.Semaphore(together)

    async def one(prompt: str) -> Answer:
        async with gate:
            return await stream(client, prompt)

    limits = httpx.Limits(max_connections=together)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        return await asyncio.gather(*map(one, PROMPTS))


def test_concurrent_streams_say_what_single_ones_say(served: Running, built_in: str) -> None:
    single = asyncio.run(answers(served.url, 1))
    concurrent = asyncio.run(answers(served.url, STREAMS))
    assert concurrent == single
    with LLM(built_in, device="cpu", dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=16, stop=("\n",), exit_threshold=0.6)
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    assert [(output.text, output.depths) for output in outputs] == single
    assert len({depth for _, depths in single for depth in depths}) > 1, "the exits are put to the test"
