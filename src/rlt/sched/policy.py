"""How the scheduler is set up. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduler's settings; names are those of the configuration."""

    max_seqs: int
    max_tick_tokens: int
    prefill_chunk: int
    wavefront: bool = True
    mixed: bool = True
    priority: bool = False
    preemption: bool = True
    max_bypass: int = 64
    #: pages that admission leaves free
    reserve: int = 0
