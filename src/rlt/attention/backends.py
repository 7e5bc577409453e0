"""The attention back ends, what each can do, and which one runs. Nothing is imported for those that do not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from rlt.errors import ConfigError
from rlt.kernels import available

if TYPE_CHECKING:
    import torch

    from rlt.attention.interface import AttentionBackend, KvPool


class Backend(NamedTuple):
    """A back end's declared capabilities, and how to make one."""

    #: by type of device
    dtypes: Mapping[str, tuple[str, ...]]
    #: why it cannot run on a device with a dtype, or None
    obstacle_on: Callable[[torch.device, torch.dtype], str | None]
    #: for a pool and a number of query heads
    make: Callable[[KvPool, int], AttentionBackend]
    #: where its results were compared with a reference
    validated: str


def _torch(pool: KvPool, heads: int) -> AttentionBackend:
    from rlt.attention.torch_reference import TorchAttention

    return TorchAttention(pool)


def _triton(pool: KvPool, heads: int) -> AttentionBackend:
    from rlt.attention.triton_paged import TritonAttention

    return TritonAttention(pool, heads)


_BOTH = ("float32", "bfloat16")

#: by the values of `engine.attention`
BACKENDS = {
    "torch": Backend(
        dtypes={"cpu": _BOTH, "cuda": _BOTH},
        obstacle_on=lambda device, dtype: None,
        make=_torch,
        validated="CPU; NVIDIA H200, whole engine in float32",
    ),
    "triton": Backend(
        dtypes={"cuda": available.DTYPES["cuda"]},
        obstacle_on=available.obstacle_on,
        make=_triton,
        validated="NVIDIA H200 (torch 2.11, Triton 3.6), kernel by kernel; whole engine in Triton's interpreter only",
    ),
}

#: What "auto" means. A back end takes over where a whole engine on it was held against the reference.
AUTO = "torch"


def choose_backend(key: str, name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The back end, a key of `BACKENDS`, that `name` means for the setting `key`; `ConfigError` if it cannot run."""
    name = AUTO if name == "auto" else name
    why = BACKENDS[name].obstacle_on(device, dtype)
    if why is not None:
        raise ConfigError([f'{key} = "{name}" cannot run on {device}: {why}'])
    return name
