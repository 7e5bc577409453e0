"""Which processes live, and in which generation."""

from __future__ import annotations

from dataclasses import dataclass

from rlt_protocols.control import PeerDown, PeerUp, Role
from rlt_protocols.engine import Route
from rlt_protocols.params import ModelInfo


@dataclass(frozen=True, slots=True)
class Target:
    """Where a new request goes."""

    engine: int
    route: Route


class Peers:
    """The frontend's view of the other processes, as the supervisor tells it."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._alive: dict[tuple[Role, int], int] = {}
        self._down: set[tuple[Role, int]] = set()
        #: what is served; kept while an engine restarts
        self.info: ModelInfo | None = None

    @property
    def healthy(self) -> bool:
        """False while a process that has been up is not."""
        return not self._down

    @property
    def ready(self) -> bool:
        return self.info is not None and bool(self._engines()) and ("detokenizer", 0) in self._alive

    def up(self, peer: PeerUp) -> int | None:
        """Note another process; returns the generation that it replaces, if that one has not been reported dead."""
        key = (peer.role, peer.index)
        old = self._alive.get(key)
        self._alive[key] = peer.generation
        self._down.discard(key)
        if peer.info is not None:
            self.info = peer.info
        return old if old is not None and old < peer.generation else None

    def down(self, peer: PeerDown) -> None:
        key = (peer.role, peer.index)
        # An earlier life of this process is no news.
        if peer.role != "frontend" and self._alive.get(key, peer.generation) <= peer.generation:
            self._alive.pop(key, None)
            self._down.add(key)

    def is_alive(self, role: Role, index: int, generation: int) -> bool:
        return self._alive.get((role, index)) == generation

    def target(self, load: dict[int, int]) -> Target | None:
        """The ready engine with the least `load` (requests by engine index), or None when nothing can run."""
        if not self.ready:
            return None
        engine = min(self._engines(), key=lambda index: (load.get(index, 0), index))
        route = Route(self._generation, self._alive["engine", engine], self._alive["detokenizer", 0])
        return Target(engine, route)

    def _engines(self) -> list[int]:
        return [index for role, index in self._alive if role == "engine"]
