"""Requests that wait for a place, in the order in which they are served. No torch here."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from rlt.sched.request import Request

Rank = tuple[bool, int, int]


class WaitingLine:
    """New and suspended requests by rank: urgent ones by arrival, then the others by priority (if asked) and arrival.

    A request may be passed by at most `max_bypass` requests that arrived later; then it is urgent: it goes to the
    front, and nobody is admitted before it any more. So nobody starves.
    """

    def __init__(self, *, priority: bool, max_bypass: int) -> None:
        self._priority = priority
        self._max_bypass = max_bypass
        self._line: list[Request] = []

    def rank(self, request: Request) -> Rank:
        """Smaller is served first."""
        if request.urgent or not self._priority:
            return (not request.urgent, 0, request.number)
        return (True, request.params.priority, request.number)

    def add(self, request: Request) -> None:
        if self._max_bypass == 0:
            request.urgent = True
        insort(self._line, request, key=self.rank)

    def remove(self, request: Request) -> None:
        self._line.remove(request)

    def admitted(self, request: Request) -> None:
        """Take out a request that was given a place, and count it for those that it passed."""
        self._line.remove(request)
        late = False
        for other in self._line:
            if other.number > request.number:
                continue
            other.passed += 1
            if other.passed >= self._max_bypass and not other.urgent:
                other.urgent = late = True
        if late:
            self._line.sort(key=self.rank)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

    def __len__(self) -> int:
        return len(self._line)

    def __getitem__(self, index: int) -> Request:
        return self._line[index]
