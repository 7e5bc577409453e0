"""Serving looped models written a second time: dense, float32, one token after the other, no line shared with `src/`.

A row at loop d reads positions before its own, and when a position is computed, every loop that the positions before
it will ever run is done. So all layouts are computed position by position; what tells them apart is one function,
`version_read`. What tells the exit rules apart is in `reference.rules`, and the families are in `reference.families`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from reference.penalties import NO_PENALTIES, Penalties
from reference.rules import LOGITS_RULES, STATE_RULES, Judge, looks, loops_looked_at, stops

#: Closer decisions than this (logit gaps, distances from an exit threshold) may fall either way in float32.
NOISE = 1e-4


class Answer(NamedTuple):
    """One entry per generated token. The first token comes from the prompt's last row at full depth."""

    tokens: list[int]
    #: loops that ran
    depths: list[int]
    #: best logit minus second best
    gaps: list[float]
    #: smallest distance of what an exit rule looked at from what it was compared with; infinite where nothing was
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


@dataclass
class Memory:
    """Keys (after RoPE) and values of one request, [positions, loops, layers, kv_heads, head_dim]; of the layers
    outside of the loops, [positions, outer layers, kv_heads, head_dim].

    What was never written is NaN, so reading it cannot go unnoticed.
    """

    keys: Tensor
    values: Tensor
    outer_keys: Tensor
    outer_values: Tensor
    #: loops that each position ran
    executed: list[int]

    def copy(self) -> Memory:
        tensors = (self.keys, self.values, self.outer_keys, self.outer_values)
        return Memory(*(tensor.clone() for tensor in tensors), list(self.executed))


class Row(NamedTuple):
    """A token between its loops: its state, and what else a family keeps of it (both [hidden])."""

    state: Tensor
    rest: Tensor | None = None


class Dense:
    """A checkpoint in a directory: config.json and model.safetensors. The families are subclasses."""

    #: read by subclasses from config.json
    loops: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    eps: float
    theta: float
    positions: int
    outer_layers = 0
    #: weight [hidden] and bias of the exit gate
    gate: tuple[Tensor, Tensor] | None = None
    #: (seed, position) -> the state that a token starts from when a seed is given
    draw: Callable[[int, int], Tensor] | None = None

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.weights = {name: w.float() for name, w in load_file(directory / "model.safetensors").items()}
        self._prompts: dict[Any, tuple[Memory, Row]] = {}

    # -- what a family does ------------------------------------------------------------------------------------------

    def start(self, memory: Memory, token: int, state: Tensor) -> Row:
        """The newest token before its first loop."""
        raise NotImplementedError

    def block(self, layer: int, row: Row, attend: Callable[[Tensor, Tensor, Tensor], Tensor], position: int) -> Row:
        """A looped layer; `attend` takes query, key and value of the row and knows the layer."""
        raise NotImplementedError

    def end_loop(self, row: Row) -> Row:
        raise NotImplementedError

    def begin_loop(self, row: Row) -> Row:
        return row

    def logits(self, memory: Memory, row: Row) -> Tensor:
        """Coda and head."""
        raise NotImplementedError

    # -- the same for all --------------------------------------------------------------------------------------------

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
        interval: int = 1,
        seed: int | None = None,
        warm: bool = False,
        penalties: Penalties = NO_PENALTIES,
    ) -> Answer:
        """Greedy tokens until one of `end_ids` (which is then the last token) or `max_tokens`.

        `end_ids` cannot win before `min_tokens` tokens are there. `trace`: generated token i >= 1 runs
        `trace[i % len(trace)]` loops, within the limits. `gate` (weight [hidden], bias) replaces the checkpoint's.
        `seed`: start states are drawn, and not zero. `warm`: an output token starts from the last state before it.
        `penalties` change the logits that a token is chosen from.
        """
        max_loops = max_loops or self.loops
        memory, row = self.prefill(prompt, max_loops, layout, seed)
        logits = self.logits(memory, row)
        memory.executed.append(max_loops)
        tokens: list[int] = []
        depths: list[int] = []
        gaps: list[float] = []
        margins: list[float] = []
        rows: list[Tensor] = []
        depth, margin = max_loops, math.inf
        while True:
            rows.append(logits)
            allowed = penalties.on(logits, prompt, tokens)
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
            row, logits, depth, margin = self._decode(
                memory,
                self.start(memory, tokens[-1], row.state if warm else self._state(seed, len(memory.executed))),
                layout=layout,
                rule=rule,
                threshold=threshold,
                min_loops=min_loops,
                max_loops=max_loops,
                wanted=trace[len(tokens) % len(trace)] if trace else max_loops,
                gate=gate or self.gate,
                interval=interval,
            )

    @torch.inference_mode()
    def prefill(
        self, prompt: Sequence[int], max_loops: int, layout: str, seed: int | None = None
    ) -> tuple[Memory, Row]:
        """The keys and values of a prompt, and its last row after its last loop, which is still to be finished.

        Prompt rows read each other per loop in all layouts but `shared`, so there are two kinds to remember.
        """
        known = (tuple(prompt), max_loops, layout == "shared", seed)
        if known not in self._prompts:
            core = (self.positions, max_loops, self.layers, self.kv_heads, self.head_dim)
            outer = (self.positions, self.outer_layers, self.kv_heads, self.head_dim)
            memory = Memory(*(torch.full(shape, math.nan) for shape in (core, core, outer, outer)), [])
            for index, token in enumerate(prompt):
                row = self.start(memory, token, self._state(seed, index))
                for loop in range(max_loops):
                    row = self.loop(memory, row, loop, layout, from_prompt=True)
                if index < len(prompt) - 1:
                    self.logits(memory, row)
                    memory.executed.append(max_loops)
            self._prompts[known] = memory, row
        memory, row = self._prompts[known]
        return memory.copy(), row

    def _state(self, seed: int | None, position: int) -> Tensor:
        if seed is None:
            return torch.zeros(self.hidden)
        assert self.draw is not None
        return self.draw(seed, position)

    def _decode(
        self,
        memory: Memory,
        row: Row,
        *,
        layout: str,
        rule: str,
        threshold: float,
        min_loops: int,
        max_loops: int,
        wanted: int,
        gate: tuple[Tensor, Tensor] | None,
        interval: int,
    ) -> tuple[Row, Tensor, int, float]:
        """Run one generated token: its last row, its logits, its depth and the margin of its exit decisions."""
        judge = Judge(rule, threshold, row.state, len(self.logits_weight()))
        survival, cdfs = torch.tensor(1.0), list[float]()
        while True:
            row = self.loop(memory, row, len(cdfs), layout, from_prompt=False)
            if gate is not None:
                survival = survival * (1 - torch.sigmoid(gate[0] @ row.state + gate[1]))
            cdfs.append(float(1 - survival))
            done, limits = len(cdfs), {"min_loops": min_loops, "max_loops": max_loops}
            if rule in STATE_RULES:
                before = judge.margin
                stop = judge.states(row.state) and done >= min_loops
                if not min_loops <= done < max_loops:
                    judge.margin = before
                stop = stop or done >= max_loops
            elif rule in LOGITS_RULES:
                stop = done >= max_loops or (
                    looks(rule, done, interval=interval, **limits) and judge.logits(self.logits(memory, row))
                )
            elif rule == "full_depth":
                stop = done >= max_loops
            else:
                if rule != "trace" and 0 < threshold < 1 and done < max_loops:
                    looked_at = loops_looked_at(rule, done)
                    if looked_at >= min_loops:
                        judge.margin = min(judge.margin, abs(cdfs[looked_at - 1] - threshold))
                stop = stops(rule, cdfs, threshold=threshold, wanted=wanted, **limits)
            if stop:
                logits = self.logits(memory, row)
                memory.executed.append(done)
                return row, logits, done, judge.margin

    def logits_weight(self) -> Tensor:
        """[vocab, hidden]"""
        raise NotImplementedError

    def loop(self, memory: Memory, row: Row, loop: int, layout: str, *, from_prompt: bool) -> Row:
        """One loop of the newest token's row."""
        position = len(memory.executed)
        older = torch.arange(position)
        versions = torch.tensor(
            [version_read(layout, loop, from_prompt, executed) for executed in memory.executed], dtype=torch.int64
        )
        row = self.begin_loop(row)
        for layer in range(self.layers):

            def attend(query: Tensor, key: Tensor, value: Tensor, layer: int = layer) -> Tensor:
                memory.keys[position, loop, layer] = key
                memory.values[position, loop, layer] = value
                keys = torch.cat([memory.keys[older, versions, layer], key[None]])
                values = torch.cat([memory.values[older, versions, layer], value[None]])
                return self._attend(query, keys, values)

            row = self.block(layer, row, attend, position)
        return self.end_loop(row)

    def outer_attend(self, memory: Memory, layer: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Attention of the newest token in a layer outside of the loops, over everything that is in `memory`."""
        position = len(memory.executed)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            memory.outer_keys[position, layer], memory.outer_values[position, layer] = key, value
            until = position + 1
            return self._attend(query, memory.outer_keys[:until, layer], memory.outer_values[:until, layer])

        return attend

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`query` [heads, head_dim] over `keys` and `values` [tokens, kv_heads, head_dim], flattened."""
        group = self.heads // self.kv_heads
        outputs = []
        for head in range(self.heads):
            scores = keys[:, head // group] @ query[head] / math.sqrt(self.head_dim)
            outputs.append(torch.softmax(scores, dim=0) @ values[:, head // group])
        return torch.cat(outputs)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.eps) * weight

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The weights whose names begin so, by the rest of their names."""
        return {
            name.removeprefix(prefix).removesuffix(".weight"): weight
            for name, weight in self.weights.items()
            if name.startswith(prefix)
        }
