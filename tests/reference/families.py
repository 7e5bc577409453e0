"""The families of the dense reference; see `reference.dense`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from reference.dense import Dense, Memory, Row

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DenseNanbeige(Dense):
    """A Llama-like stack with a norm after every loop."""

    def __init__(self, directory: Path, loops: str = "num_loops") -> None:
        super().__init__(directory)
        config = self.config
        self.loops = config[loops]
        self.layers = config["num_hidden_layers"]
        self.hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.eps = config["rms_norm_eps"]
        self.theta = config["rope_theta"]
        self.positions = config["max_position_embeddings"]
        self.layer_weights = [self.named(f"model.layers.{layer}.") for layer in range(self.layers)]

    def start(self, memory: Memory, token: int, state: Tensor) -> Row:
        return Row(self.weights["model.embed_tokens.weight"][token])

    def block(self, layer: int, row: Row, attend: Attend, position: int) -> Row:
        w, x = self.layer_weights[layer], row.state
        normed = self.norm(x, w["input_layernorm"])
        query = self.rotate((w["self_attn.q_proj"] @ normed).view(self.heads, self.head_dim), position)
        key = self.rotate((w["self_attn.k_proj"] @ normed).view(self.kv_heads, self.head_dim), position)
        value = (w["self_attn.v_proj"] @ normed).view(self.kv_heads, self.head_dim)
        x = x + self.branch(w["self_attn.o_proj"] @ attend(query, key, value), w, "input_layernorm_2")
        normed = self.norm(x, w["post_attention_layernorm"])
        gate, up = w["mlp.gate_proj"] @ normed, w["mlp.up_proj"] @ normed
        inner = gate * torch.sigmoid(gate) * up
        return Row(x + self.branch(w["mlp.down_proj"] @ inner, w, "post_attention_layernorm_2"))

    def branch(self, out: Tensor, weights: dict[str, Tensor], norm: str) -> Tensor:
        return out

    def end_loop(self, row: Row) -> Row:
        return Row(self.norm(row.state, self.weights["model.norm.weight"]))

    def logits_weight(self) -> Tensor:
        return self.weights["lm_head.weight"]

    def logits(self, memory: Memory, row: Row) -> Tensor:
        return self.logits_weight() @ row.state

    def rotate(self, heads: Tensor, position: int) -> Tensor:
        """RoPE on [heads, head_dim]: feature j turns together with feature j + head_dim / 2."""
        half = self.head_dim // 2
        angle = position * self.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        first, second = heads[:, :half], heads[:, half:]
        cos, sin = torch.cos(angle), torch.sin(angle)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)


class DenseOuro(DenseNanbeige):
    """The same with norms of the branches and an exit gate."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "total_ut_steps")
        self.gate = (self.weights["model.early_exit_gate.weight"][0], self.weights["model.early_exit_gate.bias"][0])

    def branch(self, out: Tensor, weights: dict[str, Tensor], norm: str) -> Tensor:
        return self.norm(out, weights[norm])


class DenseHuginn(Dense):
    """Prelude, a core that loops over a state and the prelude's output, coda."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        config = self.config
        self.loops = config["mean_recurrence"]
        self.layers = config["n_layers_in_recurrent_block"]
        self.prelude_layers = config["n_layers_in_prelude"]
        self.outer_layers = self.prelude_layers + config["n_layers_in_coda"]
        self.hidden = config["n_embd"]
        self.heads = self.kv_heads = config["n_heads"]
        self.head_dim = self.hidden // self.heads
        self.eps = config["norm_eps"]
        self.theta = config["rope_base"]
        self.positions = config["block_size"]
        self.stages = {
            stage: [self.named(f"transformer.{stage}.{index}.") for index in range(count)]
            for stage, count in (
                ("prelude", self.prelude_layers),
                ("core_block", self.layers),
                ("coda", config["n_layers_in_coda"]),
            )
        }

    def start(self, memory: Memory, token: int, state: Tensor) -> Row:
        x = self.weights["transformer.wte.weight"][token] * math.sqrt(self.hidden)
        for layer, weights in enumerate(self.stages["prelude"]):
            x = self.sandwich(x, weights, self.outer_attend(memory, layer), len(memory.executed))
        return Row(state, x)

    def begin_loop(self, row: Row) -> Row:
        adapter = self.weights["transformer.adapter.weight"]
        return Row(adapter[:, : self.hidden] @ row.state + adapter[:, self.hidden :] @ row.rest, row.rest)

    def block(self, layer: int, row: Row, attend: Attend, position: int) -> Row:
        return Row(self.sandwich(row.state, self.stages["core_block"][layer], attend, position), row.rest)

    def end_loop(self, row: Row) -> Row:
        return row

    def logits_weight(self) -> Tensor:
        return self.weights["transformer.wte.weight"]

    def logits(self, memory: Memory, row: Row) -> Tensor:
        last = self.weights["transformer.ln_f.weight"]
        x = self.norm(row.state, last)
        for layer, weights in enumerate(self.stages["coda"], self.prelude_layers):
            x = self.sandwich(x, weights, self.outer_attend(memory, layer), len(memory.executed))
        return self.logits_weight() @ self.norm(x, last)

    def sandwich(self, x: Tensor, w: dict[str, Tensor], attend: Attend, position: int) -> Tensor:
        """A layer: the sums are normalized, not the branches."""
        qkv = (w["attn.Wqkv"] @ self.norm(x, w["norm_1"])).view(3, self.heads, self.head_dim)
        bias = w["attn.qk_bias"][:, 0]
        query, key = self.rotate(qkv[0] + bias[0], position), self.rotate(qkv[1] + bias[1], position)
        x = self.norm(x + w["attn.proj"] @ attend(query, key, qkv[2]), w["norm_2"])
        gate, up = (w["mlp.fc"] @ self.norm(x, w["norm_3"])).chunk(2)
        return self.norm(x + w["mlp.proj"] @ (gate * torch.sigmoid(gate) * up), w["norm_4"])

    def rotate(self, heads: Tensor, position: int) -> Tensor:
        """RoPE on [heads, head_dim]: features 2j and 2j + 1 are one complex number that turns."""
        pairs = self.head_dim // 2
        angle = position * self.theta ** (-torch.arange(pairs, dtype=torch.float32) / pairs)
        turned = torch.view_as_complex(heads.reshape(self.heads, pairs, 2)) * torch.polar(torch.ones(pairs), angle)
        return torch.view_as_real(turned).flatten(1)
