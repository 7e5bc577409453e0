"""Log-probabilities against a dense reference, alone and beside others, whatever happens in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference.dense import NOISE
from reference.families import DenseOuro
from rlt_protocols.text import TokenLogprob
from support import Golden, resolved

PROMPTS = [[5, 9, 31, 7, 5, 12], [3, 3, 8], [60, 2, 44, 17, 9, 21, 30, 8, 4]]
ASKED: list[int | None] = [5, None, 0, 20, 1, None]
TOKENS = 10


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("pages", [800, 30])
def test_they_are_the_models_own(
    make_engine: Callable[..., Any], ouro_golden: Golden, pages: int, asynchronous: bool
) -> None:
    """Penalties change what is chosen, and not what is told; with few pages requests are suspended in between."""
    engine = make_engine(
        kv={"pages": pages, "page_size": 4, "prefix_cache": False}, engine={"async_scheduling": asynchronous}
    )
    dense = DenseOuro(ouro_golden.directory)
    for index, most in enumerate(ASKED):
        prompt = PROMPTS[index % len(PROMPTS)]
        bias = {7: 30.0} if index == 3 else None
        engine.add(str(index), prompt, resolved(engine, prompt, max_tokens=TOKENS, logprobs=most, logit_bias=bias))
    told: dict[str, list[TokenLogprob]] = {str(index): [] for index in range(len(ASKED))}
    tokens: dict[str, list[int]] = {name: [] for name in told}
    while engine.has_work:
        for out in engine.step():
            told[out.request_id] += out.logprobs
            tokens[out.request_id] += out.token_ids
    assert (engine.scheduler.preemptions > 0) == (pages == 30)
    for index, most in enumerate(ASKED):
        name, prompt = str(index), PROMPTS[index % len(PROMPTS)]
        if most is None:
            assert told[name] == []
            continue
        want = dense.generate(prompt, TOKENS, threshold=engine.info.exit_threshold)
        if index == 3:
            assert tokens[name][0] == 7 != want.tokens[0], "the bias is put to the test"
        sure = 1 if index == 3 else want.sure(NOISE)
        assert sure > 0
        scale = torch.log_softmax(want.logits, -1)
        for place in range(sure):
            entry = told[name][place]
            assert entry.logprob == pytest.approx(float(scale[place, tokens[name][place]]), abs=1e-3)
            assert len(entry.top) == most
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            for token, value in entry.top:
                assert value == pytest.approx(float(scale[place, token]), abs=1e-3)
            assert values[:1] == pytest.approx(scale[place].topk(1).values.tolist()[: len(values)], abs=1e-3)
        assert len(told[name]) == len(tokens[name])


def test_ids_that_cannot_be_generated_have_none(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    known = engine.runner.model.spec.known_tokens
    logits = torch.zeros(1, engine.info.vocab_size)
    _, _, logprobs = engine.runner._next_tokens(torch.tensor([0]), logits, 3)
    assert logprobs is not None
    assert float(logprobs.chosen[0]) == pytest.approx(-math.log(known), abs=1e-5)
