"""Fixtures of the process tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from proc.running import Running


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for socket names; pytest's own may not."""
    path = Path(tempfile.mkdtemp(prefix="rlt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[Callable[..., Running]]:
    """Start daemons with fake children; whatever still runs is killed at the end."""
    with ExitStack() as stack:

        def start(*assignments: str, env: dict[str, str] | None = None) -> Running:
            return stack.enter_context(Running(short_dir, *assignments, env=env))

        yield start
