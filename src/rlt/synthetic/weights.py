"""The values of a synthetic checkpoint: random matrices around a structure that keeps the best token apart.

Purely random weights have best tokens that the smallest rounding changes. Here row i + 1 of the head is the embedding
of token i, so that a token whose embedding gets through to the head is followed by the next id, by a wide margin. What
the layers add is noise to that, and its size (`scale`, in a norm per branch) decides for how many tokens the margin
lasts at full depth. Tokens differ in how strong their embedding is, so that this does not happen to all at once.

The embedding of token i is a sequence of cosines and sines at random frequencies, at time i. A turn of each pair by its
frequency makes it that of token i + 1: Huginn, whose head is tied to its embedding, has this turn in its adapter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlt.models.huginn import turn_table
from rlt.models.registry import MATHS
from rlt.models.spec import ModelSpec

#: numbers of one block of values: what a tensor needs in memory while it is written
BLOCK = 1 << 22

#: Norm weights that the noise is set with: on the branches' outputs in Ouro, on their inputs in the other families.
KNOBS = {
    "ouro": ("layernorm_2.weight",),
    "nanbeige": ("layernorm.weight",),
    "huginn": ("norm_1.weight", "norm_3.weight"),
}

#: the branches' scale when no agreement is asked for
PLAIN_SCALE = {"ouro": 1.0, "nanbeige": 1.0, "huginn": 0.25}

#: prefix of the names of Ouro's exit gate
GATE = "model.early_exit_gate"

#: The golden ratio's fractional part: its multiples fill the unit interval evenly, over any run of ids.
_EVEN = (math.sqrt(5) - 1) / 2

#: An embedding's strength goes from 1 / this to this.
_STRENGTH = 4.0

# Huginn's core adds, per loop, the turned prelude output to the turned state. The share of a token's prelude output
# that the adapter uses differs between tokens, and so does the number of loops until the state has settled.
_STATE_GAIN, _INPUT_GAIN, _ADAPTER_NOISE = 1.0, 2.5, 0.05
_LEAST_SHARE = 0.17


def tensor_seed(seed: int, name: str) -> int:
    """A seed of 63 bits for one tensor."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little") >> 1


class Codes:
    """Rows of unit mean square, [..., width]: cosines, then sines, of a token's id times a frequency per feature."""

    def __init__(self, width: int, seed: int, name: str) -> None:
        generator = torch.Generator().manual_seed(tensor_seed(seed, name))
        turns = torch.rand(2, width // 2, dtype=torch.float64, generator=generator) * (2 * math.pi)
        self.frequency, self._phase = turns.unbind()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [ids, width], float32, of `ids` [ids]."""
        angle = ids.double()[:, None] * self.frequency + self._phase
        return (math.sqrt(2) * torch.cat([angle.cos(), angle.sin()], -1)).float()


class Weights:
    """The values of every tensor of a checkpoint, by name."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.spec = spec
        self.shapes = MATHS[spec.family].shapes(spec)
        #: of the branches: see the top of this file
        self.scale = PLAIN_SCALE[spec.family]
        #: values of small tensors that calibration found
        self.found: dict[str, Tensor] = {}
        self._seed = seed
        self._tied = spec.family == "huginn"
        self.embedding = "transformer.wte.weight" if self._tied else "model.embed_tokens.weight"
        #: features that say which token follows
        self._width = spec.hidden_size // 2 if self._tied else spec.hidden_size
        self._codes = Codes(self._width, seed, "codes")
        self._rest = Codes(spec.hidden_size - self._width, seed, "rest")

    def seed_of(self, what: str) -> int:
        """The seed of something that is drawn."""
        return tensor_seed(self._seed, what)

    def is_knob(self, name: str) -> bool:
        return name.endswith(KNOBS[self.spec.family])

    def is_late(self, name: str) -> bool:
        """Small tensors, some of which are only known after calibration."""
        return len(self.shapes[name]) == 1 or name.startswith(GATE)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The values of a tensor in order, float32, in pieces."""
        shape = self.shapes[name]
        if name in self.found:
            yield self.found[name]
        elif name == self.embedding:
            yield from self._by_rows(name, self.embed)
        elif name == "lm_head.weight":
            yield from self._by_rows(name, self.embed if self._tied else self._successors)
        elif name == "transformer.adapter.weight":
            yield from self._by_rows(name, self._adapter(name))
        elif name == "freqs_cis":
            yield turn_table(self.spec)
        elif name == f"{GATE}.bias":
            yield torch.zeros(1)
        elif len(shape) == 1:
            yield self.norm(name)
        else:
            # Rows of unit size give numbers of unit size.
            yield from _normals(math.prod(shape), shape[-1] ** -0.5, tensor_seed(self._seed, name))

    def whole(self, name: str) -> Tensor:
        """A small tensor, float32."""
        return torch.cat([block.flatten() for block in self.blocks(name)]).view(self.shapes[name])

    def norm(self, name: str) -> Tensor:
        weight = torch.full(self.shapes[name], self.scale if self.is_knob(name) else 1.0)
        if name == "transformer.ln_f.weight":
            # What only weakens a token's input says nothing about the next token.
            weight[self._width :] = 0.0
        return weight

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [ids, hidden] of `ids` [ids], float32, before they are rounded to the checkpoint's dtype."""
        even = (ids.double() * _EVEN).frac()[:, None]
        if not self._tied:
            return self._codes.rows(ids) * (_STRENGTH ** (2 * even - 1)).float()
        share = _LEAST_SHARE**even
        rest = (1 / share**2 - 1).sqrt().float()
        return torch.cat([self._codes.rows(ids), self._rest.rows(ids) * rest], -1) / math.sqrt(self.spec.hidden_size)

    def _successors(self, ids: Tensor) -> Tensor:
        return self._codes.rows((ids - 1) % self.spec.vocab_size) / math.sqrt(self.spec.hidden_size)

    def _adapter(self, name: str) -> Callable[[Tensor], Tensor]:
        """Rows [ids, 2 hidden] of the adapter by their numbers."""
        state = Codes(self._width, self._seed, "state").frequency
        half, hidden = self._width // 2, self.spec.hidden_size

        def rows(ids: Tensor) -> Tensor:
            seed = tensor_seed(self._seed, f"{name} {int(ids[0])}")
            noise = next(_normals(len(ids) * 2 * hidden, _ADAPTER_NOISE * hidden**-0.5, seed))
            block = noise.view(len(ids), 2 * hidden)
            for row, index in enumerate(ids.tolist()):
                if index >= self._width:
                    continue
                pair, second = index % half, index >= half
                for first, gain, frequency in ((0, _STATE_GAIN, state), (hidden, _INPUT_GAIN, self._codes.frequency)):
                    cos, sin = float(frequency[pair].cos()), float(frequency[pair].sin())
                    # cos(x + f) = cos x cos f - sin x sin f, sin(x + f) = cos x sin f + sin x cos f
                    block[row, first + pair] += gain * (sin if second else cos)
                    block[row, first + half + pair] += gain * (cos if second else -sin)
            return block

        return rows

    def _by_rows(self, name: str, rows: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        count, width = self.shapes[name]
        step = max(1, BLOCK // width)
        for first in range(0, count, step):
            yield rows(torch.arange(first, min(first + step, count)))


def _normals(count: int, std: float, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, count, BLOCK):
        yield torch.empty(min(BLOCK, count - first)).normal_(std=std, generator=generator)
