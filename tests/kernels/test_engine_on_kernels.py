"""Whole engines on the kernels say what they say in torch: mixed ticks, exits, preemption, every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from rlt.attention.triton_paged import TritonAttention
from support import Golden, resolved, run_to_end

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here; tests/gpu covers engines")


class Case(NamedTuple):
    model: str
    tokens: int
    #: of the requests
    thresholds: tuple[float, ...]
    #: sections of the configuration
    sections: Mapping[str, dict[str, Any]] = MappingProxyType({})
    kernels: str = "torch"
    prompt_tokens: int = 7


#: The interpreter takes a few ms per program, so few tokens must show much.
CASES = {
    "preempted": Case("ouro-tiny", 3, (0.3, 1.0), {"kv": {"pages": 22, "page_size": 4}}),
    "copied planes": Case("ouro-tiny", 2, (0.3,), {"kv": {"layout": "last_exited_copy"}}, "triton", 4),
    "grouped heads": Case("nanbeige-tiny", 2, (1.0,)),
    "outer layers": Case("huginn-tiny", 2, (0.5,), {"exit": {"rule": "latent_diff"}}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_torch(make_engine: Callable[..., Any], name: str) -> None:
    case = CASES[name]
    golden, answers = Golden(case.model), []
    for attention, kernels in (("torch", "torch"), ("triton", case.kernels)):
        engine = make_engine(
            model={"path": str(golden.directory)},
            engine={"attention": attention, "kernels": kernels, "prefill_chunk": 4, "async_scheduling": True},
            **case.sections,
        )
        assert isinstance(engine.runner._attention, TritonAttention) == (attention == "triton")
        for number, threshold in enumerate(case.thresholds):
            prompt = golden.prompts["p7"][number : case.prompt_tokens]
            params = resolved(engine, prompt, max_tokens=case.tokens, exit_threshold=threshold)
            engine.add(str(number), prompt, params)
        done = run_to_end(engine)
        assert (engine.scheduler.preemptions > 0) == (name == "preempted")
        answers.append({key: (result.tokens, result.depths) for key, result in done.items()})
        if golden.directory.name != "nanbeige-tiny":
            assert min(done["0"].depths) < engine.info.loops, "no token leaves early: this shows too little"
    assert answers[0] == answers[1]
