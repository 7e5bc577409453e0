"""What `rltd check` finds out about text and memory before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from rlt.config import Config
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


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the weights are, as the tensors' shapes say; a tensor that only repeats another one is no parameter."""

    parameters: int
    tensors: int


def check_text(config: Config, directory: Path) -> None:
    """Read the tokenizer and the chat template as the processes would. Raises `ModelError`."""
    from rlt.text.chat import load_chat_template
    from rlt.text.reasoning import check_thinking
    from rlt.text.tokenizer import load_tokenizer

    override = config.model.chat_template
    load_tokenizer(directory)
    template = load_chat_template(directory, Path(override) if override is not None else None)
    check_thinking(config.model.enable_thinking, template)


def model_size(spec: ModelSpec) -> ModelSize:
    """Parameters and tensors of a checkpoint of this shape."""
    from rlt.models.registry import MATHS

    maths = MATHS[spec.family]
    shapes = maths.shapes(spec)
    kept = [shape for name, shape in shapes.items() if name not in maths.derived]
    return ModelSize(sum(map(math.prod, kept)), len(shapes))


def kv_bytes_per_token(config: Config, spec: ModelSpec, dtype: str) -> dict[str, int]:
    """Bytes of a generated token's keys and values: in one loop, outside of the loops, and per layout at full depth.

    Of the layouts, those that a model of this family can have.
    """
    import torch

    from rlt.exec.memory import page_bytes
    from rlt.kv.layout import parse_layout
    from rlt.support import LAYOUTS, family_refusals

    one = page_bytes(spec, 1, getattr(torch, dtype))
    sizes = {"one_loop": one, "outside_loops": one * spec.outer_layers // spec.layers}
    for name in dict.fromkeys((*LAYOUTS, config.kv.layout)):
        asked = replace(config, kv=replace(config.kv, layout=name))
        if not family_refusals(asked, spec.family, spec.loops):
            sizes[name] = one * parse_layout(name, spec.outer_lists).decode_lists(spec.loops)
    return sizes


def plan_memory(config: Config, directory: Path, spec: ModelSpec) -> MemoryPlan:
    """Check the headers of the weights and plan the cache as the engine would.

    Raises `ConfigError`, `ModelError` or `MemoryPlanError`.
    """
    from rlt.engine import choose_device, choose_dtype
    from rlt.exec.memory import page_bytes, plan_pages
    from rlt.kv.layout import parse_layout
    from rlt.models.registry import check_model, model_bytes
    from rlt.support import check_model_settings

    check_model_settings(config, spec)
    device = choose_device(config.engine.device)
    dtype = choose_dtype(config.model.dtype, device)
    dummy = config.model.load_format == "dummy"
    weights = model_bytes(spec, dtype) if dummy else check_model(directory, spec, dtype)
    one_page = page_bytes(spec, config.kv.page_size, dtype)
    pages = plan_pages(config.kv, spec, dtype, device, not_loaded_bytes=weights)
    layout = parse_layout(config.kv.layout, spec.outer_lists)
    return MemoryPlan(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=weights,
        page_bytes=one_page,
        pages=pages,
        cache_bytes=pages * one_page,
        cache_tokens=pages // layout.decode_lists(spec.loops) * config.kv.page_size,
        request_tokens=layout.most_tokens(pages, spec.loops, config.kv.page_size),
    )
