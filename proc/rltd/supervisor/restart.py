"""When a dead process is started again, and when the daemon gives up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Times and counts of the supervisor."""

    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    #: a process that was ready for this long has recovered: its earlier deaths are forgotten
    healthy_s: float = 60.0
    #: restarts in a row of one process
    restarts: int = 5
    #: how much longer than the drain's own limit the supervisor waits for `Drained`
    drain_grace_s: float = 2.0
    #: from `Stop` to SIGKILL
    stop_grace_s: float = 3.0
    #: from the end of a child's pipe to SIGKILL
    link_grace_s: float = 0.3
    #: how long the last output of a dead child may take
    output_grace_s: float = 1.0
    #: how long a child may take to answer a status query
    status_s: float = 1.0
    #: between two looks whether the run directory is still there
    run_dir_s: float = 1.0
    #: between two questions to a ready child whether it still answers
    ping_s: float = 2.5
    #: silence after which a child is shown as hung
    hung_s: float = 5.0
    #: silence after which it is killed; an engine answers between two ticks only
    hung_after_s: float = 30.0


class Backoff:
    """Counts the deaths of one process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._deaths = 0

    def after_death(self, ready_s: float) -> float | None:
        """Return how long to wait before the next start, or None to give up.

        `ready_s` is for how long the dead process had been ready.
        """
        if ready_s >= self._limits.healthy_s:
            self._deaths = 0
        self._deaths += 1
        if self._deaths > self._limits.restarts:
            return None
        delay_s: float = self._limits.first_backoff_s * 2 ** (self._deaths - 1)
        return min(delay_s, self._limits.max_backoff_s)
