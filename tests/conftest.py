"""What all tests share: the golden checkpoints and small engines on them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import Golden


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def ouro_golden() -> Golden:
    return Golden("ouro-tiny")


@pytest.fixture(scope="session")
def nanbeige_golden() -> Golden:
    return Golden("nanbeige-tiny")


@pytest.fixture
def make_engine(ouro_golden: Golden) -> Callable[..., Any]:
    """Build an engine on the golden Ouro, or `model`: `make_engine(engine={...}, kv={...})`, fp32 on the CPU."""
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


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for socket names; pytest's own may not."""
    path = Path(tempfile.mkdtemp(prefix="rlt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
