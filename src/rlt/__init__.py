"""rlt: a serving engine for looped (recurrent-depth) transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlt.llm import LLM, CompletionOutput, RequestOutput
    from rlt_protocols.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Late, so that processes which never compute (frontend, detokenizer, rltctl) never import torch.
    if name == "SamplingParams":
        from rlt_protocols.params import SamplingParams

        return SamplingParams
    if name in __all__:
        import rlt.llm

        return getattr(rlt.llm, name)
    raise AttributeError(f"module 'rlt' has no attribute {name!r}")
