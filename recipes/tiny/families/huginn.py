"""Huginn: some layers, a core that loops over a state and the first layers' output, some layers, a tied head.

The number of loops is drawn for each step, around that of full depth, and half of the rows start from zeros, as they
are served, and half from the published random state. So the state comes to rest at an answer, whatever it starts from.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from dialects import HUGINN, Dialect
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from data import Batch
from families.common import (
    Draws,
    Exit,
    KeysValues,
    Linear,
    Prediction,
    RMSNorm,
    TinyModel,
    Turns,
    angles,
    random_depths,
    token_weight,
)
from families.huginn_layers import FUSED, Block, HuginnShape, block_tensors, draw_loops, load_block
from rlt.depth.criteria import CRITERIA
from rlt.depth.table import RULES

STATE_STD = math.sqrt(2 / 5)
"""Of the random initial state, which is cut at three of these."""
ZERO_STATE_ROWS = 0.5


class Huginn(TinyModel):
    """The family's training model."""

    family: ClassVar[str] = "huginn"
    model_type: ClassVar[str] = "huginn_raven"
    dialect: ClassVar[Dialect] = HUGINN
    rules: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "latent_diff": (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7),
        "kl": (5e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0),
        "entropy": (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3),
    }
    # It is small, for it also is the head: steps of the common size would be wild.
    lr_shares: ClassVar[Mapping[str, float]] = {"wte": 0.5}

    def __init__(self, shape: HuginnShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        size = shape.hidden_size
        self.wte = nn.Parameter(torch.randn(shape.vocab_size, size) * math.sqrt(2 / (5 * size)))
        self.prelude = nn.ModuleList(Block(shape) for _ in range(shape.prelude_layers))
        self.core = nn.ModuleList(Block(shape) for _ in range(shape.core_layers))
        self.coda = nn.ModuleList(Block(shape) for _ in range(shape.coda_layers))
        self.adapter = Linear(2 * size, size, 0.02)
        self.ln_f = RMSNorm(size, shape.norm_eps)
        with torch.no_grad():
            # Both halves begin as what they were, so that gradients reach the first loop.
            self.adapter.weight += torch.eye(size).repeat(1, 2) / math.sqrt(2)

    @classmethod
    def build(cls, vocab_size: int, dtype: torch.dtype = torch.float32) -> Self:
        return cls(HuginnShape(vocab_size), dtype)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(
            HuginnShape(
                vocab_size=config["vocab_size"],
                hidden_size=config["n_embd"],
                intermediate_size=config["intermediate_size"],
                heads=config["n_heads"],
                prelude_layers=config["n_layers_in_prelude"],
                core_layers=config["n_layers_in_recurrent_block"],
                coda_layers=config["n_layers_in_coda"],
                loops=config["mean_recurrence"],
                rope_base=config["rope_base"],
                norm_eps=config["norm_eps"],
                max_positions=config["block_size"],
            )
        )

    @property
    def loops(self) -> int:
        return self.shape.loops

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    def matrices(self) -> list[Tensor]:
        return [self.adapter.weight, *(p for _, block in self._blocks() for p in block.parameters() if p.ndim == 2)]

    @classmethod
    def compiled(cls) -> tuple[type[nn.Module], ...]:
        return (Block,)

    def turns(self, tokens: Tensor) -> Turns:
        """Cos and sin [S, head_dim / 2], fp32."""
        phases = angles(tokens.shape[1], self.shape.head_dim, self.shape.rope_base, tokens.device)
        return phases.cos(), phases.sin()

    def embed(self, tokens: Tensor, turns: Turns) -> Tensor:
        """What the prelude makes of tokens [B, S], [B, S, H]."""
        x = embedding(tokens, self.wte).to(self.dtype) * math.sqrt(self.shape.hidden_size)
        for block in self.prelude:
            x = block(x, turns, None, None)[0]
        return x

    def loop(
        self, state: Tensor, embedded: Tensor, turns: Turns, last: list[KeysValues] | None, stopped: Tensor | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """One loop: the new state [B, S, H] (of stopped tokens the old one), and each block's keys and values."""
        x = self.adapter(torch.cat((state, embedded), -1))
        keys_values: list[KeysValues] = []
        for i, block in enumerate(self.core):
            x, new = block(x, turns, last[i] if last and stopped is not None else None, stopped)
            keys_values.append(new)
        return x if stopped is None else torch.where(stopped[..., None], state, x), keys_values

    def finish(self, state: Tensor, turns: Turns) -> tuple[Tensor, list[KeysValues]]:
        """What the head takes of states [B, S, H], and the keys and values of the coda's blocks."""
        x, shown = self.ln_f(state), []
        for block in self.coda:
            x, keys_values = block(x, turns, None, None)
            shown.append(keys_values)
        return self.ln_f(x), shown

    def forward(self, tokens: Tensor, loops: int, depths: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """What the head takes of tokens [B, S], each after its number of loops of `depths` [B, S] (None: all).

        `state` [B, S, H] is the initial one (None: zeros).
        """
        turns = self.turns(tokens)
        embedded = self.embed(tokens, turns)
        state = torch.zeros_like(embedded) if state is None else state.to(self.dtype)
        last: list[KeysValues] | None = None
        for done in range(loops):
            stopped = None if depths is None or done == 0 else depths <= done
            state, last = self.loop(state, embedded, turns, last, stopped)
        return self.finish(state, turns)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.wte.to(hidden.dtype))

    def loss(self, batch: Batch, progress: float, draws: Draws) -> Tensor:
        tokens, answer = batch
        loops = draw_loops(draws.host, self.loops, self.shape.most_loops)
        depths = random_depths(answer[:, :-1], loops, draws.device)
        state = self.random_state(tokens[:, :-1], draws.device)
        hidden = self(tokens[:, :-1], loops, depths, state)
        weight = token_weight(answer[:, 1:])
        return (self.token_losses(hidden[None], tokens[:, 1:])[0] * weight).sum() / weight.sum()

    def random_state(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        """Initial states [B, S, H] of tokens [B, S]: zeros in some rows, the published distribution in the others."""
        size = (*tokens.shape, self.shape.hidden_size)
        state = torch.randn(size, device=tokens.device, generator=generator, dtype=self.dtype).clamp_(-3, 3)
        rows = torch.rand((len(tokens), 1, 1), device=tokens.device, generator=generator) < ZERO_STATE_ROWS
        return state.masked_fill_(rows, 0) * STATE_STD

    def predict(self, tokens: Tensor, loops: int, may_exit: Tensor, exit: Exit | None = None) -> Prediction:
        turns = self.turns(tokens)
        embedded = self.embed(tokens, turns)
        depths = torch.full_like(tokens, loops)
        shown: list[KeysValues] = []
        if exit is None or RULES[exit.rule].logits:
            state, _ = self._run(embedded, turns, loops, may_exit, None, shown)
            hidden, shown = self.finish(state, turns)
        # A criterion that looks at logits depends on what the coda of earlier tokens shows, hence on where they stop.
        # Each round is right for one token more of every row, and nothing changes once all are right.
        while exit is not None:
            before = depths
            state, depths = self._run(embedded, turns, loops, may_exit, exit, shown)
            hidden, shown = self.finish(state, turns)
            if not RULES[exit.rule].logits or torch.equal(depths, before):
                break
        return Prediction(self.logits(hidden), depths)

    def _run(
        self,
        embedded: Tensor,
        turns: Turns,
        loops: int,
        may_exit: Tensor,
        exit: Exit | None,
        shown: list[KeysValues],
    ) -> tuple[Tensor, Tensor]:
        """States [B, S, H] and depths [B, S]; the coda of earlier tokens shows the keys and values `shown`."""
        state = torch.zeros_like(embedded)
        depths = torch.full(embedded.shape[:2], loops, device=embedded.device)
        carried = CRITERIA[exit.rule].begin(state[may_exit], self.shape.vocab_size) if exit else state
        last: list[KeysValues] | None = None
        for done in range(1, loops + 1):
            state, last = self.loop(state, embedded, turns, last, depths < done if done > 1 else None)
            if exit is not None:
                criterion = CRITERIA[exit.rule]
                seen = state[may_exit]
                if RULES[exit.rule].logits:
                    x = self.ln_f(state)
                    for block, keys_values in zip(stage(self.coda), shown, strict=True):
                        x = block.beside(x, turns, keys_values)
                    seen = self.logits(self.ln_f(x)[may_exit])
                values, carried = criterion.step(seen, carried)
                running = depths[may_exit] == loops
                now = running & criterion.stops(values, exit.threshold)
                depths[may_exit] = torch.where(now, done, depths[may_exit])
        return state, depths

    def config(self) -> dict[str, object]:
        shape = self.shape
        layers = shape.prelude_layers + shape.core_layers + shape.coda_layers
        return {
            "architecture_class_name": "RecurrentGPT",
            "architectures": ["RavenForCausalLM"],
            "bias": False,
            "block_class_name": "SandwichBlock",
            "block_size": shape.max_positions,
            "head_dim": shape.head_dim,
            "init_values": {"embed_scale": math.sqrt(shape.hidden_size)},
            "injection_type": "linear",
            "intermediate_size": shape.intermediate_size,
            "mean_backprop_depth": shape.most_loops,
            "mean_recurrence": shape.loops,
            "mlp_class_name": "GatedMLP",
            "model_type": self.model_type,
            "n_embd": shape.hidden_size,
            "n_heads": shape.heads,
            "n_layers": layers,
            "n_layers_in_coda": shape.coda_layers,
            "n_layers_in_prelude": shape.prelude_layers,
            "n_layers_in_recurrent_block": shape.core_layers,
            "nonlin_name": "SiLU",
            "norm_class_name": "RMSNorm_llama",
            "norm_eps": shape.norm_eps,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "padded_vocab_size": shape.vocab_size,
            "qk_bias": True,
            "rope_base": shape.rope_base,
            "sampling_scheme": "poisson-lognormal-filling",
            "state_init": "like-init",
            "tie_embeddings": True,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": shape.vocab_size,
        }

    def checkpoint(self) -> dict[str, Tensor]:
        """With the head's copy and the RoPE table [1, positions, 1, head_dim / 2, 2] that the released one has."""
        phases = angles(self.max_positions, self.shape.head_dim, self.shape.rope_base, self.wte.device)
        tensors = {
            "transformer.wte.weight": self.wte,
            "transformer.adapter.weight": self.adapter.weight,
            "transformer.ln_f.weight": self.ln_f.weight,
            "lm_head.weight": self.wte.clone(),
            "freqs_cis": torch.stack((phases.cos(), phases.sin()), -1)[None, :, None],
        }
        for prefix, block in self._blocks():
            tensors |= {prefix + name: tensor for name, tensor in block_tensors(block).items()}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def load_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.wte.copy_(tensors["transformer.wte.weight"])
            self.adapter.weight.copy_(tensors["transformer.adapter.weight"])
            self.ln_f.weight.copy_(tensors["transformer.ln_f.weight"])
        for prefix, block in self._blocks():
            load_block(block, {name: tensors[prefix + name] for name in FUSED})

    def _blocks(self) -> list[tuple[str, Block]]:
        """Every block with what its tensors' names begin with."""
        stages = {"prelude": self.prelude, "core_block": self.core, "coda": self.coda}
        return [(f"transformer.{name}.{i}.", b) for name, blocks in stages.items() for i, b in enumerate(stage(blocks))]


def stage(blocks: nn.ModuleList) -> list[Block]:
    """The blocks of a stage, for the type checker."""
    return [block for block in blocks if isinstance(block, Block)]
