"""Fixtures of the process tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from proc.running import Running, fake_daemon


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[Callable[..., Running]]:
    """Start daemons with fake children; whatever still runs is killed at the end."""
    with ExitStack() as stack:

        def start(*assignments: str, env: dict[str, str] | None = None) -> Running:
            return stack.enter_context(Running(short_dir, fake_daemon(*assignments), env))

        yield start
