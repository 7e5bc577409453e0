"""What `rltd check` finds out about text and memory before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlt.config import Config, KvConfig
from rlt.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of the engine.

    `cache_tokens` is what fits at full depth, the answers of all requests with their prompts; `request_tokens` is the
    longest request that surely fits.
    """

    device: str
    dtype: str
    weights_bytes: int
    page_bytes: int
    pages: int
    cache_bytes: int
    cache_tokens: int
    request_tokens: int


def check_text(config: Config, directory: Path) -> None:
    """Read the tokenizer and the chat template as the processes would. Raises `ModelError`."""
    from rlt.text.chat import load_chat_template
    from rlt.text.tokenizer import load_tokenizer

    override = config.model.chat_template
    load_tokenizer(directory)
    load_chat_template(directory, Path(override) if override is not None else None)


def plan_memory(config: Config, directory: Path, spec: ModelSpec) -> MemoryPlan:
    """Check the headers of the weights and plan the cache as the engine would.

    Raises `ConfigError`, `ModelError` or `MemoryPlanError`.
    """
    from rlt.engine import choose_device, choose_dtype
    from rlt.exec.memory import page_bytes, plan_pages
    from rlt.kv.layout import parse_layout
    from rlt.models.registry import check_model
    from rlt.support import check_model_settings

    check_model_settings(config, spec)
    device = choose_device(config.engine.device)
    dtype = choose_dtype(config.model.dtype, device)
    weights = check_model(directory, spec, dtype)
    one_page = page_bytes(spec, config.kv.page_size, dtype)
    kv = config.kv if device.type == "cpu" else _after_loading(config.kv, weights, device.index)
    pages = plan_pages(kv, spec, dtype, device)
    layout = parse_layout(config.kv.layout)
    return MemoryPlan(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=weights,
        page_bytes=one_page,
        pages=pages,
        cache_bytes=pages * one_page,
        cache_tokens=pages // layout.decode_planes(spec.loops) * config.kv.page_size,
        request_tokens=layout.most_tokens(pages, spec.loops, config.kv.page_size),
    )


def _after_loading(kv: KvConfig, weights_bytes: int, gpu: int | None) -> KvConfig:
    """`kv` with its share of the GPU's memory in bytes, counted as if the weights were loaded already."""
    import torch

    from rlt.exec.memory import GPU_DEFAULT_FRACTION

    if kv.pages is not None or kv.bytes is not None:
        return kv
    free, _ = torch.cuda.mem_get_info(gpu)
    share = GPU_DEFAULT_FRACTION if kv.memory_fraction is None else kv.memory_fraction
    return replace(kv, bytes=max(0, int((free - weights_bytes) * share)))
