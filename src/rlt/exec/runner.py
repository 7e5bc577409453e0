"""Runs a planned tick on the device: prelude, one core pass over all rows, exit decision, head and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlt.attention.interface import AttentionBackend, KvPool, PromptSpan, TickBatch
from rlt.depth.rules import ExitRule
from rlt.exec.planes import Planes
from rlt.exec.sampler import sample
from rlt.exec.slots import PageTable, Slots
from rlt.kv.layout import Layout
from rlt.models.interface import LoopedModel
from rlt.sched.plan import PromptSegment, Resumption, RowResult, Suspension, TickPlan


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything of a suspended request, in host memory: slot state, hidden rows, keys and values by page."""

    state: dict[str, Tensor]
    token_row: Tensor
    prompt_rows: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class SubmittedTick:
    """The tokens of a tick that runs or has run: places in the plan, tokens, depths and ends, each [tokens]."""

    columns: tuple[Tensor, Tensor, Tensor, Tensor] | None

    def read(self) -> list[RowResult]:
        """Wait for the tick and return its tokens."""
        if self.columns is None:
            return []
        return [RowResult(*row) for row in torch.stack(self.columns, 1).tolist()]


class Runner:
    """Owns the device side of an engine: model, slots, page table, hidden rows and the key/value pool.

    `hidden` [slots + prompt rows, hidden size] keeps every row between its loops: row s is slot s's decode token, the
    rows after the slots are handed out to prompt chunks by the scheduler.
    """

    def __init__(
        self,
        *,
        model: LoopedModel,
        layout: Layout,
        pool: KvPool,
        attention: AttentionBackend,
        slots: Slots,
        pages: PageTable,
        planes: Planes,
        rule: ExitRule,
        prompt_rows: int,
    ) -> None:
        self.model = model
        self.pool = pool
        self.slots = slots
        self.pages = pages
        self._layout = layout
        self._attention = attention
        self._planes = planes
        self._rule = rule
        self.hidden = torch.zeros(
            slots.count + prompt_rows, model.spec.hidden_size, dtype=model.dtype, device=slots.device
        )

    @torch.inference_mode()
    def submit(self, plan: TickPlan) -> SubmittedTick:
        """Run the tick."""
        for suspension in plan.suspensions:
            suspension.request.snapshot = self._copy_out(suspension)
        for resumption in plan.resumptions:
            self._copy_in(resumption)
        for request in plan.admitted:
            self.slots.admit(request)
            self.pages.clear(request.slot)
            self._rule.admit(request)
        self.pages.grant(plan.grants)
        slots = self._ints(plan.decode.slots)
        # Rows of requests that ended in a tick whose results the scheduler had not read yet do nothing.
        places = self.slots.active[slots].nonzero()[:, 0]
        slots = slots[places]
        if len(slots) + plan.prompt_rows == 0:
            return SubmittedTick(None)
        loops = self.slots.depth[slots]
        self._embed(slots[loops == 0], plan.prompts)
        positions, batch = self._batch(slots, loops, plan.prompts)
        rows = torch.cat([slots, *(self._ints(segment.rows) for segment in plan.prompts)])
        self._attention.begin(batch)
        hidden = self.model.core(self.hidden[rows], positions, self._attention.attend)
        self.hidden[rows] = hidden
        exits = self._rule.decide(slots, hidden[: len(slots)], loops + 1)
        self._planes.passed(slots, loops, exits)
        self.slots.depth[slots] = loops + 1
        return self._sample(plan, places, slots, exits, hidden)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.slots.device)

    def _embed(self, fresh: Tensor, prompts: Sequence[PromptSegment]) -> None:
        """Give the rows of loop 0 their tokens' embeddings."""
        rows, tokens = [fresh], [self.slots.token[fresh]]
        for segment in prompts:
            if segment.loop == 0:
                rows.append(self._ints(segment.rows))
                tokens.append(self._ints(segment.tokens))
        entering = torch.cat(rows)
        if len(entering):
            self.hidden[entering] = self.model.prelude(torch.cat(tokens))

    def _batch(self, slots: Tensor, loops: Tensor, prompts: Sequence[PromptSegment]) -> tuple[Tensor, TickBatch]:
        """Positions of all rows, and the batch as attention sees it."""
        reads = self._planes.reads(slots, loops)
        positions, write = [self.slots.position[slots]], [reads.write]
        size, row, spans = self.pool.page_size, len(slots), []
        for segment in prompts:
            count = len(segment.rows)
            length = segment.first + count
            plane = segment.loop % self._layout.prompt_planes(segment.request.loops)
            pages = self.pages.table[segment.slot, plane, : -(-length // size)]
            span = torch.arange(segment.first, length, device=pages.device)
            positions.append(span)
            write.append(pages[span // size] * size + span % size)
            spans.append(PromptSpan(row, count, length, pages))
            row += count
        return torch.cat(positions), TickBatch(torch.cat(write), reads.tables, reads.counts, tuple(spans))

    def _sample(self, plan: TickPlan, places: Tensor, slots: Tensor, exits: Tensor, hidden: Tensor) -> SubmittedTick:
        """Give the rows that leave the loops their tokens, and advance their slots."""
        leaving = exits.nonzero()[:, 0]
        # The first output token comes from the prompt's last row after all its loops, whatever the rule says.
        lasts, first_slots, row = [], [], len(slots)
        for segment in plan.prompts:
            row += len(segment.rows)
            if segment.samples:
                lasts.append(row - 1)
                first_slots.append(segment.slot)
        rows = torch.cat([leaving, self._ints(lasts)])
        if len(rows) == 0:
            return SubmittedTick(None)
        firsts = self._ints(first_slots)
        if first_slots:
            self._planes.begin(firsts)
            self.slots.depth[firsts] = self.slots.max_loops[firsts]
        left = torch.cat([slots[leaving], firsts])
        depths = self.slots.depth[left]
        tokens, finite = self._next_tokens(left, hidden[rows])
        ends = self.slots.commit(left, tokens, finite)
        self._rule.restart(left)
        after = torch.arange(len(lasts), device=left.device) + len(plan.decode.slots)
        return SubmittedTick((torch.cat([places[leaving], after]), tokens, depths, ends))

    def _next_tokens(self, slots: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Next tokens of `slots` from their final rows, and whether each row's logits were numbers."""
        state = self.slots
        logits = self.model.head(hidden)
        # Rows of a padded vocabulary: nothing was trained to keep them low.
        logits[:, self.model.spec.known_tokens :] = -torch.inf
        finite = torch.isfinite(logits.amax(-1))
        logits = logits.where(finite[:, None], 0.0)
        state.bar_early_ends(slots, logits)
        tokens = sample(
            logits,
            temperature=state.temperature[slots],
            top_k=state.top_k[slots],
            top_p=state.top_p[slots],
            min_p=state.min_p[slots],
            seed=state.seed[slots],
            # Distinct for every draw of a request, whatever its batches look like.
            position=state.next_position(slots),
        )
        return tokens, finite

    def _copy_out(self, suspension: Suspension) -> Snapshot:
        pages = self._ints(suspension.pages)
        return Snapshot(
            state=self.slots.copy_out(suspension.slot),
            token_row=self.hidden[suspension.slot].to("cpu", copy=True),
            prompt_rows=self.hidden[self._ints(suspension.rows)].cpu(),
            keys=self.pool.keys[:, pages].cpu(),
            values=self.pool.values[:, pages].cpu(),
        )

    def _copy_in(self, resumption: Resumption) -> None:
        snapshot, device = resumption.request.snapshot, self.slots.device
        assert isinstance(snapshot, Snapshot)
        pages = self._ints(resumption.pages)
        self.slots.copy_in(resumption.slot, snapshot.state)
        self.hidden[resumption.slot] = snapshot.token_row.to(device)
        self.hidden[self._ints(resumption.rows)] = snapshot.prompt_rows.to(device)
        self.pool.keys[:, pages] = snapshot.keys.to(device)
        self.pool.values[:, pages] = snapshot.values.to(device)
        self.pages.clear(resumption.slot)
        resumption.request.snapshot = None
