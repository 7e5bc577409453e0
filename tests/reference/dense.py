"""Ouro serving written a second time: dense, float32, one token after the other, no line shared with `src/`.

A row at loop d reads positions before its own, and when a position is computed, every loop that the positions before
it will ever run is done. So all layouts are computed position by position; what tells them apart is one function,
`version_read`. What tells the exit rules apart is `stops`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

LAYOUTS = ("last_exited", "last_exited_copy", "shared", "last_step", "cyclic:k")
RULES = ("ouro", "ouro_delayed", "random_lookahead", "trace")

#: Closer decisions than this (logit gaps, distances of a CDF from its threshold) may fall either way in float32.
NOISE = 1e-4


class Answer(NamedTuple):
    """One entry per generated token. The first token comes from the prompt's last row at full depth."""

    tokens: list[int]
    #: loops that ran
    depths: list[int]
    #: best logit minus second best
    gaps: list[float]
    #: smallest distance of a CDF value from the threshold that it was compared with; infinite where none was
    exit_margins: list[float]
    logits: Tensor

    def sure(self, noise: float = NOISE) -> int:
        """How many leading tokens (and depths) any float32 implementation must agree with."""
        for index, margin in enumerate(zip(self.gaps, self.exit_margins, strict=True)):
            if min(margin) < noise:
                return index
        return len(self.tokens)


@functools.cache
def version_read(layout: str, loop: int, from_prompt: bool, executed: int) -> int:
    """The 0-based loop of which a query at `loop` reads the key and value of an older token that ran `executed` loops.

    `from_prompt`: the query is a prompt row; then the older token is one too. A query reads its own key and value of
    its own loop in every layout, so this is not asked for it.
    """
    if layout == "shared":
        return executed - 1
    if layout in ("last_exited", "last_exited_copy"):
        return min(loop, executed - 1)
    period = 1 if layout == "last_step" else int(layout.removeprefix("cyclic:"))
    if from_prompt:
        return loop
    congruent = [old for old in range(executed) if old % period == loop % period]
    return congruent[-1] if congruent else executed - 1


def stops(rule: str, cdfs: Sequence[float], *, threshold: float, min_loops: int, max_loops: int, wanted: int) -> bool:
    """Whether a decode token leaves after `len(cdfs)` loops. `wanted` is the depth that a trace asks for."""
    done = len(cdfs)
    if done >= max_loops:
        return True
    if rule == "trace":
        return done >= max(wanted, min_loops)
    looked_at = loops_looked_at(rule, done)
    return threshold < 1 and looked_at >= min_loops and cdfs[looked_at - 1] >= threshold


def loops_looked_at(rule: str, done: int) -> int:
    """After `done` loops a rule compares the CDF of this many loops."""
    return {"ouro": done, "ouro_delayed": done - 1, "random_lookahead": done - 1}[rule]


@dataclass
class Memory:
    """Keys (after RoPE) and values of one request: [positions, loops, layers, kv_heads, head_dim].

    What was never written is NaN, so reading it cannot go unnoticed.
    """

    keys: Tensor
    values: Tensor
    #: loops that each position ran
    executed: list[int]

    def copy(self) -> Memory:
        return Memory(self.keys.clone(), self.values.clone(), list(self.executed))


class DenseOuro:
    """An Ouro checkpoint in a directory: config.json and model.safetensors."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.weights = {name: w.float() for name, w in load_file(directory / "model.safetensors").items()}
        self.loops = config["total_ut_steps"]
        self.layers = config["num_hidden_layers"]
        self.layer_weights = [self._layer_weights(f"model.layers.{layer}.") for layer in range(self.layers)]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.eps = config["rms_norm_eps"]
        self.theta = config["rope_theta"]
        self.positions = config["max_position_embeddings"]
        self.gate = (self.weights["model.early_exit_gate.weight"][0], self.weights["model.early_exit_gate.bias"][0])
        self._prompts: dict[tuple[tuple[int, ...], int, bool], tuple[Memory, Tensor]] = {}

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        layout: str = "last_exited",
        rule: str = "ouro",
        threshold: float = 1.0,
        min_loops: int = 1,
        max_loops: int | None = None,
        end_ids: Sequence[int] = (),
        min_tokens: int = 0,
        trace: Sequence[int] | None = None,
        gate: tuple[Tensor, Tensor] | None = None,
    ) -> Answer:
        """Greedy tokens until one of `end_ids` (which is then the last token) or `max_tokens`.

        `end_ids` cannot win before `min_tokens` tokens are there. `trace`: generated token i >= 1 runs
        `trace[i % len(trace)]` loops, within the limits. `gate` (weight [hidden], bias) replaces the checkpoint's.
        """
        max_loops = max_loops or self.loops
        gate = gate or self.gate
        memory, hidden = self.prefill(prompt, max_loops, layout)
        tokens: list[int] = []
        depths: list[int] = []
        gaps: list[float] = []
        margins: list[float] = []
        rows: list[Tensor] = []
        depth, margin = max_loops, math.inf
        while True:
            logits = self.weights["lm_head.weight"] @ hidden
            rows.append(logits)
            allowed = logits.clone()
            if len(tokens) < min_tokens:
                allowed[list(end_ids)] = -math.inf
            assert not allowed.isnan().any(), "something was read that was never written"
            best, second = allowed.topk(2).values.tolist()
            tokens.append(int(allowed.argmax()))
            depths.append(depth)
            gaps.append(best - second)
            margins.append(margin)
            if tokens[-1] in end_ids or len(tokens) == max_tokens:
                return Answer(tokens, depths, gaps, margins, torch.stack(rows))
            hidden, depth, margin = self._decode(
                memory,
                tokens[-1],
                layout=layout,
                rule=rule,
                threshold=threshold,
                min_loops=min_loops,
                max_loops=max_loops,
                wanted=trace[len(tokens) % len(trace)] if trace else max_loops,
                gate=gate,
            )

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], max_loops: int, layout: str) -> tuple[Memory, Tensor]:
        """The keys and values of a prompt, and its last row [hidden] after its last loop.

        Prompt rows read each other per loop in all layouts but `shared`, so there are two kinds to remember.
        """
        known = (tuple(prompt), max_loops, layout == "shared")
        if known not in self._prompts:
            shape = (self.positions, max_loops, self.layers, self.kv_heads, self.head_dim)
            memory = Memory(torch.full(shape, math.nan), torch.full(shape, math.nan), [])
            for token in prompt:
                hidden = self.weights["model.embed_tokens.weight"][token]
                for loop in range(max_loops):
                    hidden = self._loop(memory, hidden, loop, layout, from_prompt=True)
                memory.executed.append(max_loops)
            self._prompts[known] = memory, hidden
        memory, hidden = self._prompts[known]
        return memory.copy(), hidden

    def _decode(
        self,
        memory: Memory,
        token: int,
        *,
        layout: str,
        rule: str,
        threshold: float,
        min_loops: int,
        max_loops: int,
        wanted: int,
        gate: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, int, float]:
        """Run one generated token: its last hidden row, its depth and the margin of its exit decisions."""
        hidden = self.weights["model.embed_tokens.weight"][token]
        weight, bias = gate
        survival, margin = torch.tensor(1.0), math.inf
        cdfs: list[float] = []
        while True:
            hidden = self._loop(memory, hidden, len(cdfs), layout, from_prompt=False)
            survival = survival * (1 - torch.sigmoid(weight @ hidden + bias))
            cdfs.append(float(1 - survival))
            if rule != "trace" and 0 < threshold < 1 and len(cdfs) < max_loops:
                looked_at = loops_looked_at(rule, len(cdfs))
                if looked_at >= min_loops:
                    margin = min(margin, abs(cdfs[looked_at - 1] - threshold))
            if stops(rule, cdfs, threshold=threshold, min_loops=min_loops, max_loops=max_loops, wanted=wanted):
                memory.executed.append(len(cdfs))
                return hidden, len(cdfs), margin

    def _loop(self, memory: Memory, x: Tensor, loop: int, layout: str, *, from_prompt: bool) -> Tensor:
        """One loop of the newest token's row `x` [hidden]: all layers, then the closing norm."""
        position = len(memory.executed)
        older = torch.arange(position)
        versions = torch.tensor(
            [version_read(layout, loop, from_prompt, executed) for executed in memory.executed], dtype=torch.int64
        )
        for layer in range(self.layers):
            w = self.layer_weights[layer]
            normed = self._norm(x, w["input_layernorm"])
            query = self._rotate((w["self_attn.q_proj"] @ normed).view(self.heads, self.head_dim), position)
            key = self._rotate((w["self_attn.k_proj"] @ normed).view(self.kv_heads, self.head_dim), position)
            value = (w["self_attn.v_proj"] @ normed).view(self.kv_heads, self.head_dim)
            memory.keys[position, loop, layer] = key
            memory.values[position, loop, layer] = value
            keys = torch.cat([memory.keys[older, versions, layer], key[None]])
            values = torch.cat([memory.values[older, versions, layer], value[None]])
            attended = w["self_attn.o_proj"] @ self._attend(query, keys, values).flatten()
            x = x + self._norm(attended, w["input_layernorm_2"])
            normed = self._norm(x, w["post_attention_layernorm"])
            gate, up = w["mlp.gate_proj"] @ normed, w["mlp.up_proj"] @ normed
            x = x + self._norm(w["mlp.down_proj"] @ (gate * torch.sigmoid(gate) * up), w["post_attention_layernorm_2"])
        return self._norm(x, self.weights["model.norm.weight"])

    def _layer_weights(self, prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix).removesuffix(".weight"): weight
            for name, weight in self.weights.items()
            if name.startswith(prefix)
        }

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`query` [heads, head_dim] over `keys` and `values` [tokens, kv_heads, head_dim]."""
        group = self.heads // self.kv_heads
        outputs = []
        for head in range(self.heads):
            scores = keys[:, head // group] @ query[head] / math.sqrt(self.head_dim)
            outputs.append(torch.softmax(scores, dim=0) @ values[:, head // group])
        return torch.stack(outputs)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.eps) * weight

    def _rotate(self, heads: Tensor, position: int) -> Tensor:
        """RoPE on [heads, head_dim]: feature j turns together with feature j + head_dim / 2."""
        half = self.head_dim // 2
        angle = position * self.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        first, second = heads[:, :half], heads[:, half:]
        cos, sin = torch.cos(angle), torch.sin(angle)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)
