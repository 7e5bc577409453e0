"""Measurements: offline through `rlt.LLM`, online against any OpenAI-compatible server."""

from __future__ import annotations

from rlt.bench.machine import environment

__all__ = ["environment"]
