"""Who gets a place and pages, who gives them up, and what was promised to those who run. No torch here."""

from __future__ import annotations

from rlt.sched.places import Places
from rlt.sched.plan import Resumption, Suspension, TickPlan
from rlt.sched.policy import Policy
from rlt.sched.request import Request, Stage
from rlt.sched.supply import PageSupply
from rlt.sched.waiting import WaitingLine

#: waiting requests looked at beyond the first one that does not fit
LOOK_AHEAD = 16


class Admission:
    """Moves requests between the waiting line and their places, and keeps count of what admission promised them."""

    def __init__(self, policy: Policy, supply: PageSupply, places: Places, waiting: WaitingLine) -> None:
        self._policy = policy
        self._supply = supply
        self._places = places
        self._waiting = waiting
        self.preemptions = 0
        self.hit_tokens = 0
        #: pages that running requests may still need and that admission must not give away
        self._promised = 0
        #: results up to this tick are known
        self._applied = 0

    def admit(self, plan: TickPlan, applied: int) -> None:
        """Give places to those first in line, and to a bounded number behind one that does not fit.

        The results of ticks up to number `applied` are known.
        """
        self._applied = applied
        index = 0
        while index < min(len(self._waiting), LOOK_AHEAD + 1):
            request = self._waiting[index]
            if self._try_admit(request, plan) or (index == 0 and self._make_room(request, plan)):
                self._waiting.admitted(request)
                # From the front again: a request that was passed may be urgent now.
                index = 0
            elif request.urgent or not self._places.has_slot:
                break
            else:
                index += 1

    def _try_admit(self, request: Request, plan: TickPlan) -> bool:
        if not self._places.has_slot:
            return False
        if request.stage is Stage.SUSPENDED:
            return self._resume(request, plan)
        if self._policy.preemption and not self._affordable(self._supply.prompt_need(request)):
            return False
        self._supply.find_cached(request)
        need = self._supply.prompt_missing(request, len(request.prompt))
        if not self._policy.preemption:
            need = self._supply.most_pages(request) - sum(map(len, request.lists))
        if not self._affordable(need):
            self._supply.forget_cached(request)
            return False
        self._places.enter(request, Stage.PREFILL, plan.number)
        self._promised += self.promise(request)
        self.hit_tokens += request.cached_tokens
        plan.admitted.append(request)
        plan.grants.extend(self._supply.table(request))
        return True

    def _affordable(self, pages: int) -> bool:
        """Whether admission may promise `pages` more. An engine without requests needs no reserve."""
        reserve = self._policy.reserve if self._places.running else 0
        return self._supply.available - self._promised - reserve >= pages

    def _resume(self, request: Request, plan: TickPlan) -> bool:
        # Its copy must have been made, and what the ticks before it did must be known.
        if not request.suspended_at - 1 <= self._applied or request.suspended_at == plan.number:
            return False
        count = sum(request.sizes)
        rows = sum(chunk.count for chunk in request.chunks)
        # While others run, there must be something to grow into, or it would soon be suspended again.
        growth = len(request.sizes) if self._places.running else 0
        if self._places.room < max(rows, 1) or not self._affordable(count + growth):
            return False
        pages = self._supply.take(count)
        if pages is None:
            return False
        given = iter(pages)
        request.lists = [[next(given) for _ in range(size)] for size in request.sizes]
        for chunk in request.chunks:
            chunk.rows = self._places.take_rows(chunk.count)
        self._places.enter(request, request.resumes_in, plan.number)
        plan.resumptions.append(
            Resumption(request, request.slot, pages, [row for chunk in request.chunks for row in chunk.rows])
        )
        plan.grants.extend(self._supply.table(request))
        self._promised += self.promise(request)
        if request.stage is Stage.DECODE:
            # It runs from the next tick on, once its pages were looked at.
            self._supply.open_book(request)
        return True

    def _make_room(self, request: Request, plan: TickPlan) -> bool:
        """Suspend running requests of lower priority for the first in line."""
        if not (self._policy.priority and self._policy.preemption) or request.suspended_at == plan.number:
            return False
        victims = [
            other
            for other in self._places.running
            if not other.urgent and other.params.priority > request.params.priority and self.settled(other, plan)
        ]
        # Nobody is suspended in vain: all of them together must be enough.
        if request.stage is Stage.SUSPENDED:
            need = sum(request.sizes) + len(request.sizes)
        else:
            need = self._supply.prompt_need(request)
        won = sum(len(other.own_pages()) + self.promise(other) for other in victims)
        if not victims or not self._affordable(need - won):
            return False
        for victim in sorted(victims, key=self._waiting.rank, reverse=True):
            self.suspend(victim, plan)
            if self._try_admit(request, plan):
                return True
            if self._places.has_slot and self._supply.pool.resting:
                # A suspended request needs pages at once, and these come free without another victim.
                return False
        return False

    @staticmethod
    def settled(request: Request, plan: TickPlan) -> bool:
        """Whether a running request has had a tick of its own since it got its place (a resumed one waits for one)."""
        return request.placed_at < plan.number - 1

    # -- leaving -------------------------------------------------------------------------------------------------

    def suspend(self, request: Request, plan: TickPlan) -> None:
        """Take a running request's place and pages; its state goes to host memory when the plan runs."""
        pages = [page for pages in request.lists for page in pages]
        rows = [row for chunk in request.chunks for row in chunk.rows]
        # What the plan was about to give it is void; the copy is of the state after the ticks before this one.
        plan.grants = [grant for grant in plan.grants if grant.slot != request.slot]
        plan.suspensions.append(Suspension(request, request.slot, pages, rows))
        request.resumes_in = request.stage
        request.suspended_at = plan.number
        request.sizes = [len(pages) for pages in request.lists]
        # Its pages will be its own when it comes back, not blocks to build upon.
        request.chain, request.offered = None, len(request.prompt)
        self.vacate(request)
        request.move(Stage.SUSPENDED)
        self._waiting.add(request)
        self.preemptions += 1

    def vacate(self, request: Request) -> None:
        """Take a running request's place and pages."""
        self._promised -= self.promise(request)
        if request.stage is Stage.DECODE:
            request.used = self._supply.book.close(request.slot)
        self._supply.drop(request)
        self._places.leave(request)

    # -- promises ------------------------------------------------------------------------------------------------

    def promise(self, request: Request) -> int:
        """Pages that a running request may still need: its prompt's, or without preemption all there can be."""
        if not self._policy.preemption:
            owned = sum(map(len, request.lists))
            # The prompt's planes may have been more than the planes of decoding.
            return max(0, self._supply.most_pages(request) - owned)
        if request.stage is Stage.DECODE:
            return 0
        return self._supply.prompt_missing(request, len(request.prompt))

    def renew(self, request: Request, promised: int) -> None:
        """The promise to a running request was `promised` and may have changed."""
        self._promised += self.promise(request) - promised

    def supplied(self, pages: int) -> None:
        """Decoding requests got `pages`, of those that they were promised."""
        if not self._policy.preemption:
            self._promised -= pages

    def check_integrity(self) -> None:
        """Assert that the sum of promises is theirs who run."""
        assert self._promised == sum(map(self.promise, self._places.running))
