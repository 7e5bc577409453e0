"""What an evaluation asks and gets back, whoever answers: a model in this process or a server. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rlt.errors import RltError
from rlt.text.tags import THINK, THINK_END
from rlt_protocols.params import SamplingParams

Message = dict[str, str]
#: a text to continue, or the messages of a conversation whose next one is asked for
Prompt = str | list[Message]

#: what a server says to requests that it will never take, as against those that it failed on
REFUSED = frozenset({400, 422})


class EvalError(RltError):
    """An evaluation could not be made, or not finished."""


class Asked(NamedTuple):
    """One question as it is sent."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. With an `error`, nothing else is of use.

    `tokens` and `loops` (the sum over the answer's tokens) are None where the answerer does not tell. `reasoning` is
    what was split off as such.
    """

    text: str = ""
    tokens: int | None = None
    loops: int | None = None
    finish_reason: str | None = None
    reasoning: str | None = None
    error: str | None = None
    #: the error is one of the request: asking again is of no use
    refused: bool = False

    @property
    def reply(self) -> str:
        """The text without reasoning that nobody split off: what follows the last `</think>`. Reasoning that has not
        ended has no reply."""
        _, end, after = self.text.rpartition(THINK_END)
        return after if end or not self.text.lstrip().startswith(THINK) else ""


class Answerer(Protocol):
    """A model in this process (`rlt.evals.offline`) or a server (`rlt.evals.endpoint`)."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def loops(self) -> int | None:
        """Loops at full depth; None: a server that does not say, so that no request may have a field about loops."""

    @property
    def full_depth(self) -> str | None:
        """Why every token runs all loops; None where they need not, or where that is not known."""

    @property
    def exit_rule(self) -> str | None:
        """The name of the exit rule, or None where that is not known."""

    @property
    def settings(self) -> dict[str, object]:
        """What the answers depend on beside the questions, as far as it is known."""

    def answers(self, asked: Sequence[Asked]) -> Iterator[tuple[int, Answer]]:
        """Ask all of it, many at a time, and yield each answer with the index of its question, in any order.

        A question that fails has an answer with an error. Leaving the generator early drops what is still open.
        """

    def close(self) -> None:
        """Give back what it holds."""


def collect(answerer: Answerer, asked: Sequence[Asked], step: Callable[[], None]) -> list[Answer]:
    """All answers in the order of their questions; `step` is called after each."""
    answers: dict[int, Answer] = {}
    for index, answer in answerer.answers(asked):
        answers[index] = answer
        step()
    return [answers[index] for index in range(len(asked))]


def loops_per_token(counts: Sequence[tuple[int | None, int | None]]) -> float | None:
    """The mean over answers' (tokens, loops); None if there are no tokens, or if any answer does not tell."""
    known = [(tokens, loops) for tokens, loops in counts if tokens is not None and loops is not None]
    tokens = sum(tokens for tokens, _ in known)
    return sum(loops for _, loops in known) / tokens if tokens and len(known) == len(counts) else None
