"""An answerer that knows what a test tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rlt.evals.answers import Answer, Asked


@dataclass
class FakeAnswerer:
    """Gives `reply(question)`, the last question first, as a busy server might."""

    reply: Callable[[Asked], Answer]
    model: str = "fake"
    loops: int | None = 4
    full_depth: str | None = None
    exit_rule: str | None = "ouro"
    settings: dict[str, object] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    closed: bool = False

    def answers(self, asked: Sequence[Asked]) -> Iterator[tuple[int, Answer]]:
        for index in reversed(range(len(asked))):
            self.asked.append(asked[index])
            yield index, self.reply(asked[index])

    def close(self) -> None:
        self.closed = True
