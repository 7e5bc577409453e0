"""Per-request state that lives on the device and is advanced there, one row per slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlt.kv.pages import DUMMY_PAGE
from rlt.sched.plan import END_LENGTH, END_NONE, END_NOT_FINITE, END_STOP, PageGrant
from rlt.sched.request import Request


class Slots:
    """Tensors of [slots, ...]: a slot is set at admission, advanced by the ticks, and can be copied out and back.

    Key/value planes and exit rules keep state per slot too: they `add` their tensors, so that a suspended request
    takes everything with it.
    """

    def __init__(self, slots: int, device: torch.device, *, end_ids: int) -> None:
        """`end_ids`: most ids that may end a request, the model's and its own."""
        self.count = slots
        self.device = device
        self._tensors: dict[str, Tensor] = {}
        #: the slot has a token that runs; a slot whose request ended is passed over by ticks already submitted
        self.active = self.add("active", torch.bool)
        #: the token that runs next, its position, the loops it has run
        self.token = self.add("token", torch.int64)
        self.position = self.add("position", torch.int64)
        self.depth = self.add("depth", torch.int64)
        self.generated = self.add("generated", torch.int64)
        self.max_tokens = self.add("max_tokens", torch.int64)
        self.min_tokens = self.add("min_tokens", torch.int64)
        self.min_loops = self.add("min_loops", torch.int64)
        self.max_loops = self.add("max_loops", torch.int64)
        self.threshold = self.add("threshold", torch.float32)
        self.temperature = self.add("temperature", torch.float32)
        self.top_p = self.add("top_p", torch.float32)
        self.min_p = self.add("min_p", torch.float32)
        self.top_k = self.add("top_k", torch.int64)
        self.seed = self.add("seed", torch.int64)
        self.end_ids = self.add("end_ids", torch.int64, (end_ids,))

    def add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Tensor:
        """A new zeroed state tensor [slots, *shape]."""
        assert name not in self._tensors
        tensor = self._tensors[name] = torch.zeros((self.count, *shape), dtype=dtype, device=self.device)
        return tensor

    def admit(self, request: Request) -> None:
        """Set the slot of a newly admitted request."""
        params, slot = request.params, request.slot
        for tensor in self._tensors.values():
            tensor[slot] = 0
        self.position[slot] = len(request.prompt)
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
        self.end_ids[slot] = torch.tensor([*ends, *[-1] * (self.end_ids.shape[1] - len(ends))], device=self.device)

    def copy_out(self, slot: int) -> dict[str, Tensor]:
        """The state of a slot, by name."""
        return {name: tensor[slot].clone() for name, tensor in self._tensors.items()}

    def copy_in(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Set a slot to a state that was copied out."""
        for name, tensor in self._tensors.items():
            tensor[slot] = state[name]

    def bar_early_ends(self, slots: Tensor, logits: Tensor) -> None:
        """Set the end ids' logits [rows, vocab] to minus infinity, in place, in rows below their min_tokens."""
        ends = self.end_ids[slots]
        barred = (self.generated[slots] < self.min_tokens[slots])[:, None] & (ends >= 0)
        row, column = barred.nonzero(as_tuple=True)
        logits[row, ends[row, column]] = -torch.inf

    def commit(self, slots: Tensor, tokens: Tensor, finite: Tensor) -> Tensor:
        """Append `tokens` to `slots` (both [rows], int64) and return what ended: an END_* code per row (int64).

        The slot's next token starts at loop 0; a slot that ended goes idle at once.
        """
        generated = self.generated[slots] + 1
        end = torch.where(generated >= self.max_tokens[slots], END_LENGTH, END_NONE)
        end = torch.where((tokens[:, None] == self.end_ids[slots]).any(-1), END_STOP, end)
        end = torch.where(finite, end, END_NOT_FINITE)
        self.position[slots] = self.next_position(slots)
        self.generated[slots] = generated
        self.token[slots] = tokens
        self.depth[slots] = 0
        self.active[slots] = end == END_NONE
        return end

    def next_position(self, slots: Tensor) -> Tensor:
        """Position of the token that `commit` is about to append. The first one's was set at admission."""
        return self.position[slots] + (self.generated[slots] > 0).long()


class PageTable:
    """table[slot, l, i] is the page that holds positions i * page_size ... of page list l of the slot's request."""

    def __init__(self, slots: int, lists: int, places: int, device: torch.device) -> None:
        self.table = torch.full((slots, lists, places), DUMMY_PAGE, dtype=torch.int64, device=device)

    def clear(self, slot: int) -> None:
        self.table[slot] = DUMMY_PAGE

    def grant(self, grants: Sequence[PageGrant]) -> None:
        """Enter new pages."""
        if grants:
            slot, page_list, place, page = torch.tensor(grants, device=self.table.device).unbind(1)
            self.table[slot, page_list, place] = page
