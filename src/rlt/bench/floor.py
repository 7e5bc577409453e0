"""How fast a decode step could be: its bytes and operations over what this device was measured to do.

A step gives each of `rows` requests one token. It reads the looped weights once per loop, the others once, and each
row's keys and values of its context once per loop. What is larger, that over the memory's rate or the operations over
the rate of large matrix products, is the floor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from rlt.exec.memory import page_bytes
from rlt.models.registry import MATHS
from rlt.models.spec import ModelSpec

#: by family: what the names of tensors begin with that are read once per loop
_LOOPED = {
    "ouro": ("model.layers.", "model.norm.", "model.early_exit_gate."),
    "nanbeige": ("model.layers.", "model.norm."),
    "huginn": ("transformer.core_block.", "transformer.adapter."),
}
#: Of it a step reads the rows of its tokens only. Huginn's is the head as well, which is read whole.
_EMBEDDING = "model.embed_tokens.weight"


class Work(NamedTuple):
    """Bytes that must be read and operations that must be done."""

    bytes: float
    flop: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the work of a step is made of, with numbers of `itemsize` bytes."""

    looped_weights: int
    other_weights: int
    #: of one position, in one loop and outside of the loops
    looped_kv_bytes: int
    other_kv_bytes: int
    looped_attention_flop: int
    other_attention_flop: int
    itemsize: int

    def of(self, rows: int, context: float, loops: float) -> Work:
        """A step of `rows` rows that attend to `context` positions each and run `loops` loops on average."""
        weights = loops * self.looped_weights + self.other_weights
        kv_bytes = loops * self.looped_kv_bytes + self.other_kv_bytes
        attention = loops * self.looped_attention_flop + self.other_attention_flop
        return Work(
            weights * self.itemsize + rows * context * kv_bytes,
            rows * (2 * weights + context * attention),
        )


class Ceilings(NamedTuple):
    """Rates of this device: memory, when it is copied (bytes read and written) and when it is read; matrix products."""

    copy_bytes_per_s: float
    read_bytes_per_s: float
    matmul_flop_per_s: float

    def seconds(self, work: Work) -> float:
        memory = max(self.copy_bytes_per_s, self.read_bytes_per_s)
        return max(work.bytes / memory, work.flop / self.matmul_flop_per_s)


def step_work(spec: ModelSpec, dtype: torch.dtype) -> StepWork:
    """What a decode step of a model must do, by its shape alone."""
    maths = MATHS[spec.family]
    sizes = {name: math.prod(shape) for name, shape in maths.shapes(spec).items() if name not in maths.derived}
    looped = sum(size for name, size in sizes.items() if name.startswith(_LOOPED[spec.family]))
    one = page_bytes(spec, 1, dtype)
    attention = 4 * spec.heads * spec.head_dim
    return StepWork(
        looped_weights=looped,
        other_weights=sum(sizes.values()) - looped - sizes.get(_EMBEDDING, 0),
        looped_kv_bytes=one,
        other_kv_bytes=one // spec.layers * spec.outer_layers,
        looped_attention_flop=attention * spec.layers,
        other_attention_flop=attention * spec.outer_layers,
        itemsize=dtype.itemsize,
    )


def measure_ceilings(device: torch.device, dtype: torch.dtype, repeats: int = 15) -> Ceilings:
    """Measure this device with random numbers that are far larger than its caches; medians of `repeats` runs.

    On a GPU that takes 9 GB of its memory, which are free again afterwards.
    """
    ceilings = _measure(device, dtype, repeats)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def _measure(device: torch.device, dtype: torch.dtype, repeats: int) -> Ceilings:
    on_gpu = device.type == "cuda"
    count = (4 << 30) // dtype.itemsize if on_gpu else (256 << 20) // dtype.itemsize
    side = 8192 if on_gpu else 1024
    source = torch.empty(count, device=device, dtype=dtype).normal_()
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    # The sum's rows keep all of a GPU busy, and its result is small.
    rows = source.view(1 << 12, -1)
    size = count * dtype.itemsize
    return Ceilings(
        2 * size / _seconds(lambda: target.copy_(source), device, repeats),
        size / _seconds(lambda: torch.sum(rows, 1), device, repeats),
        2 * side**3 / _seconds(lambda: torch.mm(left, right, out=product), device, repeats),
    )


def floor(
    spec: ModelSpec, ceilings: Ceilings, dtype: torch.dtype, rows: int, context: int, loops: int
) -> dict[str, Any]:
    """The floor of one kind of step, as the command prints it."""
    work = step_work(spec, dtype).of(rows, context, loops)
    seconds = ceilings.seconds(work)
    return {
        "floor_ms": round(seconds * 1e3, 4),
        "tokens_per_s": round(rows / seconds, 1),
        "gigabytes": round(work.bytes / 1e9, 4),
        "gigaflop": round(work.flop / 1e9, 4),
    }


def beside_floor(result: dict[str, Any], spec: ModelSpec, ceilings: Ceilings, dtype: torch.dtype) -> dict[str, Any]:
    """What `rlt.bench.offline.latency` measured, held against the floor of its mean depth."""
    if "step_ms" not in result:
        return {}
    work = step_work(spec, dtype).of(result["rows"], result["context"], result["mean_loops"])
    floor_ms = ceilings.seconds(work) * 1e3
    return {
        "floor_ms": round(floor_ms, 4),
        "floor_ratio": round(floor_ms / result["step_ms"]["median"], 4),
        "ceilings": rates(ceilings),
    }


def rates(ceilings: Ceilings) -> dict[str, float]:
    """The ceilings, as the command prints them."""
    return {
        "copy_gb_per_s": round(ceilings.copy_bytes_per_s / 1e9, 1),
        "read_gb_per_s": round(ceilings.read_bytes_per_s / 1e9, 1),
        "matmul_tflop_per_s": round(ceilings.matmul_flop_per_s / 1e12, 3),
    }


def _seconds(act: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of `act`, after two runs that warm up."""
    times = []
    for index in range(repeats + 2):
        start = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index >= 2:
            times.append(time.perf_counter() - start)
    return median(times)
