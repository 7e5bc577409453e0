"""Per-request state that lives on the device and is advanced there, one row per slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlt.kv.pages import DUMMY_PAGE
from rlt.sched.plan import END_LENGTH, END_NONE, END_NOT_FINITE, END_STOP, PageGrant
from rlt.sched.request import Request

#: room for the model's end ids and the request's own (params.MAX_STOP_TOKEN_IDS)
MAX_END_IDS = 24


class Slots:
    """Tensors of [slots] (and the page tables); a slot is set at admission and advanced by the ticks."""

    def __init__(self, slots: int, planes: int, pages_per_plane: int, device: torch.device) -> None:
        def ints() -> Tensor:
            return torch.zeros(slots, dtype=torch.int64, device=device)

        def floats() -> Tensor:
            return torch.zeros(slots, dtype=torch.float32, device=device)

        self.device = device
        #: the token that runs next, its position, the loops it has run, its survival under the exit rule
        self.token, self.position, self.depth, self.survival = ints(), ints(), ints(), floats()
        self.generated, self.max_tokens, self.min_tokens = ints(), ints(), ints()
        self.min_loops, self.max_loops, self.threshold = ints(), ints(), floats()
        self.temperature, self.top_p, self.min_p = floats(), floats(), floats()
        self.top_k, self.seed = ints(), ints()
        self.end_ids = torch.full((slots, MAX_END_IDS), -1, dtype=torch.int64, device=device)
        #: page_table[slot, plane, i] is the page of positions i * page_size ... of that plane
        self.page_table = torch.full((slots, planes, pages_per_plane), DUMMY_PAGE, dtype=torch.int64, device=device)

    def admit(self, requests: Sequence[Request]) -> None:
        """Set the slots of newly admitted requests."""
        for request in requests:
            params, slot = request.params, request.slot
            self.position[slot] = len(request.prompt)
            self.depth[slot] = 0
            self.survival[slot] = 1.0
            self.generated[slot] = 0
            self.max_tokens[slot] = params.max_tokens
            self.min_tokens[slot] = params.min_tokens
            self.min_loops[slot] = params.min_loops
            self.max_loops[slot] = params.max_loops
            self.threshold[slot] = params.exit_threshold
            self.temperature[slot] = params.temperature
            self.top_p[slot] = params.top_p
            self.min_p[slot] = params.min_p
            self.top_k[slot] = params.top_k
            self.seed[slot] = params.seed
            ends = params.end_token_ids
            self.end_ids[slot] = torch.tensor([*ends, *[-1] * (MAX_END_IDS - len(ends))], device=self.device)
            self.page_table[slot] = DUMMY_PAGE

    def grant(self, grants: Sequence[PageGrant]) -> None:
        """Enter new pages into the page tables."""
        if grants:
            slot, plane, place, page = torch.tensor(grants, device=self.device).unbind(1)
            self.page_table[slot, plane, place] = page

    def bar_early_ends(self, slots: Tensor, logits: Tensor) -> None:
        """Set the end ids' logits [rows, vocab] to minus infinity, in place, in rows below their min_tokens."""
        rows = (self.generated[slots] < self.min_tokens[slots]).nonzero()
        for row in rows[:, 0].tolist():
            ends = self.end_ids[slots[row]]
            logits[row, ends[ends >= 0]] = -torch.inf

    def commit(self, slots: Tensor, tokens: Tensor, finite: Tensor) -> Tensor:
        """Append `tokens` to `slots` (both [rows], int64) and return what ended: an END_* code per row (int64).

        The slot's next token starts at loop 0 with fresh survival.
        """
        generated = self.generated[slots] + 1
        stopped = (tokens[:, None] == self.end_ids[slots]).any(-1)
        end = torch.where(generated >= self.max_tokens[slots], END_LENGTH, END_NONE)
        end = torch.where(stopped, END_STOP, end)
        end = torch.where(finite, end, END_NOT_FINITE)
        # The prompt's last row gives the first output token; its position is the prompt's length, set at admission.
        self.position[slots] += (self.generated[slots] > 0).long()
        self.generated[slots] = generated
        self.token[slots] = tokens
        self.depth[slots] = 0
        self.survival[slots] = 1.0
        return end
