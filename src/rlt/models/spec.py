"""What the engine knows of a model: its shape and its checkpoint's defaults, as one typed value. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a looped model and the defaults that its files give."""

    #: a key of `rlt.models.families.FAMILIES`
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    #: layers that loop
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    loops: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    exit_threshold: float
    #: ids that end a text, without repeats: generation_config.json's (else config.json's), then the tokenizer's
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    #: dtype on disk as config.json names it
    dtype: str
    #: ids from here to `vocab_size` are rows that no token of tokenizer.json has, and are never sampled
    known_tokens: int
    #: sampling defaults of generation_config.json
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    #: layers that run once per token, before its loops and after them
    prelude_layers: int = 0
    coda_layers: int = 0

    @property
    def outer_layers(self) -> int:
        """Layers outside of the loops, each with one version of a token's keys and values."""
        return self.prelude_layers + self.coda_layers

    @property
    def outer_lists(self) -> int:
        """Page lists that hold the outer layers' keys and values: a page has room for `layers` layers.

        Outer layer i is pool layer i % layers of list i // layers.
        """
        return -(-self.outer_layers // self.layers)
