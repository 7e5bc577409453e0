"""How many pages the key/value cache gets."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from rlt.config import KvConfig
from rlt.errors import MemoryPlanError
from rlt.models.spec import ModelSpec

#: of a CPU's cache when the configuration names no size; pages that are never used take no memory
CPU_DEFAULT_BYTES = 1 << 29
GPU_DEFAULT_FRACTION = 0.9


def page_bytes(spec: ModelSpec, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page: keys and values of `page_size` positions in as many layers as loop."""
    return 2 * spec.layers * page_size * spec.kv_heads * spec.head_dim * dtype.itemsize


def plan_pages(
    kv: KvConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, not_loaded_bytes: int = 0
) -> int:
    """Number of pages for `kv` on `device`, counted after the weights are loaded, or as if `not_loaded_bytes` were.

    Raises `MemoryPlanError` when not even one page per page list fits, or when they are more than the device could
    hold.
    """
    size = page_bytes(spec, kv.page_size, dtype)
    if kv.pages is not None:
        pages = kv.pages
    elif kv.bytes is not None:
        pages = kv.bytes // size
    else:
        pages = _default_bytes(kv.memory_fraction, device, not_loaded_bytes) // size
    least = spec.outer_lists + spec.loops
    if pages < least:
        more = " and for the layers outside of the loops" if spec.outer_lists else ""
        raise MemoryPlanError(
            f"the KV cache gets {pages} pages of {size} bytes; at least {least} are needed, one per loop{more} "
            "(raise kv.pages, kv.bytes or kv.memory_fraction)"
        )
    total = _total_bytes(device)
    if pages * size > total:
        raise MemoryPlanError(
            f"the KV cache of {pages} pages has {pages * size} bytes; {device} has {total} bytes of memory in all "
            "(lower kv.pages or kv.bytes)"
        )
    return pages


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _default_bytes(fraction: float | None, device: torch.device, not_loaded_bytes: int) -> int:
    if fraction is None:
        if device.type == "cpu":
            return CPU_DEFAULT_BYTES
        fraction = GPU_DEFAULT_FRACTION
    return int(max(0, _free_bytes(device) - not_loaded_bytes) * fraction)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # What holds copies of files counts as free: reading the weights has just filled it.
    with suppress(OSError, LookupError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        entries = dict(line.split(":", 1) for line in lines)
        return int(entries["MemAvailable"].removesuffix("kB")) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
