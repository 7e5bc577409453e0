"""Runs a planned tick on the device: prelude, one core pass over all rows, exit decision, coda, head and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlt.attention.interface import AttentionBackend, KvPool
from rlt.depth.rules import ExitRule
from rlt.exec.batches import Batches, OuterAttention
from rlt.exec.penalties import Penalties, PenaltyRow
from rlt.exec.planes import Planes
from rlt.exec.sampler import sample
from rlt.exec.slots import PageTable, Slots
from rlt.kv.layout import Layout
from rlt.models.interface import InitialState, LoopedModel
from rlt.sched.plan import PromptSegment, Resumption, RowResult, Suspension, TickPlan
from rlt_protocols.text import TokenLogprob


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything of a suspended request, in host memory: slot state, hidden rows, keys and values by page."""

    state: dict[str, Tensor]
    token_row: Tensor
    prompt_rows: Tensor
    keys: Tensor
    values: Tensor
    penalties: PenaltyRow | None


class Logprobs(NamedTuple):
    """Of `tokens` tokens: their log-probabilities [tokens], and the likeliest ids and theirs [tokens, most]."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True, slots=True)
class SubmittedTick:
    """The tokens of a tick that runs or has run: places in the plan, tokens, depths and ends, each [tokens]."""

    columns: tuple[Tensor, Tensor, Tensor, Tensor] | None
    logprobs: Logprobs | None = None

    def read(self) -> list[RowResult]:
        """Wait for the tick and return its tokens."""
        if self.columns is None:
            return []
        results = [RowResult(*row) for row in torch.stack(self.columns, 1).tolist()]
        if self.logprobs is None:
            return results
        columns = (tensor.tolist() for tensor in self.logprobs)
        return [
            result._replace(logprob=TokenLogprob(chosen, tuple(zip(ids, values, strict=True))))
            for result, chosen, ids, values in zip(results, *columns, strict=True)
        ]


class Runner:
    """Owns the device side of an engine: model, slots, page table, rows between their loops, the key/value pool.

    `hidden` [slots + prompt rows, row size] keeps every row between its loops: row s is slot s's decode token, the rows
    after the slots are handed out to prompt chunks by the scheduler.
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
        initial_state: InitialState = "zero",
        warm_start: bool = False,
    ) -> None:
        """`warm_start`: an output token starts from the state that the token before it left with."""
        self.model = model
        self.pool = pool
        self.slots = slots
        self.pages = pages
        self._attention = attention
        self._planes = planes
        self._rule = rule
        self._initial_state: InitialState = initial_state
        self._warm_start = warm_start
        self._penalties = Penalties(slots, model.spec.vocab_size)
        self._batches = Batches(layout, slots, pages, planes, pool.page_size)
        self.hidden = torch.zeros(slots.count + prompt_rows, model.row_size, dtype=model.dtype, device=slots.device)

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
            self._penalties.admit(request)
        self.pages.grant(plan.grants)
        slots = self._ints(plan.decode.slots)
        # Rows of requests that ended in a tick whose results the scheduler had not read yet do nothing.
        places = self.slots.active[slots].nonzero()[:, 0]
        slots = slots[places]
        if len(slots) + plan.prompt_rows == 0:
            return SubmittedTick(None)
        loops = self.slots.depth[slots]
        self._begin_tokens(slots[loops == 0], [segment for segment in plan.prompts if segment.loop == 0])
        rows = self._rows(slots, plan.prompts)
        before = self.hidden[rows]
        self._attention.begin(self._batches.core(slots, loops, plan.prompts))
        after = self.model.core(before, self._batches.positions(slots, plan.prompts), self._attention.attend)
        self.hidden[rows] = after
        count, states = len(slots), self.model.spec.hidden_size
        exits = self._rule.candidates(slots, before[:count, :states], after[:count, :states], loops + 1)
        leaving = exits.nonzero()[:, 0]
        logits = self._logits(slots, leaving, after, plan.prompts)
        if logits is not None:
            confirmed = self._rule.confirm(slots[leaving], logits[: len(leaving)], loops[leaving] + 1)
            if confirmed is not None:
                exits[leaving] = confirmed
                sampled = torch.ones(len(logits) - len(leaving), dtype=torch.bool, device=logits.device)
                logits, leaving = logits[torch.cat([confirmed, sampled])], leaving[confirmed]
        self._planes.passed(slots, loops, exits)
        self.slots.depth[slots] = loops + 1
        if logits is None or len(logits) == 0:
            return SubmittedTick(None)
        return self._sample(plan, places[leaving], slots[leaving], logits)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.slots.device)

    def _rows(self, slots: Tensor, segments: Sequence[PromptSegment]) -> Tensor:
        """Places in `hidden` of decode rows and prompt rows."""
        return torch.cat([slots, *(self._ints(segment.rows) for segment in segments)])

    def _outer(self, slots: Tensor, segments: Sequence[PromptSegment]) -> OuterAttention:
        return OuterAttention(self._attention, self._batches, self.model.spec.layers, slots, segments)

    def _begin_tokens(self, slots: Tensor, segments: Sequence[PromptSegment]) -> None:
        """Prelude: give rows of loop 0 what their tokens start from."""
        rows = self._rows(slots, segments)
        if len(rows) == 0:
            return
        tokens = torch.cat([self.slots.token[slots], *(self._ints(segment.tokens) for segment in segments)])
        owners = torch.cat([slots, *(self._ints([segment.slot] * len(segment.rows)) for segment in segments)])
        positions = self._batches.positions(slots, segments)
        state = self.model.initial_state(self._initial_state, self.slots.seed[owners], positions)
        if self._warm_start:
            # The slot's row is still that of its last token, or of the prompt's.
            state[: len(slots)] = self.hidden[slots, : state.shape[1]]
        self.hidden[rows] = self.model.prelude(tokens, positions, self._outer(slots, segments), state)

    def _logits(self, slots: Tensor, leaving: Tensor, after: Tensor, prompts: Sequence[PromptSegment]) -> Tensor | None:
        """Coda, and logits [rows, vocab] of decode rows `leaving`, then of the prompts' last rows; None without rows.

        All prompt rows go through the coda after their last loop, since later rows attend to them there.
        """
        index, last_rows, ending, row = [leaving], [], [], len(slots)
        place = len(leaving)
        for segment in prompts:
            first, row = row, row + len(segment.rows)
            if segment.loop == segment.request.loops - 1:
                ending.append(segment)
                index.append(torch.arange(first, row, device=after.device))
                place += len(segment.rows)
                if segment.samples:
                    last_rows.append(place - 1)
        rows, slots = torch.cat(index), slots[leaving]
        if len(rows) == 0:
            return None
        hidden = self.model.coda(after[rows], self._batches.positions(slots, ending), self._outer(slots, ending))
        if ending:
            hidden = torch.cat([hidden[: len(leaving)], hidden[self._ints(last_rows)]])
        return self.model.head(hidden) if len(hidden) else None

    def _sample(self, plan: TickPlan, places: Tensor, slots: Tensor, logits: Tensor) -> SubmittedTick:
        """Give `slots` [rows], whose tokens left the loops, and prompts that are through their next tokens."""
        # The first output token comes from the prompt's last row after all its loops, whatever the rule says.
        sampling = [segment for segment in plan.prompts if segment.samples]
        firsts = self._ints([segment.slot for segment in sampling])
        if sampling:
            self._planes.begin(firsts)
            self.slots.depth[firsts] = self.slots.max_loops[firsts]
            if self._warm_start:
                self.hidden[firsts] = self.hidden[self._ints([segment.rows[-1] for segment in sampling])]
        left = torch.cat([slots, firsts])
        depths = self.slots.depth[left]
        tokens, finite, logprobs = self._next_tokens(left, logits, plan.logprobs)
        ends = self.slots.commit(left, tokens, finite)
        self._rule.restart(left)
        after = torch.arange(len(firsts), device=left.device) + len(plan.decode.slots)
        return SubmittedTick((torch.cat([places, after]), tokens, depths, ends), logprobs)

    def _next_tokens(
        self, slots: Tensor, logits: Tensor, most_logprobs: int | None
    ) -> tuple[Tensor, Tensor, Logprobs | None]:
        """Next tokens of `slots` from their logits, which are overwritten; whether each row was numbers; and
        log-probabilities, with those of `most_logprobs` other tokens, unless that is None."""
        state = self.slots
        # Rows of a padded vocabulary: nothing was trained to keep them low.
        logits[:, self.model.spec.known_tokens :] = -torch.inf
        finite = torch.isfinite(logits.amax(-1))
        logits = logits.where(finite[:, None], 0.0)
        scale = None if most_logprobs is None else torch.log_softmax(logits, -1)
        self._penalties.apply(slots, logits)
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
        self._penalties.count(slots, tokens)
        if scale is None or most_logprobs is None:
            return tokens, finite, None
        top = scale.topk(min(most_logprobs, scale.shape[1]), -1)
        return tokens, finite, Logprobs(scale.gather(1, tokens[:, None])[:, 0], top.indices, top.values)

    def _copy_out(self, suspension: Suspension) -> Snapshot:
        pages = self._ints(suspension.pages)
        return Snapshot(
            state=self.slots.copy_out(suspension.slot),
            token_row=self.hidden[suspension.slot].to("cpu", copy=True),
            prompt_rows=self.hidden[self._ints(suspension.rows)].cpu(),
            keys=self.pool.keys[:, pages].cpu(),
            values=self.pool.values[:, pages].cpu(),
            penalties=self._penalties.copy_out(suspension.slot),
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
        self._penalties.restore(resumption.slot, snapshot.penalties)
        self.pages.clear(resumption.slot)
        resumption.request.snapshot = None
