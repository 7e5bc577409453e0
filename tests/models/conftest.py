"""The tiny Ouro checkpoint, as it is and as a copy that a test may break."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY = Path(__file__).parents[1] / "data" / "golden" / "ouro-tiny"


@pytest.fixture
def tiny() -> Path:
    return TINY


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of config.json and the weights, free to change."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def edit(broken: Path) -> Callable[..., Path]:
    """Set and drop keys of a JSON file in `broken`, made if it is not there."""

    def change(file: str = "config.json", *, drop: tuple[str, ...] = (), **values: Any) -> Path:
        path = broken / file
        data = json.loads(path.read_text()) if path.exists() else {}
        data.update(values)
        for key in drop:
            del data[key]
        path.write_text(json.dumps(data))
        return broken

    return change
