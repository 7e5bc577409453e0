"""What all tests share: the golden checkpoints and small engines on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


class Golden:
    """A golden checkpoint's directory, its JSON facts and its expected tensors."""

    def __init__(self, name: str) -> None:
        from safetensors.torch import load_file

        self.directory = GOLDEN / name
        self.facts: dict[str, Any] = json.loads((self.directory / "golden.json").read_text())
        self.tensors = load_file(self.directory / "golden.safetensors")
        self.prompts: dict[str, list[int]] = self.facts["prompts"]


@pytest.fixture(scope="session")
def ouro_golden() -> Golden:
    return Golden("ouro-tiny")


@pytest.fixture
def make_engine(ouro_golden: Golden) -> Callable[..., Any]:
    """Build an engine on the golden Ouro: `make_engine(engine={...}, kv={...})`, fp32 on the CPU."""
    from rlt.config import load_config
    from rlt.engine import Engine

    def make(**sections: dict[str, Any]) -> Engine:
        tree: dict[str, dict[str, Any]] = {
            "model": {"path": str(ouro_golden.directory), "dtype": "float32"},
            "engine": {"device": "cpu", "max_seqs": 8},
            "kv": {"pages": 800},
        }
        for name, values in sections.items():
            tree.setdefault(name, {}).update(values)
        return Engine(load_config(overrides=tree))

    return make


def resolved(engine: Any, prompt: Sequence[int], **params: Any) -> Any:
    """Resolved parameters for `prompt`: greedy, no early ends unless asked for."""
    from rlt_protocols.params import SamplingParams, resolve

    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 32, "ignore_eos": True} | params)
    return resolve(settings, engine.info, len(prompt), random_seed=0)


def run_to_end(engine: Any, limit: int = 20_000) -> dict[str, Any]:
    """Step until idle; tokens, depths and finish reason by request id."""
    from types import SimpleNamespace

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
