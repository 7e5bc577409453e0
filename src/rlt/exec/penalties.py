"""Changes of the logits by what a request has said, and by what it asks for: three penalties and a bias per id.

A row of state has the size of the vocabulary, so there are rows for the requests that use them, and not for all slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlt.exec.slots import Slots
from rlt.sched.request import Request
from rlt_protocols.params import ResolvedParams

#: of the table's row index: the slot's request uses nothing of this
NO_ROW = -1


class PenaltyRow(NamedTuple):
    """The state of one request: how often it generated each id, the ids of its prompt, what each id's logit gets.

    `counts` [vocab] int32, `in_prompt` [vocab] bool, `bias` [vocab] float32, `scales` [3] float32: presence, frequency
    and repetition.
    """

    counts: Tensor
    in_prompt: Tensor
    bias: Tensor
    scales: Tensor


class Penalties:
    """The penalty rows of all slots; `apply` before sampling, `count` after."""

    def __init__(self, slots: Slots, vocab: int) -> None:
        self._vocab = vocab
        self._device = slots.device
        #: of each slot, on the host and on the device
        self._rows: dict[int, int] = {}
        self._row = torch.full((slots.count,), NO_ROW, dtype=torch.int64, device=slots.device)
        self._state = self._empty(0)

    def admit(self, request: Request) -> None:
        """A request got its slot, whose last one is gone."""
        params = request.params
        self.release(request.slot)
        if not uses_penalties(params):
            return
        row = self._empty(1)
        row.in_prompt[0, torch.tensor(request.prompt, device=self._device)] = True
        for token, bias in params.logit_bias:
            row.bias[0, token] = bias
        scales = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        row.scales[0] = torch.tensor(scales, device=self._device)
        self.restore(request.slot, PenaltyRow(*(tensor[0] for tensor in row)))

    def release(self, slot: int) -> None:
        """The slot's request is gone or suspended."""
        if self._rows.pop(slot, None) is not None:
            self._row[slot] = NO_ROW

    def copy_out(self, slot: int) -> PenaltyRow | None:
        """A suspended request's state, in host memory."""
        row = self._rows.get(slot)
        return None if row is None else PenaltyRow(*(tensor[row].to("cpu", copy=True) for tensor in self._state))

    def restore(self, slot: int, state: PenaltyRow | None) -> None:
        """Give the slot a state, which may have been copied out."""
        self.release(slot)
        if state is None:
            return
        taken = set(self._rows.values())
        row = next(index for index in range(len(taken) + 1) if index not in taken)
        if row == len(self._state.counts):
            more = self._empty(max(1, row))
            self._state = PenaltyRow(*(torch.cat(pair) for pair in zip(self._state, more, strict=True)))
        for tensor, value in zip(self._state, state, strict=True):
            tensor[row] = value.to(self._device)
        self._rows[slot] = row
        self._row[slot] = row

    def apply(self, slots: Tensor, logits: Tensor) -> None:
        """Change the logits [rows, vocab] of `slots` [rows] in place.

        The bias comes first; then positive logits of ids seen in prompt or answer are divided by the repetition
        penalty and others multiplied; then frequency penalty times count, and presence penalty, are taken off.
        """
        if not self._rows:
            return
        rows = self._row[slots]
        which = (rows >= 0).nonzero()[:, 0]
        counts, in_prompt, bias, scales = (tensor[rows[which]] for tensor in self._state)
        presence, frequency, repetition = scales[:, :, None].unbind(1)
        changed = logits[which] + bias
        said = counts > 0
        scaled = torch.where(changed > 0, changed / repetition, changed * repetition)
        changed = torch.where(said | in_prompt, scaled, changed)
        logits[which] = changed - frequency * counts - presence * said

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """`tokens` [rows] were added to the answers of `slots` [rows], which differ."""
        if not self._rows:
            return
        rows = self._row[slots]
        which = rows >= 0
        self._state.counts[rows[which], tokens[which]] += 1

    def _empty(self, rows: int) -> PenaltyRow:
        device, shape = self._device, (rows, self._vocab)
        return PenaltyRow(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
            torch.zeros(shape, device=device),
            torch.zeros((rows, 3), device=device),
        )


def uses_penalties(params: ResolvedParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1 or params.logit_bias
    )
