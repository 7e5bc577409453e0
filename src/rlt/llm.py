"""Offline use: the daemon's engine in this process, with text in and text out."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlt.config import load_config
from rlt.engine import Engine
from rlt.models.directory import resolve_model
from rlt.text.detokenize import IncrementalText
from rlt.text.tokenizer import Tokenizer, load_tokenizer
from rlt_protocols.params import SEED_LIMIT, ParamError, ResolvedParams, SamplingParams, resolve
from rlt_protocols.text import Tokens

Prompt = str | Sequence[int]
