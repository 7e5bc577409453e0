"""The families' maths over whole sequences, one layer's weights at a time: what calibration measures with.

A layer is read from the files when it is needed, so that the host never holds the model; on a GPU what was read stays
there. All positions of a sequence are at the same loop, as in a prompt, so no keys and values are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from rlt.models import nanbeige, ouro
from rlt.models.huginn import initial_state, rotate_pairs, stages, turn_table
from rlt.models.layers import Layer, Positions, attention, mlp
from rlt.models.ops import TORCH
from rlt.models.spec import ModelSpec
from rlt.synthetic.weights import Weights

#: rows of the head that are multiplied at a time
HEAD_ROWS = 8192

#: after each loop: the loops done, and the rows [tokens, hidden] between loops and for the head
Seen = Callable[[int, Tensor, Callable[[], Tensor]], None]


class Files:
    """Tensors of a checkpoint that is being written: large ones from its files, small ones from their recipe."""

    def __init__(
        self,
        directory: Path,
        index: Mapping[str, str],
        weights: Weights,
        *,
        disk_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`index`: the file of each large tensor. They have `disk_dtype`; what is read gets `dtype` and `device`."""
        self.disk_dtype = disk_dtype
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self._directory = directory
        self._index = index
        self._kept: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        if self.weights.is_late(name):
            return self.weights.whole(name).to(self.disk_dtype).to(self.device, self.dtype)
        if name in self._kept:
            return self._kept[name]
        with safe_open(self._directory / self._index[name], framework="pt") as reader:
            tensor: Tensor = reader.get_tensor(name).to(self.device, self.dtype)
        if self.device.type == "cuda":
            self._kept[name] = tensor
        return tensor

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Some rows of a matrix."""
        if name in self._kept:
            return self._kept[name][first:end]
        with safe_open(self._directory / self._index[name], framework="pt") as reader:
            rows: Tensor = reader.get_slice(name)[first:end].to(self.device, self.dtype)
        return rows

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [tokens, hidden] as the checkpoint has them."""
        name = self.weights.embedding
        with safe_open(self._directory / self._index[name], framework="pt") as reader:
            part = reader.get_slice(name)
            rows = torch.cat([part[token : token + 1] for token in tokens.tolist()])
        return rows.to(self.device, self.dtype)


class Stack:
    """Ouro and Nanbeige: see `rlt.models`."""

    def __init__(self, spec: ModelSpec, files: Files, sequences: int, length: int) -> None:
        self._spec = spec
        self._files = files
        self._sequences = sequences
        positions = torch.arange(length, device=files.device).repeat(sequences)
        self._turns = Positions(replace(spec, max_positions=length), files.dtype, files.device).at(positions)

    def run(self, tokens: Tensor, seen: Seen) -> None:
        """All loops over `tokens` [sequences * length]."""
        hidden = self._files.embed(tokens)
        for loop in range(1, self._spec.loops + 1):
            for index in range(self._spec.layers):
                hidden = self._layer(hidden, index)
            hidden = TORCH.rms_norm(hidden, self._files.read("model.norm.weight"), self._spec.norm_eps)
            seen(loop, hidden, lambda rows=hidden: rows)  # type: ignore[misc]

    def _layer(self, hidden: Tensor, index: int) -> Tensor:
        spec, eps, layer = self._spec, self._spec.norm_eps, self._read(f"model.layers.{index}.")

        def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return causal(query, key, value, self._sequences)

        if spec.family == "ouro":
            before_attention, after_attention, before_mlp, after_mlp = layer.norms
            branch = attention(
                TORCH.rms_norm(hidden, before_attention, eps), layer, spec, self._turns, 0, attend, TORCH
            )
            hidden = hidden + TORCH.rms_norm(branch, after_attention, eps)
            return hidden + TORCH.rms_norm(mlp(TORCH.rms_norm(hidden, before_mlp, eps), layer, TORCH), after_mlp, eps)
        before_attention, before_mlp = layer.norms
        hidden = hidden + attention(
            TORCH.rms_norm(hidden, before_attention, eps), layer, spec, self._turns, 0, attend, TORCH
        )
        return hidden + mlp(TORCH.rms_norm(hidden, before_mlp, eps), layer, TORCH)

    def _read(self, prefix: str) -> Layer:
        def read(name: str) -> Tensor:
            return self._files.read(f"{prefix}{name}.weight")

        norms = ouro.NORMS if self._spec.family == "ouro" else nanbeige.NORMS
        return Layer(
            qkv=torch.cat([read(f"self_attn.{name}_proj") for name in "qkv"]),
            out=read("self_attn.o_proj"),
            gate_up=torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")]),
            down=read("mlp.down_proj"),
            norms=tuple(map(read, norms)),
        )


class Recurrent:
    """Huginn: see `rlt.models.huginn`."""

    def __init__(self, spec: ModelSpec, files: Files, sequences: int, length: int) -> None:
        self._spec = spec
        self._files = files
        self._sequences = sequences
        self._positions = torch.arange(length, device=files.device).repeat(sequences)
        self._turns = turn_table(replace(spec, max_positions=length), files.device)[self._positions]

    def run(self, tokens: Tensor, seen: Seen) -> None:
        """All loops over `tokens` [sequences * length], from seeded states; a sequence's seed is its number."""
        files, width = self._files, self._spec.hidden_size
        hidden = self._stage("prelude", files.embed(tokens) * math.sqrt(width))
        seeds = torch.arange(self._sequences, device=files.device).repeat_interleave(len(tokens) // self._sequences)
        state = initial_state(seeds, self._positions, width, "seeded").to(files.dtype)
        seen(0, state, lambda: state)
        for loop in range(1, self._spec.loops + 1):
            adapted = linear(torch.cat([state, hidden], -1), files.read("transformer.adapter.weight"))
            state = self._stage("core_block", adapted)
            seen(loop, state, lambda rows=state: self._coda(rows))  # type: ignore[misc]

    def _coda(self, state: Tensor) -> Tensor:
        norm, eps = self._files.read("transformer.ln_f.weight"), self._spec.norm_eps
        return TORCH.rms_norm(self._stage("coda", TORCH.rms_norm(state, norm, eps)), norm, eps)

    def _stage(self, stage: str, hidden: Tensor) -> Tensor:
        for index in range(stages(self._spec)[stage]):
            hidden = self._block(f"transformer.{stage}.{index}.", hidden)
        return hidden

    def _block(self, prefix: str, hidden: Tensor) -> Tensor:
        read, eps, count, size = self._files.read, self._spec.norm_eps, self._spec.heads, self._spec.head_dim

        def norm(number: int, rows: Tensor) -> Tensor:
            return TORCH.rms_norm(rows, read(f"{prefix}norm_{number}.weight"), eps)

        heads = linear(norm(1, hidden), read(f"{prefix}attn.Wqkv.weight")).view(-1, 3 * count, size)
        bias = read(f"{prefix}attn.qk_bias").flatten(0, 2)
        rotated = rotate_pairs(heads[:, : 2 * count] + bias, self._turns)
        attended = causal(rotated[:, :count], rotated[:, count:], heads[:, 2 * count :], self._sequences)
        hidden = norm(2, hidden + linear(attended.flatten(1), read(f"{prefix}attn.proj.weight")))
        matrices = read(f"{prefix}mlp.fc.weight"), read(f"{prefix}mlp.proj.weight")
        # An MLP's rows do not need the rest of a layer.
        layer = Layer(qkv=bias, out=bias, gate_up=matrices[0], down=matrices[1], norms=())
        return norm(4, hidden + mlp(norm(3, hidden), layer, TORCH))


def causal(query: Tensor, key: Tensor, value: Tensor, sequences: int) -> Tensor:
    """Attention of rows [sequences * length, heads, head_dim] over the rows of their sequence up to their own."""
    q, k, v = (rows.view(sequences, -1, *rows.shape[1:]).transpose(1, 2) for rows in (query, key, value))
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
    return attended.transpose(1, 2).flatten(0, 1)


def best_tokens(files: Files, hidden: Tensor, known: int) -> Tensor:
    """The best token below `known` of each row [rows, hidden] that the head gets, [rows]."""
    best = torch.full((len(hidden),), -torch.inf, device=hidden.device)
    token = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    for first in range(0, known, HEAD_ROWS):
        logits = linear(hidden, files.rows("lm_head.weight", first, min(first + HEAD_ROWS, known))).float()
        value, index = logits.max(-1)
        token = torch.where(value > best, index + first, token)
        best = best.maximum(value)
    return token


def run(spec: ModelSpec, files: Files, tokens: Tensor, sequences: int, seen: Seen) -> None:
    """All loops over `tokens` [sequences * length], which are that many sequences."""
    kind = Recurrent if spec.family == "huginn" else Stack
    kind(spec, files, sequences, len(tokens) // sequences).run(tokens, seen)


def pass_flops(weights: Weights) -> int:
    """Floating-point operations of one token at full depth, with its head twice: after few loops and after all."""
    spec, total = weights.spec, 0
    for name, shape in weights.shapes.items():
        looped = name.startswith(("model.layers.", "transformer.core_block.", "transformer.adapter."))
        twice = name.startswith(("lm_head.", "transformer.coda."))
        if looped or twice or name.startswith("transformer.prelude."):
            total += 2 * math.prod(shape) * (spec.loops if looped else 2 if twice else 1)
    return total
