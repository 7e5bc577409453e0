"""The real engine core process around a fake engine. FAKE_ENGINE makes it fail at the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from fake_engine import FakeEngine

from rlt.config import Config
from rlt.errors import ModelError, RltError
from rltd.engine_core.core import EngineLike
from rltd.engine_core.main import main


def build(config: Config, progress: Callable[[str, float], None]) -> tuple[EngineLike, str]:
    behaviour = os.environ.get("FAKE_ENGINE", "")
    if behaviour == "fatal-usage":
        raise ModelError(f"{config.model.path}: the model is broken\nget a whole one")
    if behaviour == "fatal":
        raise RltError("the device has left")
    progress("model.safetensors", 0.5)
    return FakeEngine(), "cpu"


if __name__ == "__main__":
    sys.exit(main(factory=build))
