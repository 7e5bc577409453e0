"""The engine on a GPU says in float32 what it says on the CPU: tokens and depths, under every feature at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from rlt import LLM, SamplingParams
from rlt.bench.workload import task_prompts
from rlt.models.directory import BUILT_IN

pytestmark = pytest.mark.gpu

PROMPTS = task_prompts(24, seed=11)

Sections = dict[str, dict[str, Any]]
#: what differs from the default configuration
VARIANTS: dict[str, Sections] = {
    "plain": {},
    "synchronous": {"engine": {"async_scheduling": False}},
    "phases apart": {"engine": {"mixed": False, "wavefront": False}},
    "small chunks": {"engine": {"prefill_chunk": 8, "max_tick_tokens": 48, "max_seqs": 12}},
    "few pages": {"kv": {"page_size": 4, "pages": 160}, "engine": {"prefill_chunk": 16}},
    "no prefix cache": {"kv": {"prefix_cache": False}},
    "copied planes": {"kv": {"layout": "last_exited_copy"}},
}
#: settings of [engine] on the GPU: each kind of kernels alone, and together
KERNELS: dict[str, dict[str, str]] = {
    "torch": {"attention": "torch", "kernels": "torch"},
    "triton attention": {"attention": "triton", "kernels": "torch"},
    "triton layers": {"attention": "torch", "kernels": "triton"},
    "triton": {"attention": "triton", "kernels": "triton"},
}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}

Answers = list[tuple[list[int], list[int]]]


def answers(model: str, device: str, sections: Sections, **params: Any) -> Answers:
    """Tokens and depths of every prompt, of which the later half repeats the earlier one."""
    with LLM(model, device=device, dtype="float32", config=sections) as llm:
        sampling = [SamplingParams(max_tokens=24, seed=seed, **params) for seed in range(len(PROMPTS))]
        outputs = llm.generate([*PROMPTS[:12], *PROMPTS[:12]], sampling)
        stats = llm.stats()
    if "pages" in sections.get("kv", {}):
        assert stats["preemptions"] > 0, "the pages run out"
    return [(output.outputs[0].token_ids, output.outputs[0].depths) for output in outputs]


def on_gpu(model: str, sections: Sections, kernels: str, **params: Any) -> Answers:
    if kernels != "torch":
        pytest.importorskip("triton")
    engine = sections.get("engine", {}) | KERNELS[kernels]
    return answers(model, "cuda", sections | {"engine": engine}, **params)


@cache
def greedy_on_cpu(model: str, variant: str) -> Answers:
    return answers(model, "cpu", VARIANTS[variant], temperature=0)


@cache
def sampled_on_cpu(model: str) -> Answers:
    return answers(model, "cpu", {}, **SAMPLED)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("model", BUILT_IN)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_is_the_same(model: str, variant: str, kernels: str) -> None:
    assert on_gpu(model, VARIANTS[variant], kernels, temperature=0) == greedy_on_cpu(model, variant)


@pytest.mark.parametrize("kernels", ["triton attention", "triton layers"])
@pytest.mark.parametrize("model", BUILT_IN)
def test_greedy_is_the_same_with_some_kernels(model: str, kernels: str) -> None:
    assert on_gpu(model, {}, kernels, temperature=0) == greedy_on_cpu(model, "plain")


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("model", BUILT_IN)
def test_a_seed_gives_the_same_text(model: str, kernels: str) -> None:
    assert on_gpu(model, {}, kernels, **SAMPLED) == sampled_on_cpu(model)
