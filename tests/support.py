"""Helpers that several test modules import."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from rlt_protocols.params import SamplingParams, resolve

DATA = Path(__file__).parent / "data"


class Golden:
    """A golden checkpoint's directory, its JSON facts and its expected tensors."""

    def __init__(self, name: str) -> None:
        self.directory = DATA / "golden" / name
        self.facts: dict[str, Any] = json.loads((self.directory / "golden.json").read_text())
        self.tensors = load_file(self.directory / "golden.safetensors")
        self.prompts: dict[str, list[int]] = self.facts["prompts"]


def resolved(engine: Any, prompt: Sequence[int], **params: Any) -> Any:
    """Resolved parameters for `prompt`: greedy, no early ends unless asked for."""
    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 32, "ignore_eos": True} | params)
    return resolve(settings, engine.info, len(prompt), random_seed=0)


def prompt_states(engine: Any, prompt: list[int]) -> tuple[torch.Tensor, list[list[int]]]:
    """Hidden rows after each loop, [loops, positions, hidden], of a prompt that runs in one chunk; and its pages."""
    engine.add("r", prompt, resolved(engine, prompt, max_tokens=1))
    states, pages = [], []
    while engine.has_work:
        plan = engine.scheduler.plan()
        results = engine.runner.submit(plan).read()
        states.append(engine.runner.hidden[plan.prompts[0].rows].clone())
        pages = [list(p) for p in engine.scheduler.requests["r"].lists]
        engine.scheduler.apply(plan, results)
    return torch.stack(states), pages


def run_to_end(engine: Any, limit: int = 20_000) -> dict[str, Any]:
    """Step until idle; tokens, depths and finish reason by request id."""
    done: dict[str, Any] = {}
    for _ in range(limit):
        if not engine.has_work:
            return done
        for out in engine.step():
            result = done.setdefault(out.request_id, SimpleNamespace(tokens=[], depths=[], finish=None, error=None))
            assert result.finish is None, "a token came after the end"
            result.tokens += out.token_ids
            result.depths += out.depths
            result.finish, result.error = out.finish_reason, out.error
        engine.scheduler.check_integrity()
    raise AssertionError(f"still working after {limit} ticks")
