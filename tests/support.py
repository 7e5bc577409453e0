"""Helpers that several test modules import."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
