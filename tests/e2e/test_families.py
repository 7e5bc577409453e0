"""Huginn and Nanbeige behind the whole process tree, with the prefix cache, ticks submitted ahead and so few pages that
requests are suspended: what comes out is what `LLM` says, and for the golden checkpoints what the reference says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from proc.running import Running, eventually
from rlt import LLM, SamplingParams
from rlt.bench.workload import task_prompts
from support import Golden

pytestmark = pytest.mark.e2e

Sections = dict[str, dict[str, Any]]
Prompt = str | list[int]


class Told(NamedTuple):
    """What is the same however an answer is made."""

    text: str
    token_ids: list[int]
    depths: list[int]
    finish_reason: str | None


def scarce(pages: int, **more: dict[str, Any]) -> Sections:
    """Settings under which everything happens at once."""
    engine = {"async_scheduling": True, "prefill_chunk": 16}
    return {"engine": engine, "kv": {"pages": pages, "page_size": 8, "prefix_cache": True}, **more}


def begin(start: Callable[..., Running], model: str, sections: Sections) -> Running:
    flags = [f"{name}.{key}={json.dumps(value)}" for name, keys in sections.items() for key, value in keys.items()]
    return start(*(flag.replace('"', "") for flag in flags), model=model).ready()


def post(http: httpx.Client, prompt: Prompt, asked: dict[str, Any], *, stream: bool = False) -> tuple[Told, int]:
    """One answer, and how many of its prompt's tokens came from the cache."""
    body = asked | {"prompt": prompt, "stream": stream, "return_token_ids": True, "return_depths": True}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = http.post("/v1/completions", json=body).raise_for_status()
    lines = response.text.splitlines() if stream else [f"data: {response.text}"]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    told = Told(
        "".join(choice["text"] for choice in choices),
        [token for choice in choices for token in choice["token_ids"]],
        [depth for choice in choices for depth in choice["depths"]],
        choices[-1]["finish_reason"],
    )
    return told, chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


def offline(model: str, sections: Sections, prompts: Sequence[Prompt], asked: Sequence[dict[str, Any]]) -> list[Told]:
    """The same from `LLM` with the daemon's settings, which must be so scarce that requests are suspended."""
    with LLM(model, device="cpu", dtype="float32", config=sections) as llm:
        params = [SamplingParams(**fields) for fields in asked]
        outputs = [one.outputs[0] for one in llm.generate(prompts, params)]
        assert llm.stats()["preemptions"] > 0
    return [Told(one.text, one.token_ids, one.depths, one.finish_reason) for one in outputs]


def check_idle(http: httpx.Client, pages: int) -> None:
    """Every request is gone, and every page is free or cached."""

    def idle() -> bool:
        samples = dict(
            line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if not line.startswith("#")
        )
        values = {name: float(value) for name, value in samples.items() if name.startswith(("rlt:num_", "rlt:kv_p"))}
        state = {
            word: sum(v for k, v in values.items() if word in k) for word in ("requests", "used", "free", "cached")
        }
        return state["requests"] == state["used"] == 0 and state["free"] + state["cached"] == pages

    eventually(idle, "no request and no used page")


def check_chat(url: str) -> None:
    """Nanbeige thinks unless it is told not to, is shown tools, and has one depth only."""
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    asked: Any = {"messages": [{"role": "user", "content": "What is 345 + 278?"}], "temperature": 0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chat: Any = client.chat.completions
        asked["model"] = client.models.list().data[0].id
        for body in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            answer = chat.create(**asked, extra_body=body)
            message = answer.choices[0].message
            assert message.content == "The answer is 623."
            assert bool(message.to_dict().get("reasoning_content")) == body.get("enable_thinking", True)
            with chat.stream(**asked, extra_body=body) as stream:
                streamed = stream.get_final_completion().choices[0].message
            assert (streamed.content, streamed.to_dict().get("reasoning_content")) == (
                message.content,
                message.to_dict().get("reasoning_content"),
            )
        with_tool = chat.create(**asked, tools=[tool])
        assert with_tool.usage.prompt_tokens > answer.usage.prompt_tokens + 50
        with pytest.raises(
            openai.BadRequestError, match="max_loops: must be 2 with this model, got 1: its weights are"
        ):
            chat.create(**asked, extra_body={"max_loops": 1})


@pytest.mark.parametrize(
    ("model", "sections"),
    [
        ("tiny-nanbeige", scarce(90)),
        ("tiny-huginn", scarce(200, exit={"rule": "kl", "threshold": 0.05})),
    ],
)
def test_a_built_in_model_answers_like_the_offline_engine(
    start: Callable[..., Running], model: str, sections: Sections
) -> None:
    adaptive = "exit" in sections
    example = "Q: What is 345 + 278?\nA: 623\n" * 3
    prompts: list[Prompt] = [example * (number % 3 == 0) + text for number, text in enumerate(task_prompts(12, seed=5))]
    asked: list[dict[str, Any]] = [
        {"max_tokens": 24, "temperature": number % 2, "seed": number, "ignore_eos": number % 4 < 2}
        for number in range(len(prompts))
    ]
    if adaptive:
        asked[4]["exit_threshold"] = 0
    want = offline(model, sections, prompts, asked)
    assert (len({depth for told in want for depth in told.depths}) > 1) == adaptive

    daemon = begin(start, model, sections)
    with httpx.Client(base_url=daemon.url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:

        def one(number: int) -> Told:
            return post(http, prompts[number], asked[number], stream=number % 3 > 0)[0]

        def leave(number: int) -> None:
            body = asked[number] | {"prompt": prompts[number], "stream": True, "ignore_eos": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())

        with ThreadPoolExecutor(16) as pool:
            leaving = [pool.submit(leave, number) for number in range(4)]
            got = list(pool.map(one, range(len(prompts))))
            for future in leaving:
                future.result()
        assert got == want
        check_idle(http, sections["kv"]["pages"])
        # Alone, a prompt leaves all its pages for the next one.
        _, (again, cached) = (post(http, prompts[0], asked[0]) for _ in range(2))
        assert again == want[0]
        assert cached >= 32
    if model == "tiny-nanbeige":
        check_chat(daemon.url)


@pytest.mark.parametrize(
    ("name", "run", "pages"),
    [("huginn-tiny", ("adaptive_last_exited", "kl"), 130), ("nanbeige-tiny", ("full_depth",), 24)],
)
def test_a_golden_checkpoint_answers_like_the_reference(
    start: Callable[..., Running], name: str, run: tuple[str, ...], pages: int
) -> None:
    golden = Golden(name)
    want = golden.facts["runs"]
    for key in run:
        want = want[key]
    exit = {"exit": {"rule": "kl", "threshold": want["p7"]["threshold"]}} if "kl" in run else {}
    sections = scarce(pages, **exit)
    names = ["p33", "p1", "p7"] * 2
    prompts: list[Prompt] = [golden.prompts[one] for one in names]
    asked = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}
    daemon = begin(start, str(golden.directory), sections)
    with httpx.Client(base_url=daemon.url, timeout=60) as http:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [told for told, _ in pool.map(lambda prompt: post(http, prompt, asked), prompts)]
        check_idle(http, pages)
        _, (again, cached) = (post(http, prompts[0], asked) for _ in range(2))
        assert (again, cached) == (answers[0], 32)
        if exit:
            deep, _ = post(http, golden.prompts["p7"], asked | {"exit_threshold": 0})
            assert deep.token_ids == golden.facts["runs"]["greedy_zero_state"]["p7"]["tokens"]
    assert answers == offline(str(golden.directory), sections, prompts, [asked] * len(prompts))
    assert [told.token_ids for told in answers] == [want[one]["tokens"] for one in names]
    if exit:
        assert [told.depths for told in answers] == [want[one]["loops_executed"] for one in names]
