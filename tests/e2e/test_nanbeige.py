"""The golden Nanbeige behind the whole process tree."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from proc.running import Running
from rlt import LLM, SamplingParams
from support import Golden

pytestmark = pytest.mark.e2e


def test_the_daemon_answers_like_the_offline_engine(start: Callable[..., Running], nanbeige_golden: Golden) -> None:
    daemon = start("kv.pages=200", model=str(nanbeige_golden.directory)).ready()
    prompt = nanbeige_golden.prompts["p33"]
    body = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=daemon.url, timeout=60) as http:
        extras = {"return_token_ids": True, "return_depths": True}
        (choice,) = http.post("/v1/completions", json=body | extras).raise_for_status().json()["choices"]
        refused = http.post("/v1/completions", json=body | {"max_loops": 1})
    with LLM(str(nanbeige_golden.directory), device="cpu", dtype="float32", config={"kv": {"pages": 200}}) as llm:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        answer = llm.generate(prompt, params)[0].outputs[0]
    assert answer.token_ids == nanbeige_golden.facts["runs"]["full_depth"]["p33"]["tokens"]
    assert (choice["token_ids"], choice["depths"]) == (answer.token_ids, answer.depths)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "max_loops"
    assert error["message"].startswith("max_loops: must be 2 with this model, got 1: its weights are right only after")
