"""Runs a planned tick on the device: prelude, one core pass over all rows, exit decision, head and sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlt.attention.interface import AttentionBackend, KvPool, PromptSpan, TickBatch
from rlt.depth.ouro import ouro_exit
from rlt.exec.sampler import sample
from rlt.exec.slots import Slots
from rlt.models.ouro import Ouro
from rlt.sched.plan import PromptSegment, SlotResult, TickPlan


class Runner:
    """Owns the device side of an engine: model, slots, hidden rows and the key/value pool.

    `hidden` [slots + prompt rows, hidden size] keeps every row between its loops: row s is slot s's decode token, the
    rows after the slots are handed out to prompt chunks by the scheduler.
    """

    def __init__(
        self, *, model: Ouro, pool: KvPool, attention: AttentionBackend, slots: Slots, prompt_rows: int
    ) -> None:
        self.model = model
        self.pool = pool
        self.slots = slots
        self._attention = attention
        device = pool.keys.device
        self.hidden = torch.zeros(
            len(slots.token) + prompt_rows, model.spec.hidden_size, dtype=model.dtype, device=device
        )

    @torch.inference_mode()
    def run(self, plan: TickPlan) -> list[SlotResult | None]:
        """Run the tick; one entry per request of `plan.sampling`, None where the row goes on to its next loop."""
        slots = self.slots
        slots.admit(plan.admitted)
        slots.grant(plan.grants)
        decode = self._ints([request.slot for request in plan.decode])
        rows = torch.cat([decode, *(self._ints(segment.rows) for segment in plan.prompts)])
        loops, positions, batch = self._batch(decode, plan.prompts)
        self._embed(decode, plan.prompts)
        self._attention.begin(batch)
        hidden = self.model.core(self.hidden[rows], positions, self._attention.attend)
        self.hidden[rows] = hidden
        return self._leave(plan, decode, hidden, loops)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.pool.keys.device)

    def _embed(self, decode: Tensor, prompts: Sequence[PromptSegment]) -> None:
        """Give the rows of loop 0 their tokens' embeddings."""
        fresh = decode[self.slots.depth[decode] == 0]
        rows, tokens = [fresh], [self.slots.token[fresh]]
        for segment in prompts:
            if segment.loop == 0:
                rows.append(self._ints(segment.rows))
                tokens.append(self._ints(segment.tokens))
        entering = torch.cat(rows)
        if len(entering):
            self.hidden[entering] = self.model.prelude(torch.cat(tokens))

    def _batch(self, decode: Tensor, prompts: Sequence[PromptSegment]) -> tuple[Tensor, Tensor, TickBatch]:
        """Loop of each decode row, position of every row, and the batch as attention sees it."""
        slots, size = self.slots, self.pool.page_size
        loops, position = slots.depth[decode], slots.position[decode]
        table = slots.page_table[decode, loops]
        positions = [position]
        write = [_flat(table, position, size)]
        spans = []
        row = len(decode)
        for segment in prompts:
            count = len(segment.rows)
            pages = slots.page_table[segment.request.slot, segment.loop]
            span = torch.arange(segment.first, segment.first + count, device=pages.device)
            positions.append(span)
            write.append(pages[span // size] * size + span % size)
            length = segment.first + count
            spans.append(PromptSpan(row, count, length, pages[: -(-length // size)]))
            row += count
        longest = int(position.max()) + 1 if len(decode) else 0
        batch = TickBatch(torch.cat(write), table[:, : -(-longest // size)], position + 1, tuple(spans))
        return loops, torch.cat(positions), batch

    def _leave(self, plan: TickPlan, decode: Tensor, hidden: Tensor, loops: Tensor) -> list[SlotResult | None]:
        """Decide which rows exit, give those their tokens, and advance every slot."""
        slots = self.slots
        done = loops + 1
        survival, exits = ouro_exit(
            self.model.gate(hidden[: len(decode)]),
            slots.survival[decode],
            done,
            slots.threshold[decode],
            slots.min_loops[decode],
            slots.max_loops[decode],
        )
        slots.survival[decode] = survival
        slots.depth[decode] = done
        # The first output token comes from the prompt's last row after all its loops, whatever the gate says.
        leaving = exits.nonzero()[:, 0]
        firsts, first_slots, row = [], [], len(decode)
        for segment in plan.prompts:
            row += len(segment.rows)
            if segment.samples:
                firsts.append(row - 1)
                first_slots.append(segment.request.slot)
        results: list[SlotResult | None] = [None] * (len(decode) + len(firsts))
        rows = torch.cat([leaving, self._ints(firsts)])
        if len(rows) == 0:
            return results
        left = torch.cat([decode[leaving], self._ints(first_slots)])
        depths = torch.cat([done[leaving], slots.max_loops[self._ints(first_slots)]])
        self._finalize(decode[leaving], done[leaving])
        tokens, finite = self._sample(left, hidden[rows])
        ends = slots.commit(left, tokens, finite)
        places = [*leaving.tolist(), *range(len(decode), len(results))]
        for place, token, depth, end in zip(places, tokens.tolist(), depths.tolist(), ends.tolist(), strict=True):
            results[place] = SlotResult(token, depth, end)
        return results

    def _finalize(self, slots: Tensor, depths: Tensor) -> None:
        """Copy the keys and values of exited tokens into the planes that they skipped (layout `last_exited`).

        A query at loop d then reads version min(d, exit depth) of every token by reading plane d alone.
        """
        state = self.slots
        planes = torch.arange(state.page_table.shape[1], device=slots.device)
        skipped = (planes >= depths[:, None]) & (planes < state.max_loops[slots][:, None])
        which, plane = skipped.nonzero(as_tuple=True)
        if len(which) == 0:
            return
        slot, position, size = slots[which], state.position[slots][which], self.pool.page_size
        source = _flat(state.page_table[slot, depths[which] - 1], position, size)
        self.pool.copy(source, _flat(state.page_table[slot, plane], position, size))

    def _sample(self, slots: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Next tokens of `slots` from their final rows, and whether each row's logits were numbers."""
        state = self.slots
        logits = self.model.head(hidden)
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
            # The position that the new token will have: distinct for every draw of a request.
            position=state.position[slots] + (state.generated[slots] > 0).long(),
        )
        return tokens, finite


def _flat(tables: Tensor, position: Tensor, page_size: int) -> Tensor:
    """Flat pool positions [rows] of `position` [rows] under page tables [rows, pages]."""
    page = tables.gather(1, (position // page_size)[:, None])[:, 0]
    return page * page_size + position % page_size
