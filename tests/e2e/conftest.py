"""Real daemons: shared ones for the tests that leave them as they were, and fresh ones for the others."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from proc.running import Running, real_daemon
from support import DATA

GOLDEN_OURO = str(DATA / "golden" / "ouro-tiny")
BUILT_IN = "tiny-ouro"


@contextmanager
def _shared(model: str) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="rlt-") as base, Running(Path(base), real_daemon(model)) as daemon:
        yield daemon.ready()


@pytest.fixture(scope="session")
def built_in() -> str:
    """The name of the model that `served` serves."""
    return BUILT_IN


@pytest.fixture(scope="session")
def served(built_in: str) -> Iterator[Running]:
    """The built-in model behind the whole process tree."""
    with _shared(built_in) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def served_ids() -> Iterator[Running]:
    """The golden Ouro behind the whole process tree: 256 token ids, 4 loops, a context of 512, no tokenizer."""
    with _shared(GOLDEN_OURO) as daemon:
        yield daemon


@pytest.fixture
def start(short_dir: Path) -> Iterator[Callable[..., Running]]:
    """Start daemons on the golden Ouro, which has no tokenizer and starts fast."""
    with ExitStack() as stack:

        def begin(*assignments: str, model: str = GOLDEN_OURO) -> Running:
            return stack.enter_context(Running(short_dir, real_daemon(model, *assignments)))

        yield begin
