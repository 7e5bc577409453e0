"""Chooses where kernels run, before anything imports them."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

from kernels.places import Place

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif not torch.cuda.is_available():
    # Triton reads it when it is imported, and whenever a kernel's module is.
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "too late for the interpreter"
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32, 2e-5), id="interpreted"),
        pytest.param(("cuda", torch.float32, 1e-4), id="float32", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.bfloat16, 2e-2), id="bfloat16", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.float16, 4e-3), id="float16", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    device, dtype, tolerance = request.param
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here; the other cases cover them")
    return Place(torch.device(device), dtype, tolerance)
