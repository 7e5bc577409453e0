"""Real daemons: one shared by all tests that leave it as it was, and fresh ones for the others."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import DATA

from proc.running import Running, real_daemon

GOLDEN_OURO = str(DATA / "golden" / "ouro-tiny")


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    """The built-in model behind the whole process tree."""
    with tempfile.TemporaryDirectory(prefix="rlt-") as base, Running(Path(base), real_daemon("tiny-ouro")) as daemon:
        yield daemon.ready()


@pytest.fixture
def start(short_dir: Path) -> Iterator[Callable[..., Running]]:
    """Start daemons on the golden Ouro, which has no tokenizer and starts fast."""
    with ExitStack() as stack:

        def begin(*assignments: str, model: str = GOLDEN_OURO) -> Running:
            return stack.enter_context(Running(short_dir, real_daemon(model, *assignments)))

        yield begin
