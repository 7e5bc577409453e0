"""Where kernels run, what "auto" means, and what is refused with which reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlt.attention.backends import BACKENDS, choose_backend
from rlt.config import load_config
from rlt.errors import ConfigError
from rlt.kernels.available import DTYPES, multiprocessors, obstacle, obstacle_on
from rlt.kernels.ops import TritonOps
from rlt.models.ops import TORCH, choose_ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KEYS = ("attention", "kernels")


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.fixture(params=[(8, 0), (9, 0)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))


def refused(**sections: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=sections)
    return caught.value.problems


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("device", [None, "cpu", "cuda:1"])
@pytest.mark.usefixtures("no_triton")
def test_not_installed(key: str, device: str | None) -> None:
    where = (device or "cuda").partition(":")[0]
    assert refused(engine={key: "triton", "device": device}) == [
        f'engine.{key} = "triton" cannot run on {where}: Triton is not installed (it is in the extra `gpu`, for Linux)'
    ]
    assert choose_backend("engine.attention", "auto", CUDA, torch.bfloat16) == "torch"
    assert choose_ops("auto", CUDA, torch.bfloat16) is TORCH


@pytest.mark.parametrize("key", KEYS)
def test_on_a_cpu_only_in_the_interpreter(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    load_config(overrides={"engine": {key: "triton", "device": "cpu"}})
    half = refused(engine={key: "triton", "device": "cpu"}, model={"dtype": "bfloat16"})
    assert half == [
        f'engine.{key} = "triton" cannot run on cpu: on a device of type cpu the kernels do not compute in bfloat16'
    ]
    monkeypatch.delenv("TRITON_INTERPRET")
    (problem,) = refused(engine={key: "triton", "device": "cpu"})
    assert problem.startswith(f'engine.{key} = "triton" cannot run on cpu: kernels are compiled for GPUs; on a CPU')


def test_both_keys_and_an_unknown_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problems = refused(engine={"attention": "triton", "kernels": "triton", "device": "cpu"})
    assert [problem.partition(" ")[0] for problem in problems] == ["engine.attention", "engine.kernels"]
    assert refused(engine={"attention": "triton", "device": "tpu"}) == [
        "engine.device must be cpu, cuda or cuda:<index>, got 'tpu'"
    ]


@pytest.mark.parametrize("key", KEYS)
def test_an_engine_that_finds_only_a_cpu_refuses(
    make_engine: Callable[..., Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `engine.device`, what it means is only known when the engine starts."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf'^engine.{key} = "triton" cannot run on cpu: kernels are compiled for'):
        make_engine(engine={key: "triton", "device": None})


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    assert choose_backend("engine.attention", "triton", CUDA, dtype) == "triton"
    for name in ("auto", "torch"):
        assert choose_backend("engine.attention", name, CUDA, dtype) == "torch"
    for ops in ("auto", "torch"):
        assert choose_ops(ops, CUDA, dtype) is TORCH
    assert obstacle_on(CUDA, dtype) is None


@pytest.mark.usefixtures("old_gpu")
def test_a_gpu_that_is_too_old() -> None:
    assert choose_backend("engine.attention", "auto", CUDA, torch.bfloat16) == "torch"
    assert choose_ops("auto", CUDA, torch.bfloat16) is TORCH
    why = "the kernels need a GPU of compute capability 8.0 or more, and this one has 7.5"
    with pytest.raises(ConfigError, match=f'^engine.attention = "triton" cannot run on cuda: {why}$'):
        choose_backend("engine.attention", "triton", CUDA, torch.bfloat16)
    with pytest.raises(ConfigError, match=f'^engine.kernels = "triton" cannot run on cuda: {why}$'):
        choose_ops("triton", CUDA, torch.bfloat16)


def test_auto_on_a_cpu_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("engine.attention", "auto", CPU, torch.float32) == "torch"
    assert choose_ops("auto", CPU, torch.float32) is TORCH
    assert isinstance(choose_ops("triton", CPU, torch.float32), TritonOps)
    assert multiprocessors(CPU) == 4


def test_float64_is_nowhere() -> None:
    assert all(obstacle(device, "float64") is not None for device in DTYPES)
    assert all("float64" not in each for backend in BACKENDS.values() for each in backend.dtypes.values())
